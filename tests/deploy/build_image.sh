#!/bin/sh
# Builds the image without a container engine: Debian's buildah, and a root file system by debootstrap in the place of the
# base image. Prints the folder with the image's files, and under it what `buildah inspect` says of it. Needs root.
#
#   sh tests/deploy/build_image.sh FOLDER     FOLDER keeps the base image for the next time; remove it to begin anew
#
# pip reaches its index as it is set up on this machine: its configuration and the machine's CA list are mounted while the
# image is built, and are not in it.
set -eu

here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
home=$(cd "$1" && pwd)
base=$(sed -n 's/^FROM \([^ ]*\) AS build$/\1/p' "$here/Dockerfile")
suite=${base##*-}
export BUILDAH_ISOLATION=chroot

buildah() {
    command buildah --root "$home/store" --runroot "$home/run" "$@"
}

if ! buildah inspect --type image "docker.io/library/$base" >/dev/null 2>&1; then
    container=$(buildah from scratch)
    root=$(buildah mount "$container")
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" >&2
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    ln -s /usr/bin/python3 "$root/usr/local/bin/python" # where the real base image has it
    buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --format docker --rm "$container" "docker.io/library/$base" >&2
fi

set --
[ ! -f /etc/pip.conf ] || set -- "$@" --secret id=pip.conf,src=/etc/pip.conf
certificates=/etc/ssl/certs/ca-certificates.crt
[ ! -f $certificates ] || set -- "$@" --volume $certificates:$certificates:ro
buildah build --quiet --pull-never --format docker --network host "$@" \
    --build-arg VERSION=test --tag localhost/epochgate:test "$here" >&2

buildah rm epochgate-test >/dev/null 2>&1 || true
buildah from --pull-never --name epochgate-test localhost/epochgate:test >&2
buildah mount epochgate-test
buildah inspect --type image localhost/epochgate:test

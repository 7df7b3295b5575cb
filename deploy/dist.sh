#!/bin/sh
# Builds the wheel and its bill of materials (CycloneDX), the same bytes wherever and whenever it is run:
#
#   SOURCE_DATE_EPOCH=1796000000 sh deploy/dist.sh VENV FOLDER
#
# VENV has what deploy/image/build.txt pins. The sources are copied first, so that nothing of an earlier build gets in.
set -eu
umask 022
here=$(cd "$(dirname "$0")/.." && pwd)
tools=$(cd "$1" && pwd)/bin
mkdir -p "$2"
to=$(cd "$2" && pwd)
: "${SOURCE_DATE_EPOCH:?the time that the wheel says it was made at, in seconds since 1970}"
export SOURCE_DATE_EPOCH PYTHONDONTWRITEBYTECODE=1

from=$(mktemp -d)
trap 'rm -rf "$from"' EXIT
cd "$here"
cp pyproject.toml README.md LICENSE "$from"
find proxy -type d ! -name __pycache__ ! -name '*.egg-info' -exec mkdir -p "$from/{}" \;
find proxy -type f ! -path '*/__pycache__/*' ! -path '*.egg-info/*' -exec cp {} "$from/{}" \;
find "$from" -type f -exec chmod 644 {} +

"$tools/python" -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation --wheel-dir "$to" "$from"
PYTHONWARNINGS=ignore "$tools/cyclonedx-py" requirements requirements/run.txt --pyproject pyproject.toml \
    --output-reproducible --output-format JSON --output-file "$to/epochgate.cdx.json"

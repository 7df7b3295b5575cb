#!/bin/sh
# Write the pinned requirements anew, with hashes and without the addresses that they came from. Needs uv.
# Files that are pinned by hand, those of other products that the tests and the benchmark run, get their hashes.
set -eu
cd "$(dirname "$0")/.."
flags="--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet"
# shellcheck disable=SC2086
{
    uv pip compile $flags pyproject.toml -o requirements/run.txt
    uv pip compile $flags requirements/test.in -c requirements/run.txt -o requirements/test.txt
    uv pip compile $flags requirements/fuzz.in -o requirements/fuzz.txt
    uv pip compile $flags requirements/audit.in -o requirements/audit.txt
    uv pip compile $flags requirements/build.in -o requirements/build.txt
    uv pip compile $flags deploy/image/build.in -o deploy/image/build.txt
}
for pinned in bench/requirements-*.txt tests/interop/requirements-*.txt tests/probe/requirements-*.txt; do
    title=$(head -n 1 "$pinned")
    # shellcheck disable=SC2086
    hashed=$(grep -v '^#' "$pinned" | grep -v -- '^ *--hash' | sed 's/ *\\$//' |
        uv pip compile ${flags%--universal*} ${flags#--universal --python-version 3.11} --no-deps -)
    printf '%s\n%s\n' "$title" "$hashed" >"$pinned"
done

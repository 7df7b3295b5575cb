#!/bin/sh
# Write the pinned requirements anew, with hashes and without the addresses that they came from. Needs uv.
set -eu
cd "$(dirname "$0")/.."
flags="--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet"
# shellcheck disable=SC2086
uv pip compile $flags pyproject.toml -o requirements/run.txt
# shellcheck disable=SC2086
uv pip compile $flags requirements/test.in -c requirements/run.txt -o requirements/test.txt
# shellcheck disable=SC2086
uv pip compile $flags requirements/fuzz.in -o requirements/fuzz.txt

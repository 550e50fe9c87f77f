#!/usr/bin/env bash
# Everything that has to pass: ruff, its formatting, mypy, then all tests. With the name of a tier, only its tests.
#
#   scripts/test.sh                              everything, as continuous integration
#   scripts/test.sh unit                         the tests that need no TensorFlow, in seconds; also: engine, process
#   scripts/test.sh nightly                      what takes too long for every change: the figures of the gallery, and
#                                                other versions of TensorFlow
#   scripts/test.sh [ARGUMENTS FOR PYTEST]       all checks, and some tests: tests/unit/config -k overrides
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh
unset PYTHONDONTWRITEBYTECODE # the tests start some 200 processes, and each would compile our modules anew

step() {
    printf '[test] %s\n' "$*"
    .venv/bin/python -m "$@"
}

versions=
case "${1:-}" in
unit | engine | process)
    tier=$1
    shift
    set -- "tests/$tier" "$@"
    ;;
nightly)
    shift
    [[ $# -gt 0 ]] || versions="2.19 2.21"
    set -- -m nightly "$@"
    ;;
*)
    step ruff check .
    step ruff format --check --quiet .
    step mypy
    ;;
esac
# Three workers on two cores, since some of the time is waits for other processes: 9 minutes in place of 10 where it was
# measured, with 7 GB of memory (`-n 2` as an argument takes less). Each imports TensorFlow once (8 s). A file stays with one
# worker, so that what its tests share (a trained model, a warm process) is made once. Files come in the order of
# tests/conftest.py: by default those with the fewest tests come last, which are the longest, and one worker would wait
# minutes for the others.
step pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
for version in $versions; do
    bash scripts/wheel.sh "$version"
done

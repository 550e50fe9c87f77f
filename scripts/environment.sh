#!/usr/bin/env bash
# Makes .venv in the checkout from requirements.lock; does nothing when it is there and up to date.
#
#   bash scripts/environment.sh
#
# Needs Python 3.11 to 3.13 with pip; PYTHON=/path/to/python chooses which. Packages come from wherever pip is configured
# to take them; only files with the hashes of the lock are accepted.
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null # a closed stdin would be taken by the first file that is opened

cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/made-from            # written last: the checkout's path, the hash of what .venv was made from
unfinished=.venv/set-up-unfinished # there while a set-up runs, and after one that was interrupted

say() { printf '[environment] %s\n' "$*"; }

wanted() {
    pwd
    cat requirements.lock pyproject.toml | (sha256sum 2>/dev/null || shasum -a 256)
}

up_to_date() { [[ -x .venv/bin/python && ! -e $unfinished && -e $stamp && $(<"$stamp") == "$(wanted)" ]]; }

# A .venv that is half made, broken, or was moved from another checkout is not worth repairing.
worth_keeping() {
    [[ -x .venv/bin/python && ! -e $unfinished ]] && { [[ ! -e $stamp ]] || [[ $(head -n 1 "$stamp") == "$PWD" ]]; }
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.11 to 3.13 with the modules venv and ensurepip was found; install one (on Debian and Ubuntu:" \
        "python3 and python3-venv), or give its path as PYTHON=..." >&2
    return 2
}

# On a terminal pip shows its progress.
pip_install() {
    [[ -t 1 ]] || set -- -qq "$@"
    .venv/bin/python -m pip install --disable-pip-version-check --no-input "$@"
}

# What builds packages comes from the lock too, so it goes first and builds run without isolation.
build_tools() { awk '/^[^ ]/ { keep = /^(setuptools|setuptools-scm|wheel|packaging|tomli|typing-extensions)==/ } keep' requirements.lock; }

set_up() {
    if ! worth_keeping; then
        local python
        python=$(find_python)
        say "making .venv with $("$python" --version 2>&1)"
        rm -rf .venv
        mkdir .venv
        touch $unfinished
        "$python" -m venv .venv
    fi
    touch $unfinished
    say "installing requirements.lock (about 3 GB and two minutes when nothing is there yet)"
    pip_install --require-hashes --no-deps -r <(build_tools)
    pip_install --require-hashes --no-build-isolation -r requirements.lock
    pip_install --no-deps --no-build-isolation --no-index -e .
    wanted >"$stamp"
    rm $unfinished
    say "done"
}

if command -v flock >/dev/null; then
    exec 9<requirements.lock
    flock 9 # two scripts started at once: the second finds the work done
fi
up_to_date || set_up

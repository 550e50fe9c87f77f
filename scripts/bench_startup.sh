#!/usr/bin/env bash
# How long a user waits for a mistake, for --help and for the first step, beside Model Garden; and how memory grows.
# Prints figures and judges nothing. Takes about four minutes; the machine should be otherwise idle.
#
#   scripts/bench_startup.sh [--rounds=5] [--skip-memory]
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh
exec .venv/bin/python -m scripts.bench_startup "$@"

#!/usr/bin/env bash
# How fast trainer_kit is, beside a loop by hand, Keras' fit and Model Garden: a table, and JSON in runs/bench. Takes
# about an hour on two cores (--quick: some minutes; --growth, how cost grows: up to an hour); the machine should be
# otherwise idle. Exit code 1: a row could not be measured.
#
#   scripts/bench.sh [--quick | --growth] [--only=SECTION,SECTION/ROW] [--rounds=N] [--out=FOLDER] [--help]
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh
exec .venv/bin/python -m scripts.bench "$@"

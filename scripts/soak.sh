#!/usr/bin/env bash
# Trains under a supervisor, with a continuous_eval sidecar, while faults of all kinds hit both; then compares with a run
# that nothing happened to. Prints each fault as it comes, and a table. Exit code 0: nothing differs, nobody had to help.
#
#   scripts/soak.sh [MINUTES=20] [SEED=0] [--keep]
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/environment.sh
exec .venv/bin/python -m scripts.soak "$@"

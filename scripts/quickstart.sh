#!/usr/bin/env bash
# Trains and evaluates the experiment `digits` on a fresh machine, through the same command that any experiment uses.
#
#   scripts/quickstart.sh [MODEL_DIR]       MODEL_DIR: runs/digits in the checkout, unless given
#
# Run again, it goes on from what MODEL_DIR holds; a finished run says so.
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model_dir=${1:-$root/runs/digits}
[[ $model_dir == /* || $model_dir == *://* ]] || model_dir=$PWD/$model_dir

bash "$root/scripts/environment.sh"
cd "$root"
command=(.venv/bin/python -m trainer_kit.train --experiment=digits --mode=train_and_eval "--model_dir=$model_dir")
printf '[quickstart] %s\n' "${command[*]}"
"${command[@]}"

printf '\n[quickstart] results in %s:\n' "$model_dir"
describe() { [[ ! -e $model_dir/$1 ]] || printf '  %-22s %s\n' "$1" "$2"; }
describe final.json "the metrics at the end"
describe best_ckpt/info.json "the best evaluation; its weights are beside it"
describe metrics.jsonl "all metrics, one record a line"
describe params.yaml "the whole config: --config_file=$model_dir/params.yaml runs it again"
describe train "TensorBoard events: .venv/bin/tensorboard --logdir=$model_dir"

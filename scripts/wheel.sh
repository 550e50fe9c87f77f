#!/usr/bin/env bash
# Installs trainer_kit as its users do: a wheel in an empty environment, without TF Model Garden. There it makes a project
# in an empty folder, runs its test, trains it, and runs the tests of what works without Model Garden.
#
#   scripts/wheel.sh                             with the versions of requirements.lock
#   scripts/wheel.sh 2.19                        with another TensorFlow, and then the tests of the engine and of kills
set -euo pipefail
{ : <&0; } 2>/dev/null || exec </dev/null

version=${1:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/environment.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
say() { printf '[wheel] %s\n' "$*"; }

# An installed package must not find the checkout's files.
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

say "building an sdist and, from it, a wheel"
.venv/bin/python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$folder" >"$folder/build.log" ||
    { cat "$folder/build.log"; exit 1; }
.venv/bin/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir="$folder" "$folder"/*.tar.gz

say "installing the wheel"
sed -n -E 's/^([^ ].*==.*) \\$/\1/p' requirements.lock >"$folder/constraints.txt"
extras=experiments
packages=(pytest hypothesis)
if [[ $version ]]; then
    # These versions depend on that of TensorFlow.
    sed -i -E '/^(tensorflow|tensorboard|tf-keras|keras|numpy|h5py|ml-dtypes|protobuf|onnx)==/d' "$folder/constraints.txt"
    extras=experiments,export,sweep,tensorpack
    packages+=("tensorflow==$version.*" opencv-python-headless pytest-xdist)
fi
SECONDS=0
.venv/bin/python -m venv "$folder/env"
wheel=$(echo "$folder"/*.whl)
"$folder/env/bin/python" -m pip install -qq --constraint="$folder/constraints.txt" "$wheel[$extras]" "${packages[@]}"
say "installed in $SECONDS s: $(du -sm "$folder/env" | cut -f1) MB"
"$folder/env/bin/python" -m pip check

cd "$folder"
PATH="$folder/env/bin:$PATH"
SECONDS=0
trainer-kit init my_project
cd my_project
python -m pytest -q
trainer-kit train --experiment=circle --mode=train_and_eval --model_dir=runs/first
say "from an empty folder to a trained model: $SECONDS s"
trainer-kit train --experiment=digits --mode=train_and_eval --model_dir=runs/digits --params_override=trainer.train_steps=200

say "importing all modules, and testing what works without TF Model Garden"
cp -r "$root/tests" "$folder/tests"
cd "$folder"
python - <<'END'
import importlib, pkgutil, trainer_kit

assert "site-packages" in trainer_kit.__file__, trainer_kit.__file__
# What needs another extra, and what runs when it is imported.
packages = ("compat.model_garden.", "compat.tensorpack", "sweep", "__main__")
for module in pkgutil.walk_packages(trainer_kit.__path__, "trainer_kit.", onerror=lambda name: None):
    if not module.name.removeprefix("trainer_kit.").startswith(packages):
        importlib.import_module(module.name)
END
PYTHONPATH=$folder python -m pytest -q -c /dev/null --rootdir="$folder" --import-mode=importlib -p no:cacheprovider tests/engine/compat/pipelines/test_training.py \
    tests/engine/compat/keras/test_hand_written_loop.py tests/engine/compat/keras/test_history.py
[[ $version ]] || exit 0

say "testing the engine with TensorFlow $version"
cd "$root"
PYTHONPATH=$root python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -p no:cacheprovider tests/engine tests/process/end_to_end \
    --ignore=tests/engine/compat/model_garden

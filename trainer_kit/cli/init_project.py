"""Makes a folder for a new project from a shipped experiment. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from pathlib import Path

from trainer_kit.config.discovery import SHIPPED_FOLDER, list_shipped_experiments
from trainer_kit.errors import ExitCode, UsageError, suggest_names

EXAMPLE = "trainer-kit init my_project --experiment=tabular"

_FIRST_EXPERIMENT = "circle"

# NAME stands for the experiment.
_README = """\
# A project with trainer_kit

`experiments/` has the experiment `NAME`: its settings, model, data, loss and metrics. Replace them
by your own. Run all commands in this folder.

```bash
trainer-kit check NAME      # tries each part of a run with a few steps
trainer-kit train --experiment=NAME --mode=train_and_eval --model_dir=runs/first
trainer-kit runs runs       # what has been reached, and where
python -m pytest            # the test in tests/; needs pip install pytest
```

After a stop the same command goes on from the newest checkpoint.

- `trainer-kit show NAME` lists all values. `--params_override=learning_rate=0.01` changes one, and
  `--config_file=configs/short.yaml` those that the file has.
- `trainer-kit list` lists experiments. It finds each module in `experiments/`.
"""
_CONFIG = """\
# A short run, to try a change: --config_file=configs/short.yaml
trainer:
  train_steps: 100
"""
_TEST = '''\
"""Trains a few steps."""

import experiments.NAME  # registers the experiment
import trainer_kit as tk


def test_the_experiment_trains_and_evaluates(tmp_path):
    steps = {"train_steps": 10, "validation_interval": 10, "validation_steps": 2}
    config = tk.get_experiment("NAME").replace(trainer=steps)

    _, metrics = tk.launch(config, "train_and_eval", str(tmp_path / "run"))

    assert metrics
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folder and --experiment."""
    parser.add_argument("folder", metavar="FOLDER", help="The folder to make.")
    names = ", ".join(list_shipped_experiments())
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        default=_FIRST_EXPERIMENT,
        help=f"The shipped experiment to begin with: {names}.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the files of the project.

    Raises:
      UsageError: When the folder exists or cannot be made, or no shipped experiment has the name.
    """
    folder = Path(arguments.folder).expanduser()
    name = arguments.experiment
    if os.path.lexists(folder):
        raise UsageError(f"FOLDER: {folder} exists already; name a new one")
    if name not in list_shipped_experiments():
        advice = suggest_names(name, list_shipped_experiments())
        raise UsageError(f"--experiment: no shipped experiment is called {name!r}; {advice}")

    # A command that is interrupted leaves no folder of this name.
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        _write_project(unfinished, name)
        unfinished.rename(folder)
    except OSError as error:
        raise UsageError(f"FOLDER: {folder} cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

    print(f"made {folder} with the experiment {name}; its README.md has more commands:\n")
    print(f"  cd {shlex.quote(str(folder))}")
    print(f"  trainer-kit train --experiment={name} --mode=train_and_eval --model_dir=runs/first")
    return ExitCode.DONE


def _write_project(folder: Path, name: str) -> None:
    files = {
        "README.md": _README,
        "configs/short.yaml": _CONFIG,
        "tests/test_NAME.py": _TEST,
        "pytest.ini": "[pytest]\npythonpath = .\n",
    }
    texts = {path.replace("NAME", name): text.replace("NAME", name) for path, text in files.items()}

    sources = [*SHIPPED_FOLDER.glob(f"{name}.py"), *SHIPPED_FOLDER.glob(f"{name}/*.py")]
    for source in sources:
        text = source.read_text(encoding="utf-8")
        path = f"experiments/{source.relative_to(SHIPPED_FOLDER)}"
        texts[path] = text.replace("trainer_kit.experiments.", "experiments.")

    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")

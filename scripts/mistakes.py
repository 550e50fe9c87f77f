"""Runs user mistakes as real commands, and prints the message, exit code and time of each.

    .venv/bin/python -m scripts.mistakes

tests/process/end_to_end/test_mistakes.py runs the same list.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from scripts.code_mistakes import CODE_MISTAKES, CodeMistake
from trainer_kit.process.error_report import LINES

ROOT = Path(__file__).parents[1]
BASE = {"experiment": "digits", "mode": "train_and_eval", "model_dir": "{folder}/run"}


@dataclass(frozen=True)
class CommandMistake:
    """A wrong command.

    Attributes:
      name: The description of the mistake.
      flags: Flags that are added to experiment, mode and model_dir, or replace them; `{folder}` is
        a new folder.
      expected: A part of the message.
      code: The exit code.
      files: Files to create first, as (name, text).
      needs_tensorflow: Whether the mistake is found only after importing TensorFlow; others must
        not import it.
    """

    name: str
    flags: dict[str, str | None]
    expected: str
    code: int = 2
    files: tuple[tuple[str, str], ...] = ()
    needs_tensorflow: bool = False


def _format_experiment_module(name: str, method: str) -> str:
    """Returns the text of a module that registers a tiny experiment.

    Its task overrides a method by `method`.
    """
    return f"""
import tensorflow as tf, trainer_kit
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment

@trainer_kit.configclass
class WrongConfig(TinyConfig):
    pass

@trainer_kit.register_task(WrongConfig)
class WrongTask(TinyTask):
    {method.strip()}

@trainer_kit.register_experiment("{name}")
def wrong():
    return tiny_experiment().replace(task=WrongConfig())
"""


def _override(name: str, value: str, expected: str) -> CommandMistake:
    return CommandMistake(name, {"params_override": value}, expected)


# Each line has nine times the values of the one before.
_BOMB = "a: &a [1]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")
)

MISTAKES = [
    CommandMistake("unknown flag", {"experimnt": "digits"}, "did you mean --experiment?"),
    CommandMistake("an argument that is no flag", {"": "train"}, "is not a flag"),
    CommandMistake("flag without a value", {"debug": "maybe"}, "it is neither true nor false"),
    CommandMistake("no experiment", {"experiment": None}, "--experiment: is needed"),
    CommandMistake("no model_dir", {"model_dir": None}, "--model_dir: is needed"),
    CommandMistake("unknown experiment", {"experiment": "digitz"}, "did you mean digits"),
    CommandMistake("unknown mode", {"mode": "train_eval"}, "did you mean train_and_eval"),
    CommandMistake(
        "no window of steps", {"profile": "20:10"}, "--profile: '20:10' ends before it begins"
    ),
    CommandMistake(
        "module that does not exist",
        {"import_module": "no_such_module"},
        "no module is called 'no_such_module'",
    ),
    CommandMistake(
        "file that does not exist", {"import_module": "{folder}/my.py"}, "there is no file"
    ),
    _override("unknown key", "trainer.train_step=5", "did you mean trainer.train_steps"),
    _override("unknown section", "trainr.train_steps=5", "did you mean trainer"),
    _override("unknown key of the task", "task.train_data.batch_size=5", "global_batch_size"),
    _override("text for a number", "trainer.train_steps=abc", "trainer.train_steps"),
    _override("a number in quotes", "trainer.train_steps='5'", "trainer.train_steps"),
    _override("a misspelt unit", "trainer.train_steps=3 epocs", "did you mean '3 epochs'?"),
    _override(
        "a share of nothing",
        "trainer.train_steps=-1,trainer.checkpoint_interval=20 %",
        "is a share of a run that ends when its data ends; set trainer.train_steps",
    ),
    _override("a fraction for a count", "trainer.train_steps=1.5", "trainer.train_steps"),
    _override("a word for a switch", "trainer.train_tf_function=yes", "trainer.train_tf_function"),
    _override("negative train_steps", "trainer.train_steps=-5", "trainer.train_steps"),
    _override(
        "zero checkpoint_interval", "trainer.checkpoint_interval=0", "trainer.checkpoint_interval"
    ),
    _override(
        "negative validation_interval",
        "trainer.validation_interval=-1",
        "trainer.validation_interval",
    ),
    _override("zero validation_steps", "trainer.validation_steps=0", "validation_steps"),
    _override("zero steps_per_loop", "trainer.steps_per_loop=0", "trainer.steps_per_loop"),
    _override(
        "intervals that do not fit",
        "trainer.summary_interval=15,trainer.steps_per_loop=10",
        "15 is not a multiple of steps_per_loop (10)",
    ),
    _override(
        "optimizer that is not there",
        "trainer.optimizer_config.optimizer.type=slide",
        "sgd, adam, adamw",
    ),
    _override(
        "learning rate with a comma",
        "trainer.optimizer_config.learning_rate.constant.learning_rate=0,01",
        "'01' is not a setting; write a.b=c,d=e",
    ),
    _override(
        "unknown schedule by its name",
        "trainer.optimizer_config.learning_rate=cosin",
        "did you mean cosine",
    ),
    _override(
        "strategy as a bool", "runtime.distribution_strategy=false", "runtime.distribution_strategy"
    ),
    _override("unknown strategy", "runtime.distribution_strategy=mirored", "did you mean mirrored"),
    _override("loss scale without float16", "runtime.loss_scale=dynamic", "mixed_precision_dtype"),
    _override("unbalanced list", "task.validation_data.input_path=[a,b", "--params_override"),
    CommandMistake("missing config file", {"config_file": "{folder}/no.yaml"}, "no.yaml"),
    CommandMistake(
        "broken YAML",
        {"config_file": "{folder}/c.yaml"},
        "c.yaml:3",
        files=(("c.yaml", "trainer:\n  a: [1,\n"),),
    ),
    CommandMistake(
        "a key twice in YAML",
        {"config_file": "{folder}/c.yaml"},
        "c.yaml:3",
        files=(("c.yaml", "trainer:\n  train_steps: 1\n  train_steps: 2\n"),),
    ),
    CommandMistake(
        "a YAML bomb",
        {"config_file": "{folder}/c.yaml"},
        "values, aliases counted each time",
        files=(("c.yaml", _BOMB),),
    ),
    CommandMistake(
        "two mistakes of gin",
        {"gin_file": "{folder}/a.gin"},
        "'x' is not a whole number of at least -1, or a duration such as '3 epochs'\n"
        "  TrainrConfig.seed ({folder}/a.gin:1): nothing called TrainrConfig",
        files=(("a.gin", "TrainrConfig.seed = 1\nTrainerConfig.train_steps = 'x'\n"),),
    ),
    CommandMistake("missing gin file", {"gin_file": "{folder}/no.gin"}, "no.gin"),
    CommandMistake("broken gin", {"gin_params": "TrainerConfig.train_steps ="}, "--gin_params"),
    CommandMistake(
        "unknown gin argument", {"gin_params": "TrainerConfig.train_step = 5"}, "train_steps"
    ),
    CommandMistake(
        "model_dir below a file",
        {"model_dir": "{folder}/file/run"},
        "is a file",
        6,
        (("file", ""),),
    ),
    CommandMistake("model_dir that cannot be written", {"model_dir": "/proc/run"}, "/proc", 6),
    CommandMistake(
        "sidecar that cannot write",
        {"model_dir": "{folder}/file/run", "mode": "continuous_eval"},
        "is a file",
        6,
        (("file", ""),),
    ),
    CommandMistake(
        "fine-tuning from nowhere",
        {"mode": "continuous_train_and_eval"},
        "task.init_checkpoint: mode continuous_train_and_eval needs one folder here",
    ),
    CommandMistake(
        "model_dir of another experiment",
        {},
        "holds a run of the experiment 'char_lm'",
        files=(("run/manifest.json", '{"experiment": "char_lm"}'),),
    ),
    CommandMistake(
        "eval without a checkpoint",
        {"mode": "eval"},
        "nothing to evaluate: {folder}/run holds no checkpoint",
    ),
    CommandMistake(
        "misspelt best metric",
        {"params_override": "trainer.best_checkpoint_eval_metric=acuracy"},
        "did you mean accuracy",
        needs_tensorflow=True,
    ),
    CommandMistake(
        "batch that replicas do not divide",
        {"params_override": "runtime.virtual_cpus=3,task.train_data.global_batch_size=32"},
        "task.train_data.global_batch_size",
    ),
    _override(
        "folder that is everything",
        "trainer.best_checkpoint_export_subdir=..",
        "'..' is not a plain folder",
    ),
    _override(
        "folder that is taken",
        "trainer.validation_summary_subdir=train",
        "'train' is a name that trainer",
    ),
    _override(
        "evaluation that goes on at the end",
        "trainer.eval_recreate_iterator=false",
        "validation_steps",
    ),
    _override(
        "fewer tries than none", "trainer.recovery_max_trials=-2", "trainer.recovery_max_trials"
    ),
    CommandMistake(
        "module that ends the program",
        {"import_module": "{folder}/my.py"},
        "my.py ends the program when it is imported: {folder}/my.py:2: SystemExit: 0; guard that"
        " call",
        files=(("my.py", "import sys\nsys.exit(0)\n"),),
    ),
    _override(
        "parameter servers",
        "runtime.distribution_strategy=parameter_server",
        "use multi_worker_mirrored",
    ),
    CommandMistake(
        "a path for a step",
        {"from_step": "runs/x/ckpt-500"},
        "such as 500 or ckpt-500, or 0 to start again",
    ),
    CommandMistake("a negative step", {"from_step": "-1"}, "it is not a whole number of 0 or more"),
    CommandMistake(
        "a checkpoint that is not there", {"from_step": "7"}, "there is no checkpoint of step 7"
    ),
    CommandMistake(
        "name of an evaluation that is taken",
        {"eval_name": "validation"},
        "--eval_name: 'validation' is a name",
    ),
    CommandMistake(
        "tf.data service",
        {"tf_data_service": "grpc://host:1"},
        "no reader of this release uses the tf.data",
    ),
    CommandMistake(
        "change of nothing",
        {"allow_config_change": "trainer.train_step"},
        "did you mean trainer.train_steps",
    ),
    CommandMistake(
        "syntax error in a module",
        {"import_module": "{folder}/my.py"},
        "{folder}/my.py:2: SyntaxError: ",
        files=(("my.py", "a = 1\nb = (\n"),),
    ),
    CommandMistake(
        "library that is not there",
        {"import_module": "{folder}/my.py"},
        "my.py:1: No module named 'no_such_library'",
        files=(("my.py", "import no_such_library\n"),),
    ),
    CommandMistake(
        "wrong config in a factory",
        {"import_module": "{folder}/my.py", "experiment": "wrong"},
        "trainer.train_step (my.wrong): there is no such key; did you mean trainer.train_steps?",
        files=(
            (
                "my.py",
                """
import trainer_kit

@trainer_kit.register_experiment("wrong")
def wrong():
    return trainer_kit.ExperimentConfig(trainer={"train_step": 5})
""",
            ),
        ),
    ),
    CommandMistake(
        "wrong key in config.replace",
        {"import_module": "{folder}/my.py"},
        "trainer.train_step: there is no such key; did you mean trainer.train_steps?\n  given in"
        " {folder}/my.py:3",
        files=(
            (
                "my.py",
                """
import trainer_kit
CONFIG = trainer_kit.ExperimentConfig().replace(trainer={"train_step": 5})
""",
            ),
        ),
    ),
    CommandMistake(
        "unknown gin name",
        {"gin_params": "TrainrConfig.train_steps = 5"},
        "TrainrConfig",
        needs_tensorflow=True,
    ),
    CommandMistake(
        "empty dataset",
        {"import_module": "{folder}/empty.py", "experiment": "empty"},
        "task.train_data",
        5,
        (
            (
                "empty.py",
                _format_experiment_module(
                    "empty",
                    """
    def build_inputs(self, params, input_context=None):
        return super().build_inputs(params).at(0).take(0).repeat()
""",
                ),
            ),
        ),
        needs_tensorflow=True,
    ),
    CommandMistake(
        "loss without a gradient",
        {"import_module": "{folder}/constant.py", "experiment": "constant"},
        "no variable has a gradient",
        2,
        (
            (
                "constant.py",
                _format_experiment_module(
                    "constant",
                    """
    def build_losses(self, labels, model_outputs, aux_losses=None):
        return tf.constant(1.0)
""",
                ),
            ),
        ),
        needs_tensorflow=True,
    ),
    CommandMistake(
        "a transform of (x, y)",
        {"import_module": "{folder}/pair.py", "experiment": "pair"},
        "and for examples of (x, y) unpack inside it",
        2,
        (
            (
                "pair.py",
                _format_experiment_module(
                    "pair",
                    """
    def build_inputs(self, params, input_context=None):
        arrays = tf.zeros([103, 8]), tf.zeros([103], tf.int32)
        return trainer_kit.ArraySource(arrays, params, transform=lambda x, y: (x, y))
""",
                ),
            ),
        ),
        needs_tensorflow=True,
    ),
    CommandMistake(
        "endless validation data",
        {"import_module": "{folder}/endless.py", "experiment": "endless"},
        "trainer.validation_steps",
        5,
        (
            (
                "endless.py",
                _format_experiment_module(
                    "endless",
                    """
    def build_inputs(self, params, input_context=None):
        return super().build_inputs(params).at(0).repeat()
""",
                ),
            ),
        ),
        needs_tensorflow=True,
    ),
    CommandMistake(
        "loss for each example",
        {"import_module": "{folder}/vector.py", "experiment": "vector"},
        "build_losses has to return a scalar",
        2,
        (
            (
                "vector.py",
                _format_experiment_module(
                    "vector",
                    """
    def build_losses(self, labels, model_outputs, aux_losses=None):
        return tf.reduce_sum(model_outputs, axis=1)
""",
                ),
            ),
        ),
        needs_tensorflow=True,
    ),
]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mistake.

    It has the exit code, error text, seconds, written files, and whether TensorFlow was imported.

    Event files, which TensorFlow opens with the first loop, do not count as written.
    """

    code: int
    text: str
    seconds: float
    written: list[str]
    imported_tensorflow: bool


def run_command(arguments: list[str]) -> tuple[int, str]:
    """Runs the command, in a process, from the checkout.

    Returns its exit code and what it wrote to standard error.
    """
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer_kit.train", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return done.returncode, done.stderr


def run_mistake(
    mistake: CommandMistake, folder: Path, run: Callable[[list[str]], tuple[int, str]] = run_command
) -> Outcome:
    """Runs the wrong command with `run`, which returns its exit code and its error text."""
    for name, text in mistake.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = {str(path) for path in folder.rglob("*")}
    flags = {**BASE, **mistake.flags}
    command_arguments = [
        f"--{name}={value}" if name else value for name, value in flags.items() if value is not None
    ]
    arguments = [argument.replace("{folder}", str(folder)) for argument in command_arguments]
    start = time.perf_counter()
    code, output = run(arguments)
    seconds = time.perf_counter() - start
    events = {
        str(path) for file in folder.rglob("events.out.tfevents*") for path in (file, *file.parents)
    }
    written = sorted(
        {str(path) for path in folder.rglob("*") if "__pycache__" not in str(path)}
        - before
        - events
    )
    lines = output.splitlines()
    imported = any(
        line.startswith("import time:") and line.split()[-1] == "tensorflow" for line in lines
    )
    errors = [
        line
        for line in lines
        if not line.startswith(("WARNING: All log", "I0000", "E0000", "import time:"))
    ]
    text = "\n".join(
        errors[next((i for i, line in enumerate(errors) if line.startswith("error")), 0) :]
    )
    return Outcome(code, text, seconds, written, imported)


def is_reported(mistake: CommandMistake, outcome: Outcome, folder: Path) -> bool:
    """Whether the outcome is as expected.

    The message and the exit code are, no files are written, and TensorFlow is imported only if
    needed.
    """
    expected = mistake.expected.replace("{folder}", str(folder))
    told = (
        outcome.code == mistake.code
        and expected in outcome.text
        and "Traceback" not in outcome.text
    )
    return told and not outcome.written and outcome.imported_tensorflow == mistake.needs_tensorflow


def run_module(
    mistake: CodeMistake, folder: Path, run: Callable[[list[str]], tuple[int, str]] = run_command
) -> tuple[int, str]:
    """Writes the module of the mistake into `folder` and trains with it.

    Returns the exit code and the last message.
    """
    path = folder / "mine.py"
    path.write_text(mistake.format_module())
    flags = {**BASE, "experiment": "mine", "model_dir": f"{folder}/run", "import_module": str(path)}
    overrides = [f"--params_override={mistake.overrides}"] if mistake.overrides else []
    code, output = run([*(f"--{name}={value}" for name, value in flags.items()), *overrides])
    lines = [
        line for line in output.splitlines(keepends=True) if not line.startswith("import time:")
    ]
    text = "".join(lines)
    return code, text[max(0, text.rfind("\nerror: ") + 1) :]


def find_missing_parts(mistake: CodeMistake, code: int, text: str, folder: Path) -> list[str]:
    """Returns what is wrong with the outcome of a mistake in a module.

    [] when it is reported as expected.
    """
    lines = mistake.format_module().splitlines()
    path = folder / "mine.py"

    def place(match: re.Match[str]) -> str:
        return f"{path}:{next(number for number, line in enumerate(lines, 1) if match[1] in line)}"

    expected = [re.sub(r"\{line:(.+?)\}(?=[,:])", place, part) for part in mistake.expected]
    problems = [f"exit {mistake.code}, not {code}"] if code != mistake.code else []
    problems += [f"the message lacks: {part}" for part in expected if part not in text]
    problems += ["a traceback"] if "Traceback" in text else []
    return problems + ([f"more than {LINES} lines"] if text.count("\n") > LINES else [])


def main() -> int:
    """Prints the table; returns the number of mistakes that were not reported as expected."""
    wrong = 0
    for code_mistake in CODE_MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            code, text = run_module(code_mistake, Path(folder))
            missing = find_missing_parts(code_mistake, code, text, Path(folder))
        wrong += bool(missing)
        mark = f"  <-- WRONG: {'; '.join(missing)}" if missing else ""
        print(
            f"{code_mistake.name}: exit {code}, {text.count(chr(10))} lines{mark}\n    {text}",
            flush=True,
        )
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_mistake(mistake, Path(folder))
            good = is_reported(mistake, outcome, Path(folder))
        wrong += not good
        marks = "" if good else "  <-- WRONG"
        if mistake.needs_tensorflow:
            marks += "  (needs TensorFlow)"
        print(f"{mistake.name}: exit {outcome.code}, {outcome.seconds:.2f} s{marks}")
        print(f"    {outcome.text}", flush=True)
    print(f"{len(MISTAKES) + len(CODE_MISTAKES)} mistakes, {wrong} not reported as expected")
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""`trainer-kit check`: one line for each check, a message for what fails, nothing left behind."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from tests.process.end_to_end.tracked_experiment import FileTracker
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.cli.main import main
from trainer_kit.config.experiment_registry import register_experiment, register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import ExitCode
from trainer_kit.testing import TinyConfig, tiny_arrays

_numbers = itertools.count()

_FILE = """
import trainer_kit
from tests.engine.linear_task import linear_experiment


@trainer_kit.register_experiment("mine/tiny")
def tiny():
    return linear_experiment(best_checkpoint_eval_metric="accuracy")
"""


@configclass
class _FailingConfig(TinyConfig):
    pass


@register_task(_FailingConfig)
class _FailingTask(LinearTask):
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        raise RuntimeError("a bug in train_step")


@configclass
class _NotFiniteConfig(TinyConfig):
    pass


@register_task(_NotFiniteConfig)
class _NotFiniteTask(LinearTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return tf.math.log(-tf.reduce_sum(tf.square(model_outputs)))


@configclass
class _TwoBatchesConfig(TinyConfig):
    pass


@register_task(_TwoBatchesConfig)
class _TwoBatchesTask(LinearTask):
    """Trains on a dataset that ends after two batches."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        if not params.is_training:
            return super().build_inputs(params, input_context)
        return tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(64)


@configclass
class _NestedConfig(TinyConfig):
    pass


@register_task(_NestedConfig)
class _NestedTask(LinearTask):
    """Metrics that only an evaluation can name."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return True

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"far": {"accuracy": 0.5}}


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command here, without a process of its own, on the tiny experiment with another task
    section.
    """

    def run(*arguments: str, task: TinyConfig | None = None) -> tuple[int, str, str]:
        name = f"checked_{next(_numbers)}"
        register_experiment(name)(lambda: linear_experiment().replace(task=task or LinearConfig()))
        capfd.readouterr()
        code = main(["check", name, *arguments])
        return code, *capfd.readouterr()

    return run


Check = Callable[..., tuple[int, str, str]]


def test_the_command_checks_everything_and_leaves_nothing_behind(
    trainer_kit: Callable[..., subprocess.CompletedProcess[str]],
    here: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (here / "mine.py").write_text(_FILE)

    done = trainer_kit("check", "mine/tiny", "--import_module=mine.py")

    assert done.returncode == 0, done.stderr
    checks = [
        line.split("  ")[-1].split(":")[0].split(" (")[0]
        for line in done.stdout.splitlines()
        if "ok " in line
    ]
    assert checks == [
        "config",
        "task",
        "machine",
        "model, optimizer and metrics can be built",
        "best metric",
        "data",
        "start",
        "train",
        "save",
        "evaluate",
        "end",
        "restore",
    ]
    assert "mine/tiny is ready to run" in done.stdout.splitlines()[-1]
    assert "training_loss" in done.stdout
    assert "      optimizer slots of " in done.stdout
    assert "FAIL" not in done.stdout
    assert [path.name for path in here.iterdir()] == ["mine.py"]
    # TensorFlow leaves the code that it traced until the process ends.
    assert all(path.name.startswith("__autograph") for path in temporary.iterdir())


BEST = "trainer.best_checkpoint_eval_metric"


@pytest.mark.parametrize(
    ("setting", "task", "code", "failed", "message"),
    [
        (
            f"{BEST}=acuracy",
            None,
            2,
            "best metric: acuracy",
            "did you mean accuracy? (all: accuracy, validation_loss)",
        ),
        (
            "trainer.early_stopping.metric=acuracy",
            None,
            2,
            "early stopping: acuracy",
            "did you mean accuracy",
        ),
        (f"{BEST}=near|accuracy", _NestedConfig(), 2, "evaluate", "did you mean far|accuracy"),
        ("runtime.virtual_cpus=4,task.train_data.global_batch_size=6", None, 2, "config", "4 or 8"),
        (
            "task.train_data.global_batch_size=500",
            None,
            5,
            "data",
            "500, but there are 103 examples",
        ),
        (
            "task.validation_data.is_training=true",
            None,
            5,
            "data",
            "task.validation_data never ends",
        ),
        ("", _NotFiniteConfig(), 3, "train", "the cause is the data, the model or the loss"),
        (
            "",
            _TwoBatchesConfig(),
            5,
            "train: 3 steps",
            "task.train_data ended at step 2 of 20; repeat the data",
        ),
        ("", _FailingConfig(), 1, "train: 3 steps", "in train_step\n    raise RuntimeError("),
    ],
)
def test_a_failed_check_has_the_exit_code_of_a_run(
    check: Check, setting: str, task: TinyConfig | None, code: int, failed: str, message: str
) -> None:
    exit_code, out, err = check(f"--params_override={setting}", task=task)

    assert exit_code == code
    assert out.splitlines()[-1].startswith(f"FAIL  {failed}")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("setting", "task"),
    [
        # A metric that only an evaluation can name, and an optimizer that is taken: Adam.
        (f"{BEST}=far|accuracy,trainer.optimizer_config.optimizer=null", _NestedConfig()),
        ("trainer.train_steps=5 epochs", _TwoBatchesConfig()),  # whose data starts again
        ("runtime.virtual_cpus=2,trainer.train_steps=0", None),
    ],
)
def test_an_experiment_that_can_run_is_ready(
    check: Check, setting: str, task: TinyConfig | None
) -> None:
    code, out, err = check(f"--params_override={setting}", task=task)
    assert code == ExitCode.DONE, err
    assert "is ready to run" in out

    has_note = "note: trainer.train_steps is 0, so a run trains nothing" in out
    assert has_note == ("train_steps=0" in setting)


def test_an_unknown_gin_name_fails_when_the_task_is_imported(check: Check) -> None:
    code, out, err = check("--gin_params=no_such_function.rate = 1")
    assert code == ExitCode.USAGE
    assert out.splitlines()[-1].startswith("FAIL  task")
    assert "no_such_function" in err


class _Noting(Callback):
    """Notes what it is asked, and may fail."""

    events: ClassVar[list[str]] = []
    every = 500

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        self.events.append(f"loop_end {run.step}")
        if self._fails:
            raise RuntimeError("a bug in a callback")

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        self.events.append(f"evaluation_end {run.step}")

    def run_end(self, run: Run) -> None:
        self.events.append("run_end")


@pytest.mark.parametrize(("fails", "code"), [(False, ExitCode.DONE), (True, ExitCode.BUG)])
def test_callbacks_are_called_after_a_few_steps(
    check: Check, fails: bool, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    _Noting.events.clear()
    # A check calls no webhook and no tracker, which would fail.
    webhook = "{name: webhook, args: {url: 'http://127.0.0.1:9'}}"
    tracker = f"{{name: '{FileTracker.__module__}:FileTracker', args: {{path: /dev/null/log}}}}"
    noting = f"{{name: '{__name__}:_Noting', args: {{fails: {str(fails).lower()}}}}}"

    callbacks = f"[{webhook}, {tracker}, {noting}]"
    exit_code, out, err = check(f"--params_override=trainer: {{callbacks: {callbacks}}}")

    assert exit_code == code, err
    assert "webhook" not in caplog.text + err
    assert "file_tracker failed" not in caplog.text + err
    if fails:
        assert out.splitlines()[-1].startswith("FAIL  train")
        assert "a bug in a callback" in err
    else:
        assert _Noting.events == ["loop_end 3", "evaluation_end 3", "run_end"]

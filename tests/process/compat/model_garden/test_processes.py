"""Real processes: the programs in docs/guides/porting.md, and kills of several tasks, in one file
to share a server.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import tf_keras
from official.core import base_trainer, task_factory
from official.core import train_utils as theirs

from tests.builders import final_record, free_hosts, json_lines, read_json
from tests.engine.compat.model_garden.garden_task import small_config
from tests.engine.compat.model_garden.tiny import multi_task
from tests.fork_server import ForkServer
from tests.process.compat.model_garden.multitask.registered import (
    train_and_die_at,
    train_and_stop_in_step,
)
from trainer_kit import train
from trainer_kit.compat.model_garden import run_experiment
from trainer_kit.errors import ExitCode
from trainer_kit.testing import compare_runs

ROOT = Path(__file__).parents[4]
STEPS = "--params_override=trainer.train_steps={}"
NEEDS = [
    "official.core.train_lib",
    "official.modeling.multitask.train_lib",
    "trainer_kit.compat.model_garden.multitask",
    "trainer_kit.compat.model_garden.garden_trainer",
]
REGISTERED = "tests.process.compat.model_garden.multitask.registered"
SECONDS = 100.0
# An evaluation once, when all is trained: each start that evaluates traces it again.
INTERVALS = (
    "trainer.train_steps=60,trainer.steps_per_loop=5,trainer.summary_interval=5,"
    "trainer.checkpoint_interval=10,trainer.validation_interval=60"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes in which Model Garden is imported already, but for its vision and its
    language models.
    """
    with ForkServer(needs=NEEDS) as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files of the page."""
    folder = tmp_path_factory.mktemp("port")
    page = (ROOT / "docs" / "guides" / "porting.md").read_text()
    for name in ("rings.py", "before.py", "after.py"):
        text = page.split(f"<!-- port: {name} -->")[1].split("```python\n")[1].split("```")[0]
        (folder / name).write_text(text)
    return folder


def run_program(path: str, *flags: str) -> None:
    """Does what `python PATH FLAGS` does."""
    sys.argv = [path, *flags]
    sys.path[0] = "."
    runpy.run_path(path, run_name="__main__")


def test_a_run_of_their_program_is_resumed_by_all_programs(
    server: ForkServer, folder: Path
) -> None:
    for steps, mode, command in (
        (200, "train", (run_program, "before.py")),
        (400, "train_and_eval", (run_program, "after.py")),
        (600, "train", ("train", "--import_module=rings.py")),
    ):
        flags = ("--experiment=rings", f"--mode={mode}", "--model_dir=run", STEPS.format(steps))
        done = server.run(*command, *flags, folder=str(folder))
        assert done.code == 0, done.text
        assert (folder / "run" / f"ckpt-{steps}.index").exists()

    # Ours went on at 200.
    reports = json_lines(folder / "run" / "metrics.jsonl")
    reported = [report["step"] for report in reports if report["kind"] == "train"]
    assert reported == [300, 400, 500, 600]
    info = read_json(folder / "run" / "best_ckpt" / "info.json")
    assert set(info) == {"accuracy", "validation_loss", "best_ckpt_global_step"}


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("trainer.best_checkpoint_eval_metric=acuracy", ExitCode.USAGE, "did you mean accuracy?"),
        (
            "trainer.trian_steps=4,task.model.widht=3",
            ExitCode.USAGE,
            "did you mean trainer.train_steps?",
        ),
        (
            "",
            ExitCode.USAGE,
            "error: --experiment: no experiment is called 'ringz'; did you mean rings?",
        ),
    ],
)
def test_a_mistake_ends_the_ported_program_with_its_exit_code(
    server: ForkServer, folder: Path, override: str, code: ExitCode, message: str
) -> None:
    flags = (
        "--mode=train_and_eval",
        "--model_dir=none",
        f"--experiment={'rings' if override else 'ringz'}",
        f"--params_override={override}",
    )

    done = server.run(run_program, "after.py", *flags, folder=str(folder))

    assert done.code == code, done.text
    assert message in done.text
    assert "Traceback" not in done.text
    assert not list((folder / "none").glob("best*"))


def test_a_bug_in_the_ported_program_stays_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    lines = ("from trainer_kit.compat.model_garden import app", "app.run(lambda _: None.misspelt)")
    (tmp_path / "bug.py").write_text("\n".join(lines))

    done = server.run(run_program, "bug.py", folder=str(tmp_path))

    assert done.code == 1
    assert "AttributeError" in done.text
    assert "Traceback" in done.text


def test_a_kill_a_sigterm_and_other_starts_change_no_bit(
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    multi_task.write(tmp_path / "data")
    monkeypatch.setenv("TINY_DATA", str(tmp_path / "data"))
    flags = [
        f"--import_module={REGISTERED}",
        "--experiment=tfm/tiny_bad_interleaving",
        "--mode=train_and_eval",
        f"--params_override={INTERVALS}",
        f"--model_dir={tmp_path}/again",
    ]

    stops = (
        (train_and_die_at, "checkpoint.pointer", 4),
        (train_and_stop_in_step, 13),  # of its own steps: in the middle of a loop
    )
    ends = [server.start(*stop, str(tmp_path / "data"), *flags).wait(SECONDS) for stop in stops]
    # The end of this run and the run without a stop are in this process, which counts layers in
    # names from the start, as a new process does.
    for folder in ("again", "whole"):
        tf_keras.backend.clear_session()
        assert train.main(["train", *flags, f"--model_dir={tmp_path}/{folder}"]) == ExitCode.DONE

    assert [end.code for end in ends] == [-signal.SIGKILL, ExitCode.PREEMPTED], ends[-1].text
    text = "".join([*(end.text for end in ends), caplog.text])
    assert re.findall(r"train_and_eval from step (\d+)", text) == ["0", "30", "43", "0"]
    # The batches of all tasks are counted.
    assert re.search(r"batch \d+, of step \d+, is left out", caplog.text)
    record = final_record(tmp_path / "whole")
    assert record["step"] == 60
    assert record["metrics"]["difference"]["difference_error"] < 0.4
    # Of all in a checkpoint, the description of its objects has names that count what this process
    # made before.
    for difference in compare_runs(tmp_path / "whole", tmp_path / "again"):
        assert "_CHECKPOINTABLE_OBJECT_GRAPH" in difference
        assert "(1 of " in difference


class TheirTrainer(base_trainer.Trainer):  # type: ignore[misc]
    """Keeps Model Garden's own loops; the second worker is asked to stop in the loop that ends with
    step 4.
    """

    def train_loop_end(self) -> Any:
        """Ends the loop."""
        if self.strategy.cluster_resolver.task_id == 1 and self.global_step.numpy() == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_loop_end()


def their_worker(hosts: Sequence[str], index: int, folder: str) -> None:
    """Trains with a trainer of Model Garden as one of the workers at `hosts`."""
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": list(hosts)}, "task": {"type": "worker", "index": index}}
    )
    config = small_config()
    config.trainer.override(
        {"train_steps": 8, "steps_per_loop": 2, "summary_interval": 2, "checkpoint_interval": 2}
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        task = task_factory.get_task(config.task)
        trainer = theirs.create_trainer(
            config, task, train=True, evaluate=False, trainer_cls=TheirTrainer
        )
    run_experiment(strategy, task, "train", config, folder, trainer=trainer)


def test_a_trainer_of_theirs_is_stopped_on_both_workers(server: ForkServer, tmp_path: Path) -> None:
    hosts = free_hosts(2)
    children = [server.start(their_worker, hosts, index, str(tmp_path)) for index in (0, 1)]
    first, second = [child.wait(SECONDS) for child in children]

    assert "another worker was asked to stop; this one stopped at step 4" in first.text, first.text
    assert "stopped by SIGTERM at step 4" in second.text, second.text
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-4")

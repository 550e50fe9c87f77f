"""log.txt: what the terminal shows of a run."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import report
from tests.engine.linear_task import linear_experiment
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.console import ConsoleWriter
from trainer_kit.telemetry.report import CHANGE
from trainer_kit.telemetry.run_log import RunLog, collect_log


def test_lines_wait_for_the_record_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    record = tmp_path / "run" / "params.yaml"
    with collect_log() as log:
        logging.getLogger("trainer_kit.early").warning("a line of the\x1b[2J start")
        log.start(str(path), str(record))
        log.write(report(kind="train", step=5, metrics={"training_loss": 0.5}))
        log.write(report(kind=CHANGE, step=5))
        assert not path.parent.exists()

        record.parent.mkdir()
        record.write_text("")
        logging.getLogger("another.package").error("two\nlines")
        assert path.read_text().endswith("two\nlines\n")
    logging.getLogger("trainer_kit").warning("after the run")

    header, *lines = path.read_text().splitlines()
    assert header.startswith("--- 20") and sys.argv[0] in header
    texts = [line.partition(" ")[2] for line in lines]
    assert texts[0] == "a line of the [2J start"
    assert texts[1].startswith("train | step 5")
    assert len(texts) == 4


def test_a_full_disk_stops_neither_the_run_nor_the_log(tmp_path: Path) -> None:
    link = tmp_path / "log.txt"
    link.symlink_to("/dev/full")
    (tmp_path / "params.yaml").write_text("")
    with collect_log() as log:
        log.start(str(link), str(tmp_path / "params.yaml"))
        logging.getLogger("trainer_kit").warning("while the disk is full")

        link.unlink()
        logging.getLogger("trainer_kit").warning("when it has room again")

    lines = [line.partition(" ")[2] for line in link.read_text().splitlines()[1:]]
    assert lines == ["while the disk is full", "when it has room again"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with collect_log() as log:
        log.start(str(tmp_path / "file" / "log.txt"), str(tmp_path / "file"))
        logging.getLogger("trainer_kit").warning("lost")

    assert (tmp_path / "file").read_text() == ""


def test_an_outer_log_without_a_file_is_the_log_of_the_run(tmp_path: Path) -> None:
    with collect_log() as outer, collect_log() as log:
        assert log is outer
        log.start(str(tmp_path / "log.txt"), str(tmp_path))
        with collect_log() as nested:
            assert nested is not log

    root = logging.getLogger()
    assert not any(isinstance(handler, RunLog) for handler in root.handlers)


_WARNS = """
import logging
{configure}
from trainer_kit.telemetry.run_log import collect_log
with collect_log():
    logging.getLogger("trainer_kit.here").warning("shown once")
    logging.getLogger("trainer_kit.here").info("not shown")
"""


@pytest.mark.parametrize("configure", ["", "logging.basicConfig()"])
def test_the_log_takes_no_warning_from_the_terminal(configure: str) -> None:
    script = _WARNS.format(configure=configure)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert result.stderr.count("shown once") == 1
    assert "not shown" not in result.stderr


def test_attempts_share_a_log_and_a_sidecar_has_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="trainer_kit")
    console = ConsoleWriter(io.StringIO(), interactive=True)
    config = linear_experiment(train_steps=10, checkpoint_interval=5)

    def fail(logs: object) -> None:
        raise ValueError("the disk of the user")

    with pytest.raises(ValueError, match="the disk of the user"):
        launch(config, "train_and_eval", str(tmp_path), console=console, train_actions=[fail])
    first_attempt = (tmp_path / "log.txt").read_text()
    launch(config, "train_and_eval", str(tmp_path), console=console)

    log = (tmp_path / "log.txt").read_text()
    assert log.startswith(first_attempt)
    assert first_attempt.splitlines()[-1].endswith("error: ValueError: the disk of the user")
    assert "\x1b" not in log
    _, first, second = ("\n" + log).split("\n---")
    for text in ("replicas in sync: 1", " train_and_eval from step 0", " train | step 5/10"):
        assert text in first
    for text in (" train | step 10/10", " validation | step 10/10", " finished at step 10"):
        assert text in second

    launch(config, "continuous_eval", str(tmp_path))

    assert (tmp_path / "log.txt").read_text() == log
    sidecars_log = (tmp_path / "evals" / "continuous_eval" / "log.txt").read_text()
    assert "continuous_eval of the checkpoints" in sidecars_log
    assert "validation | step 10" in sidecars_log


def test_a_refused_start_leaves_no_log(tmp_path: Path) -> None:
    config = linear_experiment(best_checkpoint_eval_metric="missing")

    with pytest.raises(UsageError):
        launch(config, "train_and_eval", str(tmp_path / "run"))

    assert not (tmp_path / "run").exists()


def test_a_program_without_handlers_has_a_log_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.txt"
    (tmp_path / "params.yaml").write_text("")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    with collect_log() as log:
        log.start(str(path), str(tmp_path / "params.yaml"))
        log.write(report(kind="train", step=5, metrics={"training_loss": 0.5}))

    assert "train | step 5" in path.read_text()

"""The files of CSVLogger go on where the checkpoint was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tf_keras

from trainer_kit.compat.keras.callback_state import (
    csv_lengths,
    redirect_to_temporary_folders,
    truncate_csv_files,
)


class StartedLogger:
    """A logger in a process that has begun, and has resumed if a state is given."""

    def __init__(
        self, kind: Any, path: Path, state: dict[str, int] | None = None, append: bool = False
    ) -> None:
        self.logger = kind(str(path), append=append)
        self.logger.set_model(keras.Model())
        self.logger.model.stop_training = False
        truncate_csv_files([self.logger], state or {})
        self.logger.on_train_begin()

    def write_epochs(self, *numbers: int) -> None:
        for number in numbers:
            self.logger.on_epoch_end(number, {"loss": number / 2, "val_loss": 1.0})


@pytest.mark.parametrize("kind", [keras.callbacks.CSVLogger, tf_keras.callbacks.CSVLogger])
def test_rows_after_the_checkpoint_are_written_once(kind: Any, tmp_path: Path) -> None:
    first = StartedLogger(kind, tmp_path / "log.csv")
    first.write_epochs(0, 1)
    state = csv_lengths([first.logger])
    first.write_epochs(2)
    StartedLogger(kind, tmp_path / "log.csv", state).write_epochs(2, 3)
    rows = (tmp_path / "log.csv").read_text().splitlines()

    assert rows == ["epoch,loss,val_loss", "0,0.0,1.0", "1,0.5,1.0", "2,1.0,1.0", "3,1.5,1.0"]


@pytest.mark.parametrize("kind", [keras.callbacks.CSVLogger, tf_keras.callbacks.CSVLogger])
def test_a_run_that_goes_back_writes_its_rows_again(kind: Any, tmp_path: Path) -> None:
    started = StartedLogger(kind, tmp_path / "log.csv")
    started.write_epochs(0)
    state = csv_lengths([started.logger])
    started.write_epochs(1)
    truncate_csv_files([started.logger], state)
    started.write_epochs(1)

    assert (tmp_path / "log.csv").read_text().splitlines()[1:] == ["0,0.0,1.0", "1,0.5,1.0"]


def test_a_checkpoint_before_the_first_row_gives_a_header(tmp_path: Path) -> None:
    first = StartedLogger(keras.callbacks.CSVLogger, tmp_path / "log.csv")
    state = csv_lengths([first.logger])
    first.write_epochs(0)
    StartedLogger(keras.callbacks.CSVLogger, tmp_path / "log.csv", state).write_epochs(0)

    assert (tmp_path / "log.csv").read_text().splitlines() == ["epoch,loss,val_loss", "0,0.0,1.0"]


@pytest.mark.parametrize(("append", "rows"), [(False, 2), (True, 3)])
def test_a_logger_that_is_new_in_the_run_does_as_it_says(
    append: bool, rows: int, tmp_path: Path
) -> None:
    StartedLogger(keras.callbacks.CSVLogger, tmp_path / "log.csv").write_epochs(0)
    StartedLogger(keras.callbacks.CSVLogger, tmp_path / "log.csv", {}, append).write_epochs(5)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == rows


@pytest.mark.parametrize("module", [keras, tf_keras])
def test_a_worker_beside_the_chief_writes_to_another_folder(module: Any, tmp_path: Path) -> None:
    saver = module.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    logger = module.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    board = module.callbacks.TensorBoard(str(tmp_path))

    redirect_to_temporary_folders([keras.callbacks.History(), saver, logger, board])
    paths = [Path(path) for path in (saver.filepath, logger.filename, board.log_dir)]
    assert [path.name for path in paths] == ["{epoch}.keras", "log.csv", tmp_path.name]
    assert all(path.parent.is_dir() and tmp_path not in (path, *path.parents) for path in paths)

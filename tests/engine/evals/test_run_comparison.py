"""compare_runs finds each kind of difference between two real runs, and none between equal ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from tests.engine.linear_task import linear_experiment
from trainer_kit.run.launcher import launch
from trainer_kit.testing import compare_runs


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that keeps its best."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    two = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}
    config = linear_experiment(
        best_checkpoint_eval_metric="accuracy", best_checkpoints={"two": two}
    )
    launch(config, "train_and_eval", str(folder), save_summary=False)

    return folder


@pytest.fixture
def other(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(finished_run, tmp_path / "other"))


def change_a_weight(folder: Path, prefix: str, by: float = 1e-7) -> None:
    """Writes the checkpoint again, one number of one kernel changed."""
    reader = tf.train.load_checkpoint(str(folder / prefix))
    names = sorted(reader.get_variable_to_shape_map())
    values = {name: reader.get_tensor(name) for name in names}
    kernel = next(name for name in names if name.startswith("model") and "kernel" in name)
    values[kernel].flat[0] += by
    strings = [tf.constant(values[name]) for name in names]
    tf.raw_ops.SaveV2(
        prefix=str(folder / prefix),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=strings,
    )


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Changes the last record of a file of JSON, or of lines of it."""
    text = path.read_text()
    lines = [text] if path.suffix == ".json" else text.splitlines()
    record = json.loads(lines[-1])
    change(record)
    path.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")


def test_a_run_equals_its_copy_and_itself_except_clock_times(
    finished_run: Path, other: Path
) -> None:
    edit(other / "metrics.jsonl", lambda record: record.update(seconds=9e9))
    edit(other / "evals/validation.jsonl", lambda record: record.update(seconds=9e9))
    # Of one more recovery.
    edit(other / "evals/validation.jsonl", lambda record: record.update(lineage=2))
    edit(other / "final.json", lambda record: record.update(time={"seconds": 9e9}))

    assert compare_runs(finished_run, other) == compare_runs(finished_run, finished_run) == []


def test_one_bit_of_a_weight_is_told_with_the_variable(finished_run: Path, other: Path) -> None:
    change_a_weight(other, "ckpt-20")
    difference, *more = compare_runs(finished_run, other)

    assert not more
    assert difference.startswith("newest checkpoint: model/")
    assert "kernel" in difference
    assert "(1 of " in difference


def test_the_best_weights_are_compared_too(finished_run: Path, other: Path) -> None:
    name = json.loads((other / "best_ckpt/info.json").read_text())["checkpoint"]

    change_a_weight(other / "best_ckpt", name)
    difference, *more = compare_runs(finished_run, other)

    assert not more
    assert difference.startswith("best checkpoint: ")


def test_all_weights_that_are_kept_under_a_name_are_compared(
    finished_run: Path, other: Path
) -> None:
    folder = other / "best_checkpoints" / "two"

    change_a_weight(folder, "ckpt-10")
    (difference,) = compare_runs(finished_run, other)

    assert difference.startswith("best two ckpt-10: ")

    (folder / "ckpt-10.index").unlink()

    assert compare_runs(finished_run, other) == [
        "best two steps: [10, 20] in one, [20] in the other"
    ]

    shutil.rmtree(folder)

    assert any(told.startswith("best two info: ") for told in compare_runs(finished_run, other))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("metrics.jsonl", "metrics.jsonl: line"),
        ("evals/validation.jsonl", "evals/validation.jsonl: line"),
        ("final.json", "final.json: "),
        ("best_ckpt/info.json", "best info: "),
    ],
)
def test_a_changed_number_in_a_record_is_told(
    finished_run: Path, other: Path, path: str, told: str
) -> None:
    edit(other / path, lambda record: record.update(metrics={"accuracy": 0.123}))
    difference, *more = compare_runs(finished_run, other)

    assert not more
    assert difference.startswith(told)
    assert "0.123" in difference


def test_what_is_missing_is_told(finished_run: Path, other: Path) -> None:
    (other / "final.json").unlink()
    (other / "best_ckpt/info.json").unlink()
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(lines[:-1]))

    told = " ".join(compare_runs(finished_run, other))

    assert all(
        part in told
        for part in ("final.json: ", "best info: ", f"metrics.jsonl: {len(lines)} lines")
    )


def test_another_step_and_a_damaged_checkpoint_are_reported(
    finished_run: Path, other: Path
) -> None:
    data = other / "ckpt-20.data-00000-of-00001"

    data.write_bytes(data.read_bytes()[:100])

    assert "cannot be read" in compare_runs(finished_run, other)[0]

    for path in other.glob("ckpt-20.*"):
        path.unlink()
    (told,) = compare_runs(finished_run, other)

    assert told.startswith("newest checkpoint: ")
    assert "variables differ" in told


def test_what_dead_processes_left_is_told(finished_run: Path, other: Path) -> None:
    (other / "ckpt-30_temp").mkdir()
    (other / "best_ckpt" / ".info.json.12.tmp").touch()

    assert compare_runs(finished_run, other) == [
        "left over: best_ckpt/.info.json.12.tmp",
        "left over: ckpt-30_temp",
    ]

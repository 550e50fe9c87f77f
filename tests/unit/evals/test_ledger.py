"""The evaluation ledger: what is written, what counts, and which is the best."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import json_lines
from trainer_kit.errors import StorageError
from trainer_kit.evals import ledger as module
from trainer_kit.evals.ledger import Ledger, active_records, extract_scalars, merge_validation_sets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evals" / "validation.jsonl"


def create_ledger(path: Path, **options: Any) -> Ledger:
    return Ledger(path, **{"dataset": "validation", "config_hash": "abc", **options})


def find_last_step(written: Ledger) -> int:
    """The last step whose evaluation counts."""
    return max((item["step"] for item in written.get_active_evaluations()), default=-1)


def build_record(step: int, lineage: int = 0, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "lineage": lineage, "metrics": metrics}


def build_rewind(step: int, lineage: int) -> dict[str, Any]:
    return {"kind": "rewind", "lineage": lineage, "step": step}


def test_a_record_names_checkpoint_dataset_config_and_lineage(path: Path) -> None:
    written = create_ledger(path).append(
        10, {"loss": np.float32(0.5), "set": {"acc": 1}, "image": np.zeros(2)}, 1.23456, "ckpt-10"
    )
    expected = {
        "step": 10,
        "checkpoint": "ckpt-10",
        "dataset": "validation",
        "metrics": {"loss": 0.5, "set": {"acc": 1.0}},
        "seconds": 1.235,
        "config_hash": "abc",
        "lineage": 0,
    }

    assert written
    assert json_lines(path) == [expected] == create_ledger(path).records()


def test_a_moved_run_is_not_made_again_by_its_ledger(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    written = create_ledger(run / "evals" / "validation.jsonl")
    written.append(5, {"acc": 0.1}, 1.0)
    run.rename(tmp_path / "moved")

    with pytest.raises(StorageError, match=r"cannot be written: .*/run/evals was moved or removed"):
        written.append(10, {"acc": 0.2}, 1.0)

    assert not run.exists()


def test_nonfinite_numbers_are_strict_json_and_read_as_floats(path: Path) -> None:
    create_ledger(path).append(1, {"a": math.nan, "b": {"c": math.inf, "d": -math.inf}}, 0.0)

    assert json_lines(path)[0]["metrics"] == {"a": "nan", "b": {"c": "inf", "d": "-inf"}}

    metrics = create_ledger(path).records()[0]["metrics"]
    assert math.isnan(metrics["a"])
    assert metrics["b"] == {"c": math.inf, "d": -math.inf}


def test_an_evaluation_that_comes_again_is_not_written_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"acc": 0.1, "bad": math.nan, "set": {"loss": 1}}
    before = create_ledger(path)

    assert before.append(5, values, 1.0)
    assert not before.append(5, values, 2.0)
    # The best so far is no metric of it.
    assert not create_ledger(path).append(5, {**values, "best_acc": 0.3}, 3.0, "ckpt-5")
    assert [item["seconds"] for item in json_lines(path)] == [1.0]
    assert caplog.records == []


@pytest.mark.parametrize("options", [{"dataset": "test"}, {"config_hash": "other"}, {"lineage": 1}])
def test_another_dataset_config_or_lineage_is_another_evaluation(
    path: Path, options: dict[str, Any]
) -> None:
    create_ledger(path).append(5, {"acc": 0.1}, 1.0)

    assert create_ledger(path, **options).append(5, {"acc": 0.2}, 1.0)
    assert create_ledger(path).append(6, {"acc": 0.2}, 1.0)
    assert len(json_lines(path)) == 3


def test_different_metrics_are_reported_once_and_the_first_stay(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 6):
        create_ledger(path).append(step, {"loss": 1.0, "set": {"acc": 0.1}}, 1.0)
    resumed = create_ledger(path)

    for step in (5, 6):
        assert not resumed.append(step, {"loss": 1.0, "set": {"acc": 0.25}}, 1.0)

    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING

    message = warning.getMessage()
    assert "step 5" in message
    assert "set|acc: 0.1, now 0.25" in message
    assert "not exact" in message
    assert [item["metrics"]["set"]["acc"] for item in json_lines(path)] == [0.1, 0.1]


def test_a_metric_missing_in_the_second_evaluation_is_reported(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_ledger(path).append(5, {"acc": 0.1, "empty": {}}, 1.0)
    create_ledger(path).append(5, {"acc": 0.1}, 1.0)

    assert caplog.records == []

    create_ledger(path).append(5, {}, 1.0)

    assert "acc: 0.1, now none" in caplog.records[0].getMessage()


def test_cut_lines_are_left_out_and_unknown_keys_are_kept(path: Path) -> None:
    create_ledger(path).append(1, {"acc": 0.1}, 1.0)
    strange: Sequence[Any] = (
        [1],
        None,
        {"step": "2", "metrics": {}},
        {"step": True, "metrics": {}},
        {"step": 3},
        {"step": 3, "metrics": 1},
        {"kind": "rewind", "step": 1.5, "lineage": 1},
        {"kind": "note", "step": 4, "metrics": {}},
        {"step": 4, "metrics": {"acc": [1]}, "owner": "x"},
    )
    with open(path, "a") as stream:
        stream.writelines(json.dumps(item) + "\n" for item in strange)
        stream.write('{"step": 5, "metr')

    create_ledger(path).append(6, {"acc": 0.1}, 1.0)
    records = create_ledger(path).records()

    assert [item["step"] for item in records] == [1, 4, 6]
    assert records[1]["owner"] == "x"
    assert math.isnan(records[1]["metrics"]["acc"])
    assert records[1]["lineage"] == 0


def test_a_ledger_of_an_earlier_version_is_read_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        '{"step": 4, "checkpoint": null, "dataset": "validation", '
        '"metrics": {"loss": NaN, "acc": 0.5}, '
        '"seconds": 1.0, "config_hash": "abc", "lineage": 0}\n'
    )

    assert find_last_step(create_ledger(path)) == 4
    assert not create_ledger(path).append(4, {"loss": math.nan, "acc": 0.5}, 1.0)
    assert [
        (item["step"], item["metrics"]["acc"])
        for item in create_ledger(path).get_active_evaluations()
    ] == [(4, 0.5)]


def test_recorded_sets_are_those_whose_evaluation_counts(path: Path) -> None:
    written = create_ledger(path)

    written.append(4, {"acc": 0.1}, 1.0)
    create_ledger(path, dataset="test").append(16, {"acc": 0.1}, 1.0)

    assert [written.find_recorded_sets(step) for step in (4, 8, 16)] == [{""}, set(), set()]

    written.rewind(0)

    assert written.find_recorded_sets(4) == set()


def test_recorded_sets_of_one_evaluation_are_counted_one_by_one(path: Path) -> None:
    both = Ledger(path, dataset="", config_hash="", sets={"dev": "1", "test": "2"})

    both.append(20, {"dev": {"acc": 0.1}, "test": {"acc": 0.2}}, {"dev": 1.0})

    assert [both.find_recorded_sets(step) for step in (20, 24)] == [{"dev"}, set()]

    both.append(20, {"test": {"acc": 0.2}}, {"test": 1.0})

    assert both.find_recorded_sets(20) == {"dev", "test"}


def test_a_rewind_takes_away_what_was_evaluated_for_later_steps(path: Path) -> None:
    written = create_ledger(path)
    for step, acc in ((4, 0.5), (8, 0.9), (12, 0.7)):
        written.append(step, {"acc": acc}, 1.0)

    written.rewind(4)

    assert written.lineage == 1
    assert find_last_step(written) == 4
    assert written.append(8, {"acc": 0.6}, 1.0)
    assert json_lines(path)[3:4] == [build_rewind(4, 1)]
    assert json_lines(path)[4]["lineage"] == 1

    counting = [
        (item["step"], item["lineage"], item["metrics"]["acc"])
        for item in written.get_active_evaluations()
    ]
    assert counting == [(4, 0, 0.5), (8, 1, 0.6)]
    assert find_last_step(written) == 8


def test_a_restart_goes_on_in_the_newest_lineage(path: Path) -> None:
    before = create_ledger(path)
    before.append(4, {"acc": 0.5}, 1.0)

    before.rewind(2)
    before.rewind(0)
    after = create_ledger(path)

    assert after.lineage == 2
    assert find_last_step(after) == -1

    after.append(4, {"acc": 0.5}, 1.0)

    assert find_last_step(after) == 4
    assert create_ledger(path, lineage=5).lineage == 5


@given(st.lists(st.tuples(st.sampled_from(["evaluate", "rewind"]), st.integers(1, 9)), max_size=30))
def test_only_evaluations_of_the_current_lineage_count(actions: list[tuple[str, int]]) -> None:
    records: list[dict[str, Any]] = []
    path: list[tuple[int, int]] = []
    lineage = at = 0

    for action, amount in actions:
        if action == "evaluate":
            at += amount
            records.append(build_record(at, lineage))
            path.append((at, lineage))
        else:
            at = max(at - amount, 0)
            lineage += 1
            records.append(build_rewind(at, lineage))
            path = [(step, number) for step, number in path if step <= at]

    assert [(item["step"], item["lineage"]) for item in active_records(records)] == path


def test_only_records_of_several_sets_at_one_step_are_merged(path: Path) -> None:
    sets = create_ledger(path, sets={"often": "a", "rare": "b"})
    for step, names in ((1, ("often",)), (2, ("often", "rare")), (1, ("rare",))):
        sets.append(step, {name: {"acc": step / 10} for name in names}, dict.fromkeys(names, 0.1))
    changed = create_ledger(path, sets={"often": "c", "rare": "d"})

    changed.append(2, {"often": {"acc": 0.7}, "rare": {"acc": 0.8}}, {"often": 0.1, "rare": 0.1})

    assert [
        (record["step"], record["metrics"])
        for record in merge_validation_sets(changed.get_active_evaluations())
    ] == [
        (1, {"often": {"acc": 0.1}, "rare": {"acc": 0.1}}),
        (2, {"often": {"acc": 0.2}, "rare": {"acc": 0.2}}),
        (2, {"often": {"acc": 0.7}, "rare": {"acc": 0.8}}),
    ]

    assert [item["metrics"] for item in sets.get_active_evaluations()][:2] == [
        {"often": {"acc": 0.1}},
        {"often": {"acc": 0.2}},
    ]


def test_records_of_a_single_set_are_not_merged() -> None:
    records = [
        build_record(1, acc=0.1),
        build_record(1, acc=0.2),
        build_record(1, far={"acc": 0.3}),
    ]

    assert merge_validation_sets(records) == records


def test_a_followed_rewind_is_recorded_after_all_was_rewound(path: Path) -> None:
    run = create_ledger(path)
    beside = create_ledger(path.with_name("side.jsonl"))
    beside.append(8, {"acc": 0.5}, 1.0)
    run.rewind(4)
    run.rewind(2)

    def die(step: int) -> None:
        raise KeyboardInterrupt(step)

    with pytest.raises(KeyboardInterrupt, match="2"):
        beside.follow(path, before_rewind=die)

    again = create_ledger(path.with_name("side.jsonl"))
    steps: list[int] = []

    assert again.lineage == 0
    assert find_last_step(again) == 8
    assert again.follow(path, before_rewind=steps.append) == 2
    assert steps == [2]
    assert again.lineage == 2
    assert find_last_step(again) == -1
    assert again.follow(path, before_rewind=steps.append) is None
    assert steps == [2]


def test_plain_logs_are_nested_dicts_of_floats() -> None:
    logs = {"a": np.float32(1.0), "b": {"c": 2, "deep": {"text": "x"}}, "list": [1.0], 3: True}
    assert extract_scalars(logs) == {"a": 1.0, "b": {"c": 2.0, "deep": {}}, "3": 1.0}


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = create_ledger(tmp_path / "file" / "validation.jsonl")

    with pytest.raises(StorageError):
        blocked.append(1, {"acc": 0.1}, 1.0)

    with pytest.raises(StorageError):
        blocked.rewind(1)

    assert blocked.lineage == 0


@pytest.mark.parametrize("name", ["dataset", "config_hash"])
def test_a_record_whose_names_are_no_text_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "damaged.jsonl").write_text(
        json.dumps({"step": 1, "metrics": {"accuracy": 0.5}, name: []}) + "\n"
    )
    ledger = Ledger(tmp_path / "damaged.jsonl", dataset="validation", config_hash="a")

    assert ledger.append(1, {"accuracy": 0.5}, 0.1)
    assert ledger.find_recorded_sets(1) == {""}


def test_what_it_has_appended_itself_is_not_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = create_ledger(path)
    written.append(10, {"loss": math.nan}, 0.1)
    before = written.records()
    monkeypatch.setattr(module, "read_records", None)  # a call would fail
    written.append(20, {"loss": 0.5, "set": {"accuracy": math.inf}}, 0.1, "ckpt-20")

    written.rewind(10)
    written.append(15, {"loss": 0.5}, 0.1)

    assert len(before) == 1
    assert written.read_extent(20) == (2, 15)
    assert written.read_extent(10) == (0, -1)
    assert written.find_rewind_step(0) == 10
    assert written.find_rewind_step(1) is None

    monkeypatch.undo()

    # As text: NaN is no other than NaN.
    assert str(written.records()) == str(create_ledger(path).records())

    create_ledger(path).append(30, {"loss": 0.5}, 0.1)

    assert written.read_extent(40) == (3, 30)

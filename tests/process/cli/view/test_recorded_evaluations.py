"""What ledgers contain for a viewer: what counts, what is best, and where its weights are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger
from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.recorded_evaluations import MetricChoice
from trainer_kit.evals.best.criterion import Criterion

_HIGHER = MetricChoice("accuracy", "higher")
_LOWER = MetricChoice("accuracy", "lower")


def _write_weights(prefix: Path, *suffixes: str) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes or (".index", ".data-00000-of-00001"):
        prefix.with_name(prefix.name + suffix).write_text("")


def test_torn_lines_and_foreign_records_are_left_out(tmp_path: Path) -> None:
    foreign = '{"step": true, "metrics": {}}\n[1]\n{"metrics": {"accuracy": 1}}\nnotes\n\xff\n'
    bare = {"step": 5, "metrics": {"accuracy": "nan", "far": {"loss": 2}, "words": "none"}}
    write_ledger(
        tmp_path,
        evaluation(3, accuracy=0.5),
        foreign,
        json.dumps(bare) + "\n",
        '{"step": 9, "metrics"',
    )

    whole, least = ledgers.read_evaluations(tmp_path, "validation")

    assert (whole.step, whole.seconds, whole.checkpoint) == (3, 0.5, "ckpt-3")
    assert (least.step, least.seconds, least.lineage) == (5, None, 0)
    assert (least.dataset, least.checkpoint) == ("", "")
    assert math.isnan(least.metrics["accuracy"])
    assert least.metrics["far|loss"] == 2.0
    assert ledgers.metric_names([whole, least])[:2] == ["accuracy", "far|loss"]
    assert ledgers.read_evaluations(tmp_path, "none") == []


@pytest.mark.parametrize(
    ("choice", "steps"), [(_HIGHER, [20, 40, 10, 70, 60]), (_LOWER, [60, 10, 70, 20, 40])]
)
def test_the_best_are_ranked_as_the_run_itself_ranks_them(
    tmp_path: Path, choice: MetricChoice, steps: list[int]
) -> None:
    values = {10: 0.5, 20: 0.7, 30: math.nan, 40: 0.7, 50: math.inf, 60: 0.1, 70: 0.5}
    write_ledger(tmp_path, *(evaluation(step, accuracy=value) for step, value in values.items()))
    evaluations = ledgers.read_evaluations(tmp_path, "validation")
    criterion = Criterion(choice.metric, choice.comparison, 3)

    ranked = ledgers.rank_evaluations(evaluations, choice)
    kept = ledgers.select_kept_evaluations(evaluations, criterion)

    assert [evaluation.step for evaluation in ranked["validation"]] == steps
    assert [evaluation.step for evaluation in kept["validation"]] == steps[:3]


def test_a_step_is_ranked_once_and_datasets_are_not_mixed(tmp_path: Path) -> None:
    records = [evaluation(step, accuracy=value) for step, value in ((1, 0.7), (2, 0.8), (1, 0.9))]
    write_ledger(tmp_path, *records, evaluation(3, dataset="other", accuracy=1.0))
    evaluations = ledgers.read_evaluations(tmp_path, "validation")

    ranked = ledgers.rank_evaluations(evaluations, _HIGHER)

    values = {
        name: [(record.step, record.metrics["accuracy"]) for record in ranking]
        for name, ranking in ranked.items()
    }
    assert values == {"validation": [(1, 0.9), (2, 0.8)], "other": [(3, 1.0)]}
    assert ledgers.rank_evaluations(evaluations, MetricChoice("loss", "lower")) == {}


def test_complete_weights_are_found_in_best_folders_first(tmp_path: Path) -> None:
    write_ledger(tmp_path, evaluation(10, accuracy=0.5))
    (record,) = ledgers.read_evaluations(tmp_path, "validation")
    folders = [tmp_path / "evals" / "fast" / "best_ckpt", tmp_path / "best_ckpt"]
    assert ledgers.find_weights(record, tmp_path, folders) is None

    # Half of the files, and another step.
    _write_weights(tmp_path / "best_ckpt" / "ckpt-10", ".index", ".data-00000-of-00002")
    _write_weights(tmp_path / "ckpt-100")
    assert ledgers.find_weights(record, tmp_path, folders) is None

    suffixes = (".index", ".data-00000-of-00002", ".data-00001-of-00002", ".commit.json")
    for folder in (tmp_path, tmp_path / "best_ckpt", folders[0]):
        _write_weights(folder / "ckpt-10", *suffixes)
        assert ledgers.find_weights(record, tmp_path, folders) == folder / "ckpt-10"

    (tmp_path / "ckpt-10.index").unlink()
    assert ledgers.find_weights(record, tmp_path, []) is None

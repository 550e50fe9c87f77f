"""What the ledgers hold, for those who look: what counts, what is best, and where its weights are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.process.cli.written_runs import evaluation, write_ledger
from trainer_kit.cli.view import recorded_evaluations as ledgers
from trainer_kit.cli.view.recorded_evaluations import Choice
from trainer_kit.cli.view.run_status import Settings, read_settings
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.evals.ledger import Ledger

_RUN = Settings("accuracy", "higher", "best_ckpt")
_HIGHER, _LOWER = Choice("accuracy", "higher"), Choice("accuracy", "lower")


def _steps(folder: Path, choice: Choice) -> list[int]:
    ranked = ledgers.ranked(ledgers.read_evaluations(folder, "validation"), choice)
    return [one.step for one in ranked.get("validation", [])]


def _weights(prefix: Path, *suffixes: str) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for suffix in suffixes or (".index", ".data-00000-of-00001"):
        prefix.with_name(prefix.name + suffix).write_text("")


def test_the_ledgers_of_a_real_run_are_read(finished_run: Path) -> None:
    assert ledgers.ledger_names(finished_run) == ["validation", "fast"]
    told = ledgers.read_evaluations(finished_run, "validation")
    assert [(one.step, one.checkpoint, one.active) for one in told] == [(10, "ckpt-10", True), (20, "ckpt-20", True)]
    assert all(one.seconds is not None and {"accuracy", "validation_loss"} <= one.metrics.keys() for one in told)
    sidecar = ledgers.read_evaluations(finished_run, "fast")
    assert [one.metrics["accuracy"] for one in sidecar] == [one.metrics["accuracy"] for one in told]


def test_what_a_rewind_has_superseded_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "evals" / "validation.jsonl"
    ledger = Ledger(path, dataset="validation", config_hash="0")
    for step in (10, 20, 30):
        ledger.append(step, {"accuracy": step / 100}, 1.0)
    ledger.rewind(10)
    ledger.append(20, {"accuracy": 0.15}, 1.0)
    told = ledgers.read_evaluations(tmp_path, "validation")
    assert [(one.step, one.lineage, one.active) for one in told] == [
        (10, 0, True), (20, 0, False), (30, 0, False), (20, 1, True),
    ]  # fmt: skip
    assert _steps(tmp_path, _HIGHER) == [20, 10]
    assert [one.step for one in ledgers.kept(told, Criterion("accuracy", keep=3))["validation"]] == [20, 10]


def test_torn_lines_and_foreign_records_are_left_out(tmp_path: Path) -> None:
    foreign = '{"step": true, "metrics": {}}\n[1]\n{"metrics": {"accuracy": 1}}\nnotes\n\xff\n'
    bare = {"step": 5, "metrics": {"accuracy": "nan", "far": {"loss": 2}, "words": "none"}}
    write_ledger(tmp_path, evaluation(3, accuracy=0.5), foreign, json.dumps(bare) + "\n", '{"step": 9, "metrics"')
    whole, least = ledgers.read_evaluations(tmp_path, "validation")
    assert (whole.step, whole.seconds, whole.checkpoint) == (3, 0.5, "ckpt-3")
    assert (least.step, least.dataset, least.seconds, least.checkpoint, least.lineage) == (5, "", None, "", 0)
    assert math.isnan(least.metrics["accuracy"]) and least.metrics["far|loss"] == 2.0
    assert ledgers.metric_names([whole, least])[:2] == ["accuracy", "far|loss"]
    assert ledgers.read_evaluations(tmp_path, "none") == []


def test_the_best_are_ranked_as_the_run_itself_ranks_them(tmp_path: Path) -> None:
    values = {10: 0.5, 20: 0.7, 30: math.nan, 40: 0.7, 50: math.inf, 60: 0.1, 70: 0.5}
    write_ledger(tmp_path, *(evaluation(step, accuracy=value) for step, value in values.items()))
    assert _steps(tmp_path, _HIGHER) == [20, 40, 10, 70, 60]
    assert _steps(tmp_path, _LOWER) == [60, 10, 70, 20, 40]
    for choice in (_HIGHER, _LOWER):
        kept = ledgers.kept(
            ledgers.read_evaluations(tmp_path, "validation"), Criterion(choice.metric, choice.comparison, 3)
        )
        assert [one.step for one in kept["validation"]] == _steps(tmp_path, choice)[:3]


def test_a_step_is_ranked_once_and_datasets_are_not_mixed(tmp_path: Path) -> None:
    again = [evaluation(step, accuracy=value) for step, value in ((1, 0.7), (2, 0.8), (1, 0.9))]
    write_ledger(tmp_path, *again, evaluation(3, dataset="other", accuracy=1.0))
    ranked = ledgers.ranked(ledgers.read_evaluations(tmp_path, "validation"), _HIGHER)
    found = {name: [(one.step, one.metrics["accuracy"]) for one in of] for name, of in ranked.items()}
    assert found == {"validation": [(1, 0.9), (2, 0.8)], "other": [(3, 1.0)]}
    assert ledgers.ranked(ledgers.read_evaluations(tmp_path, "validation"), Choice("loss", "lower")) == {}


def test_the_runs_own_metric_decides_unless_another_is_given(tmp_path: Path) -> None:
    told = ledgers.read_evaluations(write_ledger(tmp_path, evaluation(1, accuracy=0.5, loss=1.0)), "validation")
    none = read_settings(tmp_path)
    assert ledgers.choose(None, None, _RUN, told) == _HIGHER
    assert ledgers.choose("accuracy", None, _RUN, told) == _HIGHER
    assert ledgers.choose(None, "lower", _RUN, told) == _LOWER
    assert ledgers.choose("loss", "lower", none, told) == Choice("loss", "lower")
    assert ledgers.choose(None, None, none, told) is None
    with pytest.raises(UsageError, match=r"--metric: is a higher or a lower 'loss' better\? Give --comparison=higher"):
        ledgers.choose("loss", None, _RUN, told)
    with pytest.raises(UsageError, match="--comparison: needs --metric too"):
        ledgers.choose(None, "lower", none, told)
    with pytest.raises(UsageError, match=r"no evaluation has 'acuracy'; did you mean accuracy\?"):
        ledgers.choose("acuracy", None, _RUN, told)


def test_a_missing_ledger_is_reported_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("")
    with pytest.raises(UsageError, match=r"has no evaluations \(evals/<name>\.jsonl\); it holds: params\.yaml$"):
        ledgers.require_ledgers(tmp_path, None)
    for name in ("fast", "validation"):
        write_ledger(tmp_path, name=name)
    assert ledgers.require_ledgers(tmp_path, None) == ["validation", "fast"]
    assert ledgers.require_ledgers(tmp_path, "fast") == ["fast"]
    with pytest.raises(UsageError, match=r"--name: .*evals has no ledger 'fats'; did you mean fast\?"):
        ledgers.require_ledgers(tmp_path, "fats")


def test_complete_weights_are_found_in_best_folders_first(tmp_path: Path) -> None:
    (one,) = ledgers.read_evaluations(write_ledger(tmp_path, evaluation(10, accuracy=0.5)), "validation")
    kept = [tmp_path / "evals" / "fast" / "best_ckpt", tmp_path / "best_ckpt"]
    assert ledgers.weights_of(one, tmp_path, kept) is None
    _weights(tmp_path / "best_ckpt" / "ckpt-10", ".index", ".data-00000-of-00002")  # half of them
    _weights(tmp_path / "ckpt-100")
    assert ledgers.weights_of(one, tmp_path, kept) is None
    for prefix in (tmp_path / "ckpt-10", tmp_path / "best_ckpt" / "ckpt-10", kept[0] / "ckpt-10"):
        _weights(prefix, ".index", ".data-00000-of-00002", ".data-00001-of-00002", ".commit.json")
        assert ledgers.weights_of(one, tmp_path, kept) == prefix
    (tmp_path / "ckpt-10.index").unlink()
    assert ledgers.weights_of(one, tmp_path, []) is None


def test_each_ledger_has_the_folder_where_its_best_is_kept(tmp_path: Path) -> None:
    assert ledgers.best_folder(tmp_path, _RUN, "validation") == tmp_path / "best_ckpt"
    assert ledgers.best_folder(tmp_path, _RUN, "fast") == tmp_path / "evals" / "fast" / "best_ckpt"
    assert ledgers.best_folder(tmp_path, _RUN, "eval") is None
    assert ledgers.best_folder(tmp_path, Settings("", "higher", ""), "validation") is None


def test_info_json_agrees_differs_or_cannot_be_compared(finished_run: Path, tmp_path: Path) -> None:
    kept = finished_run / "best_ckpt"
    told = ledgers.read_evaluations(finished_run, "validation")
    best = ledgers.ranked(told, _HIGHER)["validation"]
    agrees, text = ledgers.info_verdict(best[:1], _HIGHER, kept)
    assert agrees and text == f"info.json agrees: step 20, accuracy {best[0].metrics['accuracy']!r}"
    assert ledgers.info_verdict(best[1:], _HIGHER, kept)[0] is False
    assert ledgers.info_verdict([], _HIGHER, kept)[0] is False
    assert ledgers.info_verdict(best, Choice("validation_loss", "lower"), kept)[0] is None
    assert ledgers.info_verdict(best, _HIGHER, tmp_path) == (None, "there is no info.json")
    (tmp_path / "info.json").write_text("{")
    assert ledgers.info_verdict(best, _HIGHER, tmp_path) == (False, "info.json is damaged")

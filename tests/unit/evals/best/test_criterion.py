"""What is kept of evaluations, against a slow reading of the rule."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.evals.best.criterion import Criterion, ScoredEvaluation, guess_comparison


def _fold(criterion: Criterion, *values: float) -> list[int]:
    scored = (criterion.score(step, {"m": value}, None) for step, value in enumerate(values, 1))
    return [score.step for score in criterion.fold(score for score in scored if score is not None)]


def test_nested_metrics_use_a_bar_and_missing_ones_do_not_count() -> None:
    criterion = Criterion("far|m")

    assert criterion.score(1, {"far": {"m": 0.5}}, "record") == ScoredEvaluation(1, 0.5, "record")
    assert criterion.score(1, {"m": 0.5}, None) is None


def test_of_a_step_the_evaluation_that_is_kept_stays() -> None:
    criterion = Criterion("m", keep=2)
    kept = criterion.fold(
        [
            ScoredEvaluation(1, 0.5, "a"),
            ScoredEvaluation(1, 0.9, "b"),
            ScoredEvaluation(2, 0.4, "c"),
        ]
    )

    assert [score.record for score in kept] == ["a", "c"]


_VALUES = st.lists(
    st.sampled_from([math.nan, math.inf, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5]), max_size=12
)
_KEEP = st.integers(1, 4)
_DELTA = st.sampled_from([0.0, 0.25, 0.5])


def _select_slowly(values: list[float], keep: int, min_delta: float) -> set[int]:
    """Returns what is kept, by the rule applied evaluation by evaluation."""
    places: dict[int, float] = {}
    for step, value in enumerate(values, 1):
        if not math.isfinite(value):
            continue
        if len(places) < keep:
            places[step] = value
            continue
        lowest = min(places.values())
        worst = max(step for step in places if places[step] == lowest)
        if value > lowest + min_delta:  # exact: all values are multiples of a quarter
            del places[worst]
            places[step] = value

    return set(places)


@given(_VALUES, _KEEP, _DELTA)
def test_the_fold_is_the_rule(values: list[float], keep: int, min_delta: float) -> None:
    kept = _select_slowly(values, keep, min_delta)

    assert set(_fold(Criterion("m", "higher", keep, min_delta), *values)) == kept
    assert (
        set(_fold(Criterion("m", "lower", keep, min_delta), *(-value for value in values))) == kept
    )


@given(_VALUES, _KEEP, st.integers(0, 12))
def test_without_min_delta_the_top_k_of_any_prefix_are_kept(
    values: list[float], keep: int, cut: int
) -> None:
    criterion = Criterion("m", "higher", keep)
    finite = [(-value, step) for step, value in enumerate(values, 1) if math.isfinite(value)]

    assert set(_fold(criterion, *values)) == {step for _, step in sorted(finite)[:keep]}

    scored = [
        ScoredEvaluation(step, value, None)
        for step, value in enumerate(values, 1)
        if math.isfinite(value)
    ]
    kept = criterion.fold(scored[:cut])

    for score in scored[cut:]:
        kept = criterion.select_after(kept, score)

    assert kept == criterion.fold(scored)


@given(_VALUES, _KEEP, _DELTA, st.integers(0, 12))
def test_repeated_evaluations_change_nothing_that_is_kept(
    values: list[float], keep: int, min_delta: float, start: int
) -> None:
    criterion = Criterion("m", "lower", keep, min_delta)
    scored = [
        ScoredEvaluation(step, value, None)
        for step, value in enumerate(values, 1)
        if math.isfinite(value)
    ]

    kept = criterion.fold(scored)

    for score in scored[start:]:
        assert criterion.select_after(kept, score) == kept


def test_the_name_of_a_metric_may_tell_its_better_values() -> None:
    names = (
        "validation_loss",
        "mean_absolute_error",
        "accuracy",
        "val_auc",
        "perplexity",
        "precision_loss",
    )

    assert [guess_comparison(name) for name in names] == [
        "lower",
        "lower",
        "higher",
        "higher",
        None,
        None,
    ]

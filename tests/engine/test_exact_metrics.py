"""Metrics of all 1,797 digits against NumPy's; `python -m scripts.exact_metrics` covers every combination."""

from __future__ import annotations

import functools

import pytest

from scripts import exact_metrics


@functools.cache
def _exact() -> dict[str, float]:
    return exact_metrics.exact(*exact_metrics.digits())


@pytest.mark.parametrize(
    ("form", "replicas", "batch"),
    [
        ("eager", 2, exact_metrics.EXAMPLES),
        ("graph, step by step", 1, 64),
        ("graph, while loop", 2, 449),  # the last batch has one example, and so one replica has none
        ("graph, metrics only", 2, 64),
    ],
)
def test_every_metric_agrees_with_numpys_to_1e_6(
    form: str, replicas: int, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = exact_metrics.evaluated(form, replicas, batch)
    names = set(_exact()) - ({"examples", "names", "margin"} if form == "graph, metrics only" else set())
    assert set(found) == names
    off = exact_metrics.differences(found, _exact())
    assert max(off.values()) < exact_metrics.TOLERANCE, off
    assert "step by step" not in caplog.text


def test_an_example_that_is_left_out_shows() -> None:
    images, labels = exact_metrics.digits()
    found = exact_metrics.exact(images[:-1], labels[:-1])
    off = exact_metrics.differences(found, _exact())
    assert all(value > exact_metrics.TOLERANCE for value in off.values()), off

"""The metrics of an interrupted loop, in the checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.training.metrics import InterruptedMetrics


def _metrics(metrics_continue: bool, *values: float) -> tuple[Any, list[tf.Variable], InterruptedMetrics]:
    trainer, variables = SimpleNamespace(metrics_continue=metrics_continue), [tf.Variable(value) for value in values]
    metrics = SimpleNamespace(variables=lambda: variables)
    return trainer, variables, InterruptedMetrics(trainer, metrics, tf.distribute.get_strategy())


def test_the_next_start_goes_on_with_their_values(caplog: pytest.LogCaptureFixture) -> None:
    _, _, before = _metrics(True, 1.5, 2.0)
    trainer, variables, after = _metrics(False, 0.0, 0.0)
    after.restore(before.state())
    assert trainer.metrics_continue and [float(one) for one in variables] == [1.5, 2.0]
    assert not caplog.records


def test_a_whole_loop_leaves_nothing_to_restore(caplog: pytest.LogCaptureFixture) -> None:
    _, _, before = _metrics(False, 1.5)
    assert before.state() is None
    trainer, variables, after = _metrics(True, 0.5)
    after.restore(None)
    assert not trainer.metrics_continue and float(variables[0]) == 0.5
    assert not caplog.records


def test_other_metrics_begin_again_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, _, before = _metrics(True, 1.5, 2.0)
    trainer, variables, after = _metrics(False, 0.0)
    after.restore(before.state())
    assert not trainer.metrics_continue and float(variables[0]) == 0.0
    assert "holds the state of other metrics than this run has" in caplog.text

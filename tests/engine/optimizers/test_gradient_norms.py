"""The recorded gradient norms, and which of them are spikes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.config.schema.gradient_processors import GradientSpikeAlarmConfig
from trainer_kit.optimizers.gradient_norms import GradientNorms, quantile_of


@pytest.mark.parametrize("quantile", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_the_quantile_is_numpys_upper_one(quantile: float) -> None:
    values = np.random.default_rng(0).uniform(size=101).astype(np.float32)
    for count in (1, 2, 10, 11, 100, 101):
        window = np.concatenate([values[:count], np.full(101 - count, -1.0, np.float32)])
        found = quantile_of(tf.constant(window), tf.constant(count, tf.int64), quantile)
        assert found.numpy() == np.quantile(values[:count], quantile, method="higher")


def _recorded(norms: Sequence[float], alarm: GradientSpikeAlarmConfig) -> tuple[GradientNorms, dict[str, float]]:
    step = tf.Variable(0, dtype=tf.int64)
    recorder = GradientNorms(step, alarm)
    for norm in norms:
        recorder.update([tf.constant([norm * 0.6]), tf.constant([norm * 0.8])])
        step.assign_add(1)
    return recorder, {name: float(value) for name, value in recorder.results().items()}


def test_spikes_are_norms_above_the_factor_times_the_quantile() -> None:
    norms = np.random.default_rng(1).exponential(size=60).astype(np.float32)
    alarm = GradientSpikeAlarmConfig(quantile=0.8, factor=1.5, window=10, warmup=15)
    _, found = _recorded(norms.tolist(), alarm)
    spikes = {}
    for i in range(15, 60):
        quantile = np.quantile(norms[max(i - 10, 0) : i], 0.8, method="higher")
        if norms[i] > 1.5 * quantile:
            spikes[i] = quantile
    largest = max(spikes, key=lambda i: norms[i])
    assert (found["spikes"], found["step"]) == (len(spikes), largest + 1) and len(spikes) > 3
    np.testing.assert_allclose([found["largest"], found["quantile"]], [norms[largest], spikes[largest]], rtol=1e-6)
    np.testing.assert_allclose([found["norm"], found["updates"]], [norms.mean(), 60], rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_a_spike_and_is_not_kept(bad: float) -> None:
    alarm = GradientSpikeAlarmConfig(quantile=1.0, factor=2.0, window=3, warmup=2)
    recorder, found = _recorded([1.0, 1.0, bad, 1.0, 3.0], alarm)
    assert (found["spikes"], found["step"], found["largest"]) == (2, 3, float("inf"))
    assert recorder.state()["seen"] == 4
    np.testing.assert_allclose(sorted(recorder.state()["window"]), [1.0, 1.0, 3.0])


def test_a_new_loop_begins_without_spikes_but_with_the_window() -> None:
    recorder, before = _recorded([1.0, 1.0, 5.0], GradientSpikeAlarmConfig(factor=2.0, window=3, warmup=2))
    recorder.reset()
    after = {name: float(value) for name, value in recorder.results().items()}
    assert before["spikes"] == 1 and after["spikes"] == after["largest"] == after["step"] == after["updates"] == 0
    assert recorder.state()["seen"] == 3

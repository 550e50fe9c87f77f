"""What each gradient processor does to gradients, dense and sparse, in the order of the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.gradient_processor_configs import GradientProcessorConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_processing import GradientProcessing

KERNEL = np.array([[1.0, -4.0], [3.0, 0.0], [2.0, 10.0]], np.float32)
BIAS = np.array([3.0, -4.0], np.float32)
Values = dict[str, np.ndarray]


def _process_gradients(
    *sections: dict[str, Any],
    updates: int = 0,
    sparse: bool = False,
    seed: int = 0,
    in_xla: bool | None = False,
) -> Values:
    """Returns the processed gradients of a kernel and a bias, from processors with these sections.

    `in_xla` is None: eagerly, which takes less time than a trace.
    """
    processing = GradientProcessing(
        [GradientProcessorConfig(**section) for section in sections], seed
    )
    variables = [tf.Variable(KERNEL, name="kernel"), tf.Variable(BIAS, name="bias")]
    kernel = (
        tf.IndexedSlices(KERNEL[::-1], tf.constant([2, 1, 0]), tf.constant([3, 2]))
        if sparse
        else KERNEL
    )
    gradients = [kernel if sparse else tf.constant(KERNEL), tf.constant(BIAS)]
    run = (
        processing
        if in_xla is None
        else tf.function(processing, autograph=False, jit_compile=in_xla)
    )
    results = run(gradients, variables, tf.constant(updates, tf.int64))
    return dict(
        zip(
            ("kernel", "bias"),
            (tf.convert_to_tensor(result).numpy() for result in results),
            strict=True,
        )
    )


def _compute_norm(*arrays: np.ndarray) -> float:
    return float(np.sqrt(sum(np.sum(np.square(array)) for array in arrays)))


SCALE = {"type": "scale", "scale": {"factor": -2.0}}
CASES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "scale": (SCALE, lambda g: -2 * g),
    "clip_value": (
        {"type": "clip_value", "clip_value": {"bound": 3.5}},
        lambda g: np.clip(g, -3.5, 3.5),
    ),
    "clip_norm": (
        {"type": "clip_norm", "clip_norm": {"bound": 6.0}},
        lambda g: g * min(1, 6 / _compute_norm(g)),
    ),
    "clip_global_norm": (
        {"type": "clip_global_norm", "clip_global_norm": {"bound": 6.0}},
        lambda g: g * 6 / _compute_norm(KERNEL, BIAS),
    ),
    "centralize": ({"type": "centralize"}, lambda g: g - g.mean(0) if g.ndim > 1 else g),
    "check": ({"type": "check"}, lambda g: g),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_does_what_it_says(case: str, sparse: bool) -> None:
    section, expected = CASES[case]

    for name, gradient in _process_gradients(section, sparse=sparse).items():
        np.testing.assert_allclose(
            gradient, expected({"kernel": KERNEL, "bias": BIAS}[name]), rtol=1e-6, err_msg=name
        )


def test_processors_run_in_the_order_of_the_config() -> None:
    clip = {"type": "clip_value", "clip_value": {"bound": 3.0}}

    np.testing.assert_array_equal(_process_gradients(SCALE, clip)["bias"], [-3.0, 3.0])
    np.testing.assert_array_equal(_process_gradients(clip, SCALE)["bias"], [-6.0, 6.0])


def test_patterns_choose_variables(caplog: pytest.LogCaptureFixture) -> None:
    """A norm over all gradients is that of the chosen ones."""
    clip = {
        "type": "clip_global_norm",
        "clip_global_norm": {"bound": 1.0},
        "variables": ("bi.s", "kernal"),
    }
    gradients = _process_gradients(clip)

    np.testing.assert_array_equal(gradients["kernel"], KERNEL)
    np.testing.assert_allclose(gradients["bias"], BIAS / 5, rtol=1e-6)
    assert "the pattern 'kernal' matches no variable; there are: kernel" in caplog.text


def test_noise_has_the_decaying_standard_deviation() -> None:
    noise_section = {"type": "noise", "noise": {"stddev": 2.0, "decay": 0.5}}
    processing = GradientProcessing([GradientProcessorConfig(**noise_section)])  # type: ignore[arg-type]
    zeros = tf.zeros([100, 100])
    variable = tf.Variable(tf.zeros([100, 100]), name="kernel")
    for updates, stddev in ((0, 2.0), (3, 1.0), (99, 0.2)):
        (noise,) = processing([zeros], [variable], tf.constant(updates))
        assert np.std(noise) == pytest.approx(stddev, rel=0.03)  # of 10000 numbers
        assert np.mean(noise) == pytest.approx(0.0, abs=0.05 * stddev)


def test_noise_depends_on_update_seeds_place_and_variable() -> None:
    section = {"type": "noise", "noise": {"stddev": 1.0, "decay": 0.0}}
    other = {"type": "noise", "noise": {"stddev": 1.0, "decay": 0.0, "seed": 1}}
    alike = {"type": "scale", "scale": {"factor": 1.0}}
    drawn = [_draw_noise(section), _draw_noise(section, updates=1), _draw_noise(section, seed=1)]

    drawn += [_draw_noise(other), _draw_noise(alike, section)]

    assert len({tuple(noise) for noise in drawn}) == len(drawn)
    np.testing.assert_array_equal(_draw_noise(section, in_xla=False), drawn[0])  # in a graph
    np.testing.assert_array_equal(_draw_noise(section, sparse=True), drawn[0])
    assert not np.isin(drawn[0][:2], drawn[0][-2:]).any()


def test_xla_draws_the_same_noise() -> None:
    section = {"type": "noise", "noise": {"stddev": 1.0}}
    np.testing.assert_allclose(_draw_noise(section, in_xla=True), _draw_noise(section), atol=1e-5)


def _draw_noise(*sections: dict[str, Any], **options: Any) -> np.ndarray:
    gradients = _process_gradients(*sections, **{"in_xla": None, **options})
    return np.concatenate([(gradients["kernel"] - KERNEL).ravel(), gradients["bias"] - BIAS])


@tk.configclass
class PowerConfig(tk.Config):
    """A processor of these tests.

    Attributes:
      power: The power of the gradients.
    """

    power: int = 2


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Registers a processor called "power" for the time of a test."""
    monkeypatch.setattr(GradientProcessorConfig, "registry", Registry("gradient processor"))
    return lambda build: tk.register_gradient_processor("power", PowerConfig)(build) and None


def test_a_registered_function_gets_one_gradient(register: Callable[[Any], None]) -> None:
    register(
        lambda config: (
            lambda gradient: gradient**config.power if tf.rank(gradient) > 1 else gradient
        )
    )
    gradients = _process_gradients({"type": "power", "power": {"power": 3}}, sparse=True)

    np.testing.assert_allclose(gradients["kernel"], KERNEL**3)
    np.testing.assert_array_equal(gradients["bias"], BIAS)


def test_a_registered_function_gets_all_and_their_variables(
    register: Callable[[Any], None],
) -> None:
    def build(
        config: PowerConfig,
    ) -> Callable[[Sequence[tf.Tensor], Sequence[Any]], list[tf.Tensor]]:
        return lambda gradients, variables: [
            g * v for g, v in zip(gradients, variables, strict=True)
        ]

    register(build)

    np.testing.assert_allclose(_process_gradients({"type": "power"})["bias"], BIAS**2)


@pytest.mark.parametrize(
    "build",
    [
        lambda config: 5,
        lambda config: lambda a, b, c: a,
        lambda config: lambda gradient: None,
        lambda config: tf.reduce_sum,
        lambda config: lambda gradients, variables: gradients[:1],
    ],
    ids=["a number", "three parameters", "no gradient", "another shape", "too few gradients"],
)
def test_a_registered_function_that_cannot_be_used_is_refused(
    build: Callable[..., Any], register: Callable[[Any], None]
) -> None:
    register(build)
    with pytest.raises(UsageError):
        _process_gradients({"type": "power"})

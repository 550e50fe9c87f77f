"""GradientProcessing: what a config does to gradients before an optimizer gets them (`gradient_processors`).

All functions here run in a replica, in graph or eager, on gradients that are summed over replicas
and unscaled. What they compute is the same on all replicas, so that 1, 2 or 4 replicas train alike.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from trainer_kit.config.schema.gradient_processor_configs import (
    GradientNoiseConfig,
    GradientProcessorConfig,
)
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.optimizers.gradients import Clipping, Gradient, clip, scale_gradient
from trainer_kit.optimizers.per_variable import similar_paths, variable_path

# A function of gradients, their variables and the number of updates so far, an integer scalar
# tensor.
Processor: TypeAlias = Callable[[list[Gradient], list[Any], Any], Sequence[Gradient]]

_log = logging.getLogger(__name__)
_NOT_FINITE_MESSAGE = (
    "trainer_kit: a gradient is not finite; variables, whether each gradient is finite, and the"
    " step:"
)
_NOT_FINITE_PATTERN = re.compile(
    re.escape(_NOT_FINITE_MESSAGE) + r" ([^\]]*)\] \[([01 ]+)\] \[(\d+)\]"
)


class GradientProcessing:
    """The gradient processors of an optimizer, its attribute `gradient_processing`. Created in strategy scope.

    Args:
      sections: The sections of the processors, in order.
      random_seed: The seed of the run.

    Attributes:
      is_used: Whether a step has been traced that processes gradients.
      optimizer_name: The name of the optimizer among several, so that each draws numbers of its
        own; "": it has none.
      global_step: The variable that counts complete steps, for messages; None: the number of
        updates counts.

    Raises:
      UsageError: when a registered processor cannot be made.
    """

    def __init__(self, sections: Sequence[GradientProcessorConfig], random_seed: int = 0) -> None:
        self.is_used = False
        self.optimizer_name = ""
        self.global_step: Any = None
        seeds = (f"{random_seed}/{place}" for place in range(len(sections)))
        self._processors = [
            (self._build_processor(one, seed), one.variables)
            for one, seed in zip(sections, seeds, strict=True)
        ]

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], updates: Any
    ) -> list[Gradient]:
        """Returns the processed gradients; in a replica.

        Args:
          gradients: The gradients, summed over replicas and unscaled.
          variables: The variable of each gradient.
          updates: The number of updates so far, an integer scalar.
        """
        paths = [variable_path(variable) for variable in variables]
        results = list(gradients)
        if not self.is_used:
            self._warn_about_unused_patterns(paths)
        self.is_used = True

        for process, patterns in self._processors:
            places = [
                place
                for place, path in enumerate(paths)
                if not patterns or any(re.search(pattern, path) for pattern in patterns)
            ]
            if not places:
                continue
            processed = process(
                [results[place] for place in places],
                [variables[place] for place in places],
                updates,
            )
            for place, gradient in zip(places, processed, strict=True):
                results[place] = gradient

        return results

    def _build_processor(self, section: GradientProcessorConfig, seed: str) -> Processor:
        if section.type == "check":
            return self._check_gradients
        if section.type == "noise":
            config = section.get()
            return lambda gradients, variables, updates: _with_noise(
                config,
                f"{seed}/{config.seed}{self.optimizer_name and '/'}{self.optimizer_name}",
                gradients,
                updates,
            )
        return _build_stateless_processor(section)

    def _check_gradients(
        self, gradients: list[Gradient], variables: list[Any], updates: Any
    ) -> list[Gradient]:
        return _check_finite(
            gradients, variables, (updates if self.global_step is None else self.global_step) + 1
        )

    def _warn_about_unused_patterns(self, paths: Sequence[str]) -> None:
        for pattern in dict.fromkeys(
            pattern for _, patterns in self._processors for pattern in patterns
        ):
            if not any(re.search(pattern, path) for path in paths):
                near = ", ".join(similar_paths(pattern, paths))
                _log.warning(
                    "gradient_processors: the pattern %r matches no variable; there are: %s",
                    pattern,
                    near,
                )


def parse_non_finite_gradient(error: tf.errors.OpError) -> tuple[str, int] | None:
    """Returns variable and step of a gradient that the processor `check` has refused; None for other errors."""
    found = _NOT_FINITE_PATTERN.search(error.message)
    if found is None:
        return None
    names, finite, step = found[1].split("|"), found[2].split(), int(found[3])
    return names[finite.index("0")], step


def _build_stateless_processor(section: GradientProcessorConfig) -> Processor:
    kind, chosen = str(section.type), section.get()
    if kind in GradientProcessorConfig.registry:
        return _wrap_registered_processor(
            kind, GradientProcessorConfig.registry.lookup(kind).build(chosen)
        )
    if kind == "scale":
        return lambda gradients, variables, updates: [
            scale_gradient(one, chosen.factor) for one in gradients
        ]
    if kind in _BOUNDS:
        bounds = Clipping(**{_BOUNDS[kind]: chosen.bound})
        return lambda gradients, variables, updates: clip(gradients, bounds)
    return _centralize if kind == "centralize" else _summarize


def _with_noise(
    config: GradientNoiseConfig, seed: str, gradients: list[Gradient], updates: Any
) -> list[Gradient]:
    """Returns gradients with noise, a function of the seed, the place of the variable and the update."""
    first = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little")
    done = tf.cast(tf.convert_to_tensor(updates), tf.int64)
    stddev = config.stddev * (1.0 + tf.cast(done, tf.float32)) ** -config.decay
    results: list[Gradient] = []
    for place, gradient in enumerate(gradients):
        dense = tf.convert_to_tensor(gradient)  # rows without a gradient get noise too
        seeds = tf.stack([tf.constant(first + place, tf.int64), done])
        results.append(
            dense + tf.cast(stddev * _normal_numbers(tf.shape(dense), seeds), dense.dtype)
        )
    return results


def _normal_numbers(shape: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns numbers of the standard normal distribution, float32 (Box-Muller); runs in graph or eagerly.

    XLA makes other numbers of the same bits in tf.random.stateless_normal and stateless_uniform,
    whatever their `alg`. The bits of Philox are the same, and so these numbers are, up to rounding.

    Args:
      shape: The shape, an int32 vector.
      seeds: The seed, an int64 vector of two elements.
    """
    size = tf.reduce_prod(shape)
    pairs = tf.stack([2, (size + 1) // 2])
    bits = tf.random.stateless_uniform(
        pairs, seeds, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    upper = tf.cast(
        tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.float32
    )  # exact in float32
    shares = (upper + 1.0) * 2.0**-24  # above 0, so that the logarithm is finite
    length, angle = tf.sqrt(-2.0 * tf.math.log(shares[0])), 2.0 * math.pi * shares[1]
    return tf.reshape(
        tf.concat([length * tf.cos(angle), length * tf.sin(angle)], axis=0)[:size], shape
    )


def _centralize(gradients: list[Gradient], variables: list[Any], updates: Any) -> list[Gradient]:
    centralized: list[Gradient] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if len(variable.shape) >= 2:
            gradient = tf.convert_to_tensor(gradient)  # rows without a gradient change too
            axes = list(range(gradient.shape.rank - 1))
            gradient -= tf.reduce_mean(gradient, axis=axes, keepdims=True)
        centralized.append(gradient)
    return centralized


def _check_finite(gradients: list[Gradient], variables: list[Any], step: Any) -> list[Gradient]:
    """Fails unless all gradients are finite; `parse_non_finite_gradient` reads variable and step from the error.

    There is one assertion for all gradients, and no branch, which would cost a small step more.
    """
    finite = [tf.reduce_all(tf.math.is_finite(_values(one))) for one in gradients]
    flags, names = (
        tf.cast(tf.stack(finite), tf.int32),
        "|".join(variable_path(one) for one in variables),
    )
    data = [f"{_NOT_FINITE_MESSAGE} {names}", flags, step]
    made = tf.raw_ops.Assert(
        condition=tf.reduce_all(tf.stack(finite)), data=data, summarize=len(finite)
    )
    with tf.control_dependencies([] if made is None else [made]):  # None: eager
        return [
            tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in gradients
        ]


def _summarize(gradients: list[Gradient], variables: list[Any], updates: Any) -> list[Gradient]:
    def write() -> tf.Tensor:
        with (
            tf.summary.record_if(True),
            tf.name_scope(""),
        ):  # else "cond/" would stand before the names
            for gradient, variable in zip(gradients, variables, strict=True):
                norm = tf.norm(tf.cast(_values(gradient), tf.float32))
                tf.summary.scalar(f"gradient_norm/{variable_path(variable)}", norm)
        return tf.constant(True)

    # The condition is outside, so that the norms are computed only in steps that write them.
    tf.cond(tf.summary.should_record_summaries(), write, lambda: tf.constant(False))
    return gradients


def _wrap_registered_processor(name: str, function: Any) -> Processor:
    """Returns a processor that calls the function that a user's function has made."""
    count = -1  # of the parameters without a default
    if callable(function):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        count = sum(
            parameter.kind in positional and parameter.default is parameter.empty
            for parameter in parameters
        )
    if count not in (1, 2):
        raise UsageError(
            f"the gradient processor {name!r} built {function!r:.80}; return a function of one"
            " gradient, or of the lists of gradients and variables"
        )

    def process(gradients: list[Gradient], variables: list[Any], updates: Any) -> list[Gradient]:
        dense = [
            tf.convert_to_tensor(one) for one in gradients
        ]  # so that the function may do with them what it wants
        call = apply_autograph(function)
        given = [call(one) for one in dense] if count == 1 else call(dense, list(variables))
        return _check_results(name, given, dense, variables)

    return process


def _check_results(
    name: str, results: Any, dense: Sequence[tf.Tensor], variables: Sequence[Any]
) -> list[tf.Tensor]:
    """Returns what a user's function returned, in the dtypes of the gradients.

    Raises:
      UsageError: when these are not as many gradients of the same shapes.
    """
    if not isinstance(results, (list, tuple)) or len(results) != len(dense):
        count = (
            f"{len(results)} gradients"
            if isinstance(results, (list, tuple))
            else f"a {type(results).__name__}"
        )
        raise UsageError(
            f"the gradient processor {name!r} returned {count}; return a list of {len(dense)}"
            " gradients"
        )
    for one, gradient, variable in zip(results, dense, variables, strict=True):
        if one is None or not tf.TensorShape(getattr(one, "shape", None)).is_compatible_with(
            gradient.shape
        ):
            kind = "None" if one is None else f"a gradient of shape {one.shape}"
            raise UsageError(
                f"the gradient processor {name!r} returned {kind} for {variable_path(variable)},"
                f" whose shape is {gradient.shape}; return a gradient of the same shape"
            )
    return [tf.cast(one, gradient.dtype) for one, gradient in zip(results, dense, strict=True)]


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


_BOUNDS = {
    "clip_value": "clipvalue",
    "clip_norm": "clipnorm",
    "clip_global_norm": "global_clipnorm",
}

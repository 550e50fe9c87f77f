"""GradientProcessing: changes gradients before an optimizer gets them (`gradient_processors`).

All functions here run in a replica, in graph or eagerly, on gradients that are summed over replicas
and unscaled. Their results are the same on all replicas, so that 1, 2 or 4 replicas train alike.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from trainer_kit.config.schema.gradient_processor_configs import (
    GradientNoiseConfig,
    GradientProcessorConfig,
)
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.optimizers.gradients import Clipping, Gradient, clip, get_values, scale_gradient
from trainer_kit.optimizers.per_variable import is_found, matches_any, similar_paths, variable_path
from trainer_kit.typing import IntLike, Variable

# A function of gradients, their variables and the number of updates so far, an integer scalar
# tensor.
Processor: TypeAlias = Callable[[list[Gradient], list[Variable], IntLike], Sequence[Gradient]]

_LOG = logging.getLogger(__name__)
_NOT_FINITE_MESSAGE = (
    "trainer_kit: a gradient is not finite; variables, whether each gradient is finite, and the"
    " step:"
)
_NOT_FINITE_PATTERN = re.compile(
    re.escape(_NOT_FINITE_MESSAGE)
    # The data of the assertion: the paths of the variables, the flags and the step.
    + r" ([^\]]*)\] \[([01 ]+)\] \[(\d+)\]"
)


class GradientProcessing:
    """The gradient processors of an optimizer, its attribute `gradient_processing`.

    Created in strategy scope.

    Args:
      sections: The sections of the processors, in order.
      random_seed: The seed of the run.

    Attributes:
      is_used: Whether a step has been traced that processes gradients.
      optimizer_name: The name of the optimizer among several, so that each draws separate numbers.
        "" means that it has none.
      global_step: The variable that counts complete steps, for messages. None means that the number
        of updates counts.

    Raises:
      UsageError: when a registered processor cannot be built.
    """

    def __init__(self, sections: Sequence[GradientProcessorConfig], random_seed: int = 0) -> None:
        self.is_used = False
        self.optimizer_name = ""
        self.global_step: tf.Variable | None = None

        # Each processor with the patterns of its variables.
        self._processors: list[tuple[Processor, Sequence[str]]] = []
        for place, section in enumerate(sections):
            processor = self._build_processor(section, f"{random_seed}/{place}")
            self._processors.append((processor, section.variables))

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable], updates: IntLike
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
            all_patterns: list[str] = []
            for _, patterns in self._processors:
                all_patterns += patterns
            for pattern in dict.fromkeys(all_patterns):
                if not is_found(pattern, paths):
                    near = ", ".join(similar_paths(pattern, paths))
                    _LOG.warning(
                        "gradient_processors: the pattern %r matches no variable; there are: %s",
                        pattern,
                        near,
                    )
        self.is_used = True

        for process, patterns in self._processors:
            # A processor without patterns has all variables.
            places = []
            for place, path in enumerate(paths):
                if not patterns or matches_any(path, patterns):
                    places.append(place)
            if not places:
                continue

            selected_gradients = [results[place] for place in places]
            selected_variables = [variables[place] for place in places]
            processed = process(selected_gradients, selected_variables, updates)
            for place, gradient in zip(places, processed, strict=True):
                results[place] = gradient

        return results

    def _build_processor(self, section: GradientProcessorConfig, seed: str) -> Processor:
        kind = str(section.type)
        config = section.get()

        if kind == "check":
            return self._check_gradients

        if kind == "noise":
            # The name of the optimizer is read when the step is traced: it is set after the
            # processors are built.
            def add_noise(
                gradients: list[Gradient], variables: list[Variable], updates: IntLike
            ) -> list[Gradient]:
                noise_seed = f"{seed}/{config.seed}"
                if self.optimizer_name:
                    noise_seed += f"/{self.optimizer_name}"
                return _with_noise(config, noise_seed, gradients, updates)

            return add_noise

        if kind in GradientProcessorConfig.registry:
            entry = GradientProcessorConfig.registry.lookup(kind)
            function = entry.build(config)
            return _wrap_registered_processor(kind, function)

        if kind == "scale":
            return lambda gradients, variables, updates: [
                scale_gradient(gradient, config.factor) for gradient in gradients
            ]

        if kind in _BOUNDS:
            bound_name = _BOUNDS[kind]
            bounds = Clipping(**{bound_name: config.bound})
            return lambda gradients, variables, updates: clip(gradients, bounds)

        return _centralize if kind == "centralize" else _summarize

    def _check_gradients(
        self, gradients: list[Gradient], variables: list[Variable], updates: IntLike
    ) -> list[Gradient]:
        """Fails unless all gradients are finite.

        `parse_non_finite_gradient` reads variable and step from the error. The check is one
        assertion for all gradients, without a branch, which would cost a small step more.
        """
        complete_steps = updates if self.global_step is None else self.global_step
        step = complete_steps + 1
        finite = []
        for gradient in gradients:
            values = get_values(gradient)
            is_finite = tf.math.is_finite(values)
            finite.append(tf.reduce_all(is_finite))
        flags = tf.cast(tf.stack(finite), tf.int32)
        paths = [variable_path(variable) for variable in variables]
        names = "|".join(paths)

        all_finite = tf.reduce_all(tf.stack(finite))
        assertion = tf.raw_ops.Assert(
            condition=all_finite,
            data=[f"{_NOT_FINITE_MESSAGE} {names}", flags, step],
            summarize=len(finite),
        )
        # In eager mode there is no operation to wait for.
        conditions = [] if assertion is None else [assertion]
        with tf.control_dependencies(conditions):
            return [
                tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                for gradient in gradients
            ]


def parse_non_finite_gradient(error: tf.errors.OpError) -> tuple[str, int] | None:
    """Returns variable and step of a gradient that the processor `check` has refused.

    None for other errors.
    """
    match = _NOT_FINITE_PATTERN.search(error.message)
    if match is None:
        return None
    names = match[1].split("|")
    flags = match[2].split()
    step = int(match[3])
    place = flags.index("0")
    return names[place], step


def _with_noise(
    config: GradientNoiseConfig, seed: str, gradients: list[Gradient], updates: IntLike
) -> list[Gradient]:
    """Returns gradients with noise that depends on seed, place of the variable and update."""
    digest = hashlib.sha256(seed.encode()).digest()
    first_seed = int.from_bytes(digest[:7], "little")
    update = tf.convert_to_tensor(updates)
    update = tf.cast(update, tf.int64)
    number = 1.0 + tf.cast(update, tf.float32)
    decay = number**-config.decay
    stddev = config.stddev * decay

    results: list[Gradient] = []
    for place, gradient in enumerate(gradients):
        # Rows without a gradient get noise too.
        dense = tf.convert_to_tensor(gradient)
        variable_seed = tf.constant(first_seed + place, tf.int64)
        seeds = tf.stack([variable_seed, update])
        shape = tf.shape(dense)
        numbers = _normal_numbers(shape, seeds)
        noise = stddev * numbers
        noise = tf.cast(noise, dense.dtype)
        results.append(dense + noise)
    return results


def _normal_numbers(shape: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers of the standard normal distribution (Box-Muller).

    Runs in graph or eagerly. XLA computes other numbers from the same bits in
    tf.random.stateless_normal and stateless_uniform, whatever their `alg`. The bits of Philox are
    the same, and so these numbers are, up to rounding.

    Args:
      shape: The shape, an int32 vector.
      seeds: The seed, an int64 vector of two elements.
    """
    # A pair of random numbers gives a pair of normal ones.
    size = tf.reduce_prod(shape)
    pair_count = (size + 1) // 2
    pairs_shape = tf.stack([2, pair_count])
    bits = tf.random.stateless_uniform(
        pairs_shape, seeds, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )

    # The upper 24 bits are exact in float32. The shares are above 0, so that the logarithm is
    # finite.
    shift = tf.constant(8, tf.uint32)
    upper_bits = tf.bitwise.right_shift(bits, shift)
    numerators = tf.cast(upper_bits, tf.float32) + 1.0
    shares = numerators * 2.0**-24

    logarithm = tf.math.log(shares[0])
    length = tf.sqrt(-2.0 * logarithm)
    angle = 2.0 * math.pi * shares[1]
    first_half = length * tf.cos(angle)
    second_half = length * tf.sin(angle)
    numbers = tf.concat([first_half, second_half], axis=0)

    # The last pair has a number too many if the size is odd.
    numbers = numbers[:size]
    return tf.reshape(numbers, shape)


def _centralize(
    gradients: list[Gradient], variables: list[Variable], updates: IntLike
) -> list[Gradient]:
    centralized: list[Gradient] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if len(variable.shape) >= 2:
            # Rows without a gradient change too.
            gradient = tf.convert_to_tensor(gradient)
            last_axis = gradient.shape.rank - 1
            axes = list(range(last_axis))
            means = tf.reduce_mean(gradient, axis=axes, keepdims=True)
            gradient -= means
        centralized.append(gradient)
    return centralized


def _summarize(
    gradients: list[Gradient], variables: list[Variable], updates: IntLike
) -> list[Gradient]:
    def write() -> tf.Tensor:
        # Without the empty name scope "cond/" would stand before the names.
        with tf.summary.record_if(True), tf.name_scope(""):
            for gradient, variable in zip(gradients, variables, strict=True):
                values = get_values(gradient)
                values = tf.cast(values, tf.float32)
                norm = tf.norm(values)
                path = variable_path(variable)
                tf.summary.scalar(f"gradient_norm/{path}", norm)
        return tf.constant(True)

    # The condition is outside, so that the norms are computed only in steps that write them.
    is_due = tf.summary.should_record_summaries()
    tf.cond(is_due, write, lambda: tf.constant(False))
    return gradients


def _wrap_registered_processor(name: str, function: object) -> Processor:
    """Returns a processor that calls the function that a registered builder returned."""
    # The number of parameters without a default says what the function takes.
    parameter_count = -1
    if callable(function):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(function)
        parameter_count = 0
        for parameter in signature.parameters.values():
            if parameter.kind in positional and parameter.default is parameter.empty:
                parameter_count += 1
    if not callable(function) or parameter_count not in (1, 2):
        raise UsageError(
            f"the gradient processor {name!r} built {function!r:.80};"
            " return a function of one gradient, or of the lists of gradients and variables"
        )

    def process(
        gradients: list[Gradient], variables: list[Variable], updates: IntLike
    ) -> list[Gradient]:
        # Dense tensors let the function do with the gradients what it wants.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        call = apply_autograph(function)
        if parameter_count == 1:
            single_results = [call(gradient) for gradient in dense]
            return _check_results(name, single_results, dense, variables)
        results = call(dense, list(variables))
        return _check_results(name, results, dense, variables)

    return process


def _check_results(
    name: str, results: object, dense: Sequence[tf.Tensor], variables: Sequence[Variable]
) -> list[tf.Tensor]:
    """Returns the results of a user's function, in the dtypes of the gradients.

    Raises:
      UsageError: when the results are not as many gradients of the same shapes.
    """
    if not isinstance(results, (list, tuple)) or len(results) != len(dense):
        kind = f"a {type(results).__name__}"
        if isinstance(results, (list, tuple)):
            kind = f"{len(results)} gradients"
        raise UsageError(
            f"the gradient processor {name!r} returned {kind};"
            f" return a list of {len(dense)} gradients"
        )

    for result, gradient, variable in zip(results, dense, variables, strict=True):
        shape = tf.TensorShape(getattr(result, "shape", None))
        if result is None or not shape.is_compatible_with(gradient.shape):
            kind = "None"
            if result is not None:
                kind = f"a gradient of shape {result.shape}"
            path = variable_path(variable)
            raise UsageError(
                f"the gradient processor {name!r} returned {kind} for {path},"
                f" whose shape is {gradient.shape}; return a gradient of the same shape"
            )

    converted = []
    for result, gradient in zip(results, dense, strict=True):
        converted.append(tf.cast(result, gradient.dtype))
    return converted


_BOUNDS = {
    "clip_value": "clipvalue",
    "clip_norm": "clipnorm",
    "clip_global_norm": "global_clipnorm",
}

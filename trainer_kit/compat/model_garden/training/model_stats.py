"""How large a model is and how much it computes, as Model Garden's programs ask for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.compat.model_garden.files.text_files import write_text
from trainer_kit.errors import UsageError
from trainer_kit.telemetry.flops import FlopsResult, count_flops, count_traced
from trainer_kit.telemetry.model_stats import ParameterCount, count_parameters

_LOG = logging.getLogger(__name__)


def write_model_params(model: Any, output_path: str) -> None:
    """Writes the name and shape of each weight of a model, one per line, and how many parameters they have.

    The state of random generators, which Keras 3 counts among its variables, is left out: it is no parameter.

    Args:
      model: of Keras 3 or tf_keras, built, or a tf.Module.
      output_path: of the file, local or remote.

    Raises:
      UsageError: (a ValueError) when the model has no weights yet.
      StorageError: when the file cannot be written.
    """
    count = count_parameters(model)
    if count.problem:
        raise UsageError(f"{output_path} is not written: {count.problem}")
    weights = model.weights if hasattr(model, "weights") else model.variables
    lines = [f"{getattr(one, 'path', None) or one.name} {[int(size) for size in one.shape]}" for one in weights]
    write_text(output_path, "\n".join([*lines, "", f"Total params: {count.total}"]) + "\n")


def try_count_params(model: Any, trainable_only: bool = False) -> int | None:
    """Returns the number of parameters of a model; None, with a warning that says why, when it is not known.

    Args:
      model: of Keras 3 or tf_keras, or a tf.Module.
      trainable_only: leave out what is not trained. (Model Garden does so for a tf.Module only.)
    """
    if hasattr(model, "count_params") and not trainable_only:
        try:
            return int(model.count_params())
        except ValueError as error:
            _LOG.warning("the number of parameters is not known: %s", _first_line(error))
            return None
    try:
        count = count_parameters(model)
    except (ValueError, AttributeError) as error:  # a tf_keras model that is not built, or no model
        count = ParameterCount(0, 0, _first_line(error))
    if count.problem:
        _LOG.warning("the number of parameters is not known: %s", count.problem)
        return None
    return count.trainable if trainable_only else count.total


def try_count_flops(
    model: Any, inputs_kwargs: Mapping[str, Any] | None = None, output_path: str | None = None
) -> int | None:
    """Returns the floating-point operations of one forward pass of a model, a multiplication and addition being 2.

    For one example where the model knows its inputs; traces the model, which takes seconds for a large one. None, with
    a warning that says why, when they cannot be counted; a warning too when some are missing in the number.

    Args:
      model: of Keras 3 or tf_keras, or anything with a method `call`.
      inputs_kwargs: the arguments of `call`, tensor specs above all, for a model that does not know its inputs; counted
        for the sizes that they have.
      output_path: of a local file for the profiler's own account, operation by operation.
    """
    result = _count(model, inputs_kwargs, output_path)
    if result.problem:
        _LOG.warning("floating-point operations of %s: %s", type(model).__name__, result)
    return result.flops


def _count(model: Any, inputs_kwargs: Mapping[str, Any] | None, output_path: str | None) -> FlopsResult:
    inputs = _inputs(model)
    if inputs is not None:
        return count_flops(model, tf.nest.map_structure(_spec, inputs), output_path)
    if inputs_kwargs is None:
        return FlopsResult(None, "the model does not know its inputs; give their specs in inputs_kwargs")
    call = model.call if hasattr(model, "call") else model.__call__
    try:
        return count_traced(tf.function(call).get_concrete_function(**inputs_kwargs), output_path)
    except Exception as error:  # whatever the user's code raises: a statistic must not end a run
        return FlopsResult(None, f"{type(error).__name__}: {_first_line(error)}")


def _inputs(model: Any) -> Any:
    """The inputs that a model was made of, in the structure in which it is called; None where it knows none."""
    inputs = getattr(model, "inputs", None)
    if not inputs or len(inputs) == 1:
        return inputs[0] if inputs else None
    try:
        return model.input
    except (AttributeError, ValueError):
        return inputs


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

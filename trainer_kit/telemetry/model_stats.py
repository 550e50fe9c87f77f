"""How large a model is: its parameters, and a summary as text.

Works on Keras 3 and tf_keras models and on plain `tf.Module`, none of which is imported here: what is asked of a model
is `trainable_weights` and `non_trainable_weights`, or `trainable_variables` and `variables`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import StorageError


@dataclass(frozen=True)
class ParameterCount:
    """The number of values in a model's weights.

    Attributes:
      trainable: in weights that the optimizer changes.
      non_trainable: in frozen weights and statistics such as those of batch normalisation.
      problem: why there is nothing to count; empty when there is.
    """

    trainable: int
    non_trainable: int
    problem: str = ""

    @property
    def total(self) -> int:
        """All of them; what Keras's `count_params` returns."""
        return self.trainable + self.non_trainable

    def __str__(self) -> str:
        if self.problem:
            return f"parameters unknown: {self.problem}"
        return f"{self.total:,} parameters, {self.trainable:,} of them trainable"


def count_parameters(model: Any) -> ParameterCount:
    """Counts the values in the weights of `model`, each variable once; random seeds and metrics are none.

    A Keras model that is not built has no weights yet; the result's `problem` says so.
    """
    if not getattr(model, "built", True):
        return ParameterCount(0, 0, "the model is not built yet; call it on a batch first")
    trainable, frozen = _weights(model)
    return ParameterCount(sum(map(_size, trainable)), sum(map(_size, frozen)))


def model_summary(model: Any) -> str:
    """Returns the name, shape and dtype of each weight of `model`, one per line, and the number of parameters.

    Of a Keras model that is not built it says that it is not.
    """
    count = count_parameters(model)
    if count.problem:
        return str(count)
    trainable, frozen = _weights(model)
    rows = [("weight", "shape", "dtype", "parameters", "")]
    for weights, note in ((trainable, ""), (frozen, "not trained")):
        rows += [(_name(w), str(_shape(w)), tf.dtypes.as_dtype(w.dtype).name, f"{_size(w):,}", note) for w in weights]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"Total params: {count.total:,}", f"Trainable params: {count.trainable:,}"]
    return "\n".join([*lines, f"Non-trainable params: {count.non_trainable:,}"])


def write_model_summary(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes `model_summary(model)` to the file at `path`, local or remote.

    Raises:
      StorageError: when the file cannot be written.
    """
    text = model_summary(model) + "\n"
    if not files.is_remote(path):
        files.write_text(path, text, "model_summary")
        return
    try:
        with tf.io.gfile.GFile(os.fspath(path), "w") as stream:
            stream.write(text)
    except tf.errors.OpError as error:
        raise StorageError(f"{path} cannot be written: {error.message}") from error


def _weights(model: Any) -> tuple[list[Any], list[Any]]:
    if hasattr(model, "trainable_weights"):
        trainable, every = model.trainable_weights, [*model.trainable_weights, *model.non_trainable_weights]
    else:
        trainable, every = model.trainable_variables, model.variables
    trainable = _unique(trainable)
    seen = {id(variable) for variable in trainable}
    return trainable, [variable for variable in _unique(every) if id(variable) not in seen]


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in variable.shape)


def _size(variable: Any) -> int:
    return math.prod(_shape(variable))

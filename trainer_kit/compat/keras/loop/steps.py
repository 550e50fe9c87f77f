"""LoopSteps: the functions of a loop by hand, which use a model, an optimizer and metrics that are around them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.used_metrics import used_metrics
from trainer_kit.distribution.tracing import traced
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopSteps:
    """What a loop by hand calls for each batch, and what its functions use.

    Attributes:
      train_step: Trains on a batch and returns its loss, a tuple that begins with the loss, or a dict with "loss".
      test_step: Evaluates a batch, and returns the same or None; None if there is no evaluation.
      model: The model.
      optimizer: The optimizer, or a dict of optimizers by name.
      metrics: The metrics that train_step updates.
      val_metrics: The metrics that test_step updates.
    """

    train_step: Callable[..., Any]
    test_step: Callable[..., Any] | None
    model: Any
    optimizer: Any
    metrics: Sequence[Any] = ()
    val_metrics: Sequence[Any] = ()
    _losses: dict[str, bool] = field(default_factory=dict)  # whether a step returns one, by the name of the step

    @property
    def evaluation_names(self) -> list[str]:
        """The names of the results of an evaluation; known after `trace`."""
        loss = ["loss"] if self._losses.get("test_step") else []
        return [*loss, *(one.name for one in self.val_metrics)]

    def trace(self, train_spec: Any, val_spec: Any = None) -> None:
        """Traces the functions once, so that model, optimizer and metrics create their variables; runs nothing.

        Runs eagerly.

        Warns of a metric that a function updates and that is not listed.

        Args:
          train_spec: The spec of a training batch.
          val_spec: The spec of a validation batch; None if there is no validation data.

        Raises:
          UsageError: when a function does not accept a batch, or returns something else than a loss.
        """
        graph = traced(lambda batch: self.logs("train_step", batch) and None, train_spec).graph
        _warn_of_metrics("metrics", self.metrics, self.train_step, graph)
        if val_spec is None:
            return
        assert self.test_step is not None
        graph = traced(lambda batch: self.logs("test_step", batch) and None, val_spec).graph
        _warn_of_metrics("val_metrics", self.val_metrics, self.test_step, graph)
        if not self.evaluation_names:
            raise UsageError(
                "test_step returns no loss and there are no val_metrics, so an evaluation has no result; return the "
                "loss from test_step, or give val_metrics=[...], the metrics that test_step updates"
            )

    @tf.autograph.experimental.do_not_convert
    def logs(self, name: str, batch: Any) -> dict[str, Any]:
        """Runs train_step or test_step on a batch and returns its results by name, in graph; "loss" is a float scalar.

        Raises:
          UsageError: when train_step returns no loss.
        """
        step = getattr(self, name)
        returned = converted(step)(*_arguments(name, step, batch))
        if isinstance(returned, Sequence):
            returned = returned[0] if returned else None
            if returned is None or tf.convert_to_tensor(returned).shape.rank != 0:
                raise UsageError(f'{name} returned a tuple that does not begin with the loss; return {{"loss": loss}}')
        by_name = returned if isinstance(returned, Mapping) else {"loss": returned}
        logs = {str(key): value for key, value in by_name.items() if value is not None}
        self._losses[name] = "loss" in logs
        if "loss" in logs:
            logs["loss"] = tf.reduce_mean(tf.convert_to_tensor(logs["loss"]))
        elif name == "train_step":
            raise UsageError('train_step returned no loss; add `return loss`, or return a dict with "loss"')
        return logs


def _warn_of_metrics(argument: str, listed: Sequence[Any], step: Callable[..., Any], graph: Any) -> None:
    """Warns when the graph of a step updates a metric that is not in the argument for its metrics."""
    updated = {id(variable) for variable in graph.variables}
    for metric in used_metrics(step):
        variables = {id(one if isinstance(one, tf.Variable) else one.value) for one in metric.variables}
        if variables & updated and not any(metric is one for one in listed):
            _LOG.warning(
                "%s updates the metric %r, which is not in %s; it is not reported, and nothing resets it: add it there",
                *(_name(step), metric.name, argument),
            )


def _name(step: Callable[..., Any]) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def _arguments(name: str, step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """Returns the arguments with which a loop by hand calls a function: the parts of a tuple, or the batch itself.

    Raises:
      UsageError: when the function accepts neither.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    signature = inspect.signature(step)
    for arguments in (parts, (batch,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise UsageError(
        f"{name}{signature} cannot be called with a batch, which has {len(parts)} parts; give it one parameter for "
        "each part, or one for the whole batch"
    )

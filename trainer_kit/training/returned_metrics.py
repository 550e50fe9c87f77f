"""ReturnedMetrics: the metric objects that a step returns in addition to its loss."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError

_LOG = logging.getLogger(__name__)


class ReturnedMetrics(dict[str, Any]):
    """Metrics of either Keras by the name under which a step returns them. The step updates them by itself.

    They are known only when a step is traced, and the loop resets its metrics before its first step. So these metrics
    are reset from Python, after the results of a loop have been read. They belong to the task or the model, and their
    variables are in a checkpoint like any other state of the training step.

    Args:
      taken: The names that are reported already, such as those of metrics: a step's value of such a name is left out.
    """

    def __init__(self, taken: Collection[str]) -> None:
        super().__init__()
        self._taken, self._warned = frozenset(taken), set[str]()

    @property
    def variables(self) -> list[Any]:
        """The variables of the metrics."""
        return [variable for metric in self.values() for variable in metric.variables]

    @tf.autograph.experimental.do_not_convert
    def noted(self, task: Any, logs: Mapping[Any, Any], model: Any = None) -> dict[Any, Any]:
        """Adds the metrics of one step, and returns what else it returned; runs in graph, on a replica.

        Warns of a scalar that has the name of a metric in an attribute of the task, or of a metric of the model that
        the step uses: it may be the metric's result.

        Args:
          task: The task of the step.
          logs: What the step returned.
          model: The model of the step.

        Raises:
          UsageError: when a step returns another metric of the same name than before.
        """
        for name, metric in logs.items():
            if _is_metric(metric) and str(name) not in self._taken and self.setdefault(str(name), metric) is not metric:
                raise UsageError(
                    f"a step returned a new metric object named {str(name)!r}; create it once, in the task's __init__ "
                    "or in build_model, and return the same object in each step"
                )
        others = {name: value for name, value in logs.items() if not _is_metric(value)}
        metrics = [*_metrics_of(task), *_used_metrics_of(model)]
        self._warn_of_results({metric.name for metric in metrics} & others.keys())
        return others

    def reset(self) -> None:
        """Resets the metrics; runs eagerly, on the host."""
        for metric in self.values():
            metric.reset_state()

    def _warn_of_results(self, names: Collection[str]) -> None:
        for name in sorted({*names} - self._taken - self._warned):
            self._warned.add(name)
            _LOG.warning(
                "the step returns the scalar %r, and the task or the model holds a metric of this name; the mean of "
                "the scalar is reported, and nothing resets the metric: return the metric to report its result%s",
                *(name, " under another name than the loss" if name == "loss" else ""),
            )


def _metrics_of(task: Any) -> Iterator[Any]:
    """Yields the metrics in the attributes of a task, and in lists there."""
    for value in vars(task).values():
        yield from filter(_is_metric, value if isinstance(value, (list, tuple)) else [value])


def _used_metrics_of(model: Any) -> Iterator[Any]:
    """Yields the metrics of a model that the graph of a step reads or writes; none in eager mode."""
    used = {id(tensor) for tensor, _ in getattr(tf.compat.v1.get_default_graph(), "captures", ())}
    for metric in getattr(model, "metrics", None) or ():
        plain = [one if isinstance(one, tf.Variable) else one.value for one in metric.variables]
        if any(id(variable.handle) in used for variable in plain):
            yield metric


def _is_metric(value: Any) -> bool:
    return hasattr(value, "update_state") and hasattr(value, "result")

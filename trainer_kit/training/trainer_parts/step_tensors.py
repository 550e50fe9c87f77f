"""StepTensors: the tensors that are asked for by name of a training or evaluation step, for metrics and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.training.configured_metrics import tensor_metrics
from trainer_kit.training.metrics import MetricSet, to_numpy
from trainer_kit.training.named_tensors import LayerOutputs, collecting, unknown_tensor

_KEY = "trainer_kit/tensors"  # of the results of a loop


def check_evaluation_tensors(trainer: Any) -> None:
    """Traces the evaluation step if tensors of it are asked for by name, so that a miss ends a run before it trains.

    Runs eagerly, on the host.

    Args:
      trainer: The trainer; one that does not evaluate, or has evaluations of its own, is not checked.

    Raises:
      UsageError: when the step exposes no tensor of such a name.
    """
    is_asked = trainer.eval_tensors is not None and trainer.eval_tensors.is_asked
    if not (is_asked and trainer.evaluates and trainer.config.trainer.eval_tf_function):
        return
    for one in trainer.validation:
        iterator = trainer.turn_to(one.name).feed.iterator(fresh=False)
        tf.function(trainer.eval_step, autograph=False).get_concrete_function(iterator)


class StepTensors:
    """Keeps the values of tensors that the last step of a loop exposes, and updates metrics with tensors.

    Created in the scope of the strategy. It has the methods of a part of a MetricSet. Without a name that is asked for
    it has no variables, no results, and adds no operation to a step.

    Args:
      what: "training" or "evaluation", for messages.
      config: The experiment's config, whose `trainer.metrics` may name tensors.
      metrics: The set of the metrics of these steps, which takes this as a part.

    Attributes:
      values: The values of the last loop, as NumPy arrays by name; of several validation sets, by set and name.

    Raises:
      UsageError: when `trainer.metrics` names a tensor and the trainer has no MetricSet, or two of its metrics have
        the same name.
    """

    def __init__(self, what: str, config: Any, metrics: Any) -> None:
        self._what, self._set, self._strategy = what, metrics, tf.distribute.get_strategy()
        # A program of XLA cannot change the shape of a variable.
        self._fused = what == "training" and getattr(config.trainer, "fuse_steps", 1) > 1
        self._asked: dict[str, str] = {}  # by name: who asks for the value
        self._metrics = tensor_metrics(config)
        self._variables: dict[str, tf.Variable] = {}
        self._ranks: dict[str, int | None] = {}
        self._dtypes: dict[str, tf.DType] = {}
        self._layers: tuple[Any, LayerOutputs] | None = None
        self._is_traced = False
        self.values: dict[str, Any] = {}
        if isinstance(metrics, MetricSet):
            metrics.add_part(self)
        for metric, name, where in self._metrics:
            self._check_part(name, where)
            if self.names[metric.name] != where:
                raise UsageError(f"{where}: another metric is called {metric.name!r} too; give each args.name its own")

    def ask(self, name: str, where: str) -> None:
        """Asks for the value of a tensor in the last step of each loop; called before the step is traced.

        Args:
          name: The name that a step or a model exposes, or the name of a layer.
          where: Who asks, for messages, such as "trainer.summaries".

        Raises:
          UsageError: when the step is traced already, or the trainer cannot hand out tensors.
        """
        if name in self._asked:
            return
        self._check_part(name, where)
        if self._is_traced:
            raise UsageError(f"{where}: the tensor {name!r} is asked for after the first {self._what} step; ask before")
        if isinstance(self._strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise UsageError(f"{where}: asynchronous training has no last step; feed the tensor to a metric instead")
        self._asked[name] = where

    # ---- as a part of a MetricSet

    @property
    def names(self) -> dict[str, str]:
        """The names of the metrics, each with the field of the config that asks for it."""
        return {metric.name: where for metric, _, where in self._metrics}

    @property
    def variables(self) -> list[Any]:
        """The variables of the metrics."""
        return [variable for metric, _, _ in self._metrics for variable in metric.variables]

    def reset(self) -> None:
        """Resets the metrics; runs eagerly or in graph, in cross-replica context."""
        for metric, _, _ in self._metrics:
            metric.reset_state()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns the results of the metrics, and an entry that `read` takes; called in cross-replica context."""
        found: dict[str, Any] = {metric.name: metric.result() for metric, _, _ in self._metrics}
        return {**found, _KEY: self._values()} if self._variables else found

    # ---- of a loop

    @property
    def value_variables(self) -> list[tf.Variable]:
        """The variables that hold the values, which no checkpoint needs."""
        return list(self._variables.values())

    def read(self, results: dict[str, Any], validation_set: str = "") -> None:
        """Takes the values out of the results of a loop, NumPy values; runs eagerly, on the host.

        Args:
          results: The results, which lose the entry of `results`.
          validation_set: The name of the evaluated set, if there are several.

        Raises:
          UsageError: when a subclass of the trainer has a step of its own, which collects no tensors.
        """
        found: Mapping[str, Any] = results.pop(_KEY, None) or to_numpy(self._values())  # of a set with own metrics
        for name, where in self._asked.items():
            if name not in found and self._set.loss.reported:
                raise UsageError(
                    f"{where}: the tensor {name!r} has no value, because the trainer's {self._what} step is its own; "
                    "call the method of the superclass there"
                )
        if validation_set:
            self.values[validation_set] = dict(found)
        else:
            self.values = dict(found)

    @tf.autograph.experimental.do_not_convert
    def collected(self, step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Returns a step that returns its logs and the tensors that are asked for, by name, for `kept`.

        If none is asked for, that is the given step.

        Args:
          step: A function that runs a step on a replica.
          model: The model of the step, whose layers are known by name.
        """
        self._is_traced = True
        wanted = self._wanted
        if not wanted:
            return step
        if self._layers is None or self._layers[0] is not model:
            self._layers = model, LayerOutputs(model)
        layers = self._layers[1]

        def collected_step(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, tf.Tensor]]:
            with collecting(wanted, layers) as found:
                logs = step(*args, **kwargs)
            for name, where in wanted.items():
                if name not in found.tensors:
                    known = {*found.known, *layers.names}
                    raise unknown_tensor(name, known, f"{where}: the {self._what} step", self._advice)
            return logs, found.tensors

        return collected_step

    @tf.autograph.experimental.do_not_convert
    def kept(self, outcome: Any) -> Any:
        """Updates the metrics, stores the values, and returns the logs of a collected step.

        Runs in graph, on a replica.
        """
        if not self._wanted:
            return outcome
        logs, tensors = outcome
        for metric, name, _ in self._metrics:
            metric.update_state(tensors[name])
        if self._asked:
            values = {name: tensors[name] for name in self._asked}
            tf.distribute.get_replica_context().merge_call(self._store, args=(values,))
        return logs

    @property
    def is_asked(self) -> bool:
        """Whether any tensor is asked for."""
        return bool(self._wanted)

    @property
    def _advice(self) -> str:
        if self._what == "training":
            return ""
        return "; a tensor of train_step has to be exposed in validation_step, too, for evaluations to have it"

    @property
    def _wanted(self) -> dict[str, str]:
        """The names that are asked for, each with who asks."""
        return {**{name: where for _, name, where in self._metrics}, **self._asked}

    @tf.autograph.experimental.do_not_convert
    def _store(self, strategy: tf.distribute.Strategy, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            local = strategy.experimental_local_results
            parts = local(value)
            for variable, part in zip(local(self._variable(name, parts[0])), parts, strict=True):
                variable.assign(tf.cast(part, variable.dtype))

    def _variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """Returns the variable that holds a value for each replica; it is created when the step is traced."""
        self._ranks[name], self._dtypes[name] = value.shape.rank, value.dtype
        known = self._variables.get(name)
        shape = value.shape if self._fused else tf.TensorShape(None)
        if self._fused and not shape.is_fully_defined():
            raise UsageError(
                f"{self._asked[name]}: the tensor {name!r} has the shape {shape}, and fused steps need a shape that is "
                "known before they run; batch with drop_remainder=True, or set trainer.fuse_steps=1"
            )
        # TensorFlow keeps int32 variables on the CPU, where a compiled program on a GPU cannot reach them.
        dtype = tf.int64 if self._fused and value.dtype == tf.int32 else value.dtype
        if known is not None and known.dtype == dtype and known.shape.is_compatible_with(shape):
            return known
        with tf.init_scope(), self._strategy.scope():
            self._variables[name] = tf.Variable(
                tf.zeros(shape if self._fused else [], dtype),
                trainable=False,
                shape=shape,
                name="exposed",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self._variables[name]

    def _values(self) -> dict[str, tf.Tensor]:
        return {name: self._joined(name) for name in self._variables}

    def _joined(self, name: str) -> tf.Tensor:
        """Returns the value over the replicas of this worker: scalars are averaged, others concatenated."""
        variable = self._variables[name]
        local = self._strategy.experimental_local_results(variable)
        parts = [tf.cast(part.read_value(), self._dtypes[name]) for part in local]
        if self._ranks[name] != 0:
            return tf.concat(parts, 0) if len(parts) > 1 else parts[0]
        scalars = [tf.reshape(part, []) for part in parts]
        if len(scalars) == 1:
            return scalars[0]
        return tf.reduce_mean(tf.stack([s if s.dtype.is_floating else tf.cast(s, tf.float32) for s in scalars]))

    def _check_part(self, name: str, where: str) -> None:
        if not isinstance(self._set, MetricSet):
            raise UsageError(f"{where}: several tasks that are trained together expose no tensor {name!r}; remove it")

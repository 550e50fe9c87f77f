"""Input sources: how dataflows, tensors and tf.data reach the towers.

A dataflow is read on the host, pass by pass, and its datapoints are fed to placeholders. One whose
name has a queue reads ahead in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.callbacks.base import Callback, CallbackFactory
from trainer_kit.compat.tensorpack.dataflow import BatchData, DataFlow
from trainer_kit.compat.tensorpack.input_source.dataflow_reader import DataflowReader
from trainer_kit.compat.tensorpack.input_source.input_source_base import (
    InputSource,
    ProxyInputSource,
    build_or_reuse_placeholder,
)
from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.program_graph import current_program_graph

__all__ = [
    *("PlaceholderInput", "FeedInput", "FeedfreeInput", "QueueInput", "BatchQueueInput"),
    *("DummyConstantInput", "TensorInput", "ZMQInput", "TFDatasetInput", "StagingInput"),
]

_v1: Any = tf.compat.v1


class PlaceholderInput(InputSource):
    """Placeholders, which the caller feeds."""

    def _setup(self, inputs: Sequence[tf.TensorSpec]) -> None:
        self._placeholders = [build_or_reuse_placeholder(spec) for spec in inputs]

    def _get_input_tensors(self) -> list[tf.Tensor]:
        return self._placeholders


class TowerFeed:
    """Feeds the placeholders of one tower with datapoints.

    Args:
      placeholders: The placeholders.
      reader: The reader of the datapoints, which towers share.
    """

    def __init__(self, placeholders: Sequence[tf.Tensor], reader: DataflowReader) -> None:
        self.placeholders = placeholders
        self.name = placeholders[0].op.name
        self._reader = reader

    def next_values(self) -> list[Any]:
        """Returns the components of the next datapoint."""
        return self._reader.next_components([tensor.op.name for tensor in self.placeholders])

    def state(self) -> Any:
        """Returns the place of the reader."""
        return self._reader.state()

    def restore(self, state: Any) -> None:
        """Continues at a place."""
        self._reader.restore(state)


class _DataflowInput(InputSource):
    """An input that reads a dataflow.

    Args:
      ds: The dataflow.
      infinite: Whether another pass follows the last one.
    """

    is_queue = False

    def __init__(self, ds: DataFlow, infinite: bool = True) -> None:
        if not isinstance(ds, DataFlow):
            raise ProgramError(
                f"{type(self).__name__} takes a DataFlow, not {ds!r:.60}; give a DataFlow, or its"
                " data as DataFromList(list)"
            )
        self.ds = ds
        self._reader = DataflowReader(ds, is_infinite=infinite, reads_ahead=self.is_queue)

    def _size(self) -> int:
        return len(self.ds)

    def _setup(self, inputs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(inputs)
        self._placeholders: list[tf.Tensor] | None = None

    def _get_input_tensors(self) -> list[tf.Tensor]:
        if self._placeholders is not None and not self.is_queue:
            return self._placeholders

        feeders = current_program_graph().feeders
        placeholders: list[tf.Tensor] = []
        if not self.is_queue:
            placeholders = [build_or_reuse_placeholder(spec) for spec in self._specs]
        # Two inputs of a program may not feed one placeholder.
        fed_ids = {id(tensor) for feeder in feeders for tensor in feeder.placeholders}
        if self.is_queue or fed_ids.intersection(map(id, placeholders)):
            with _v1.name_scope(None), _v1.name_scope(type(self).__name__):
                placeholders = [
                    _v1.placeholder(spec.dtype, spec.shape, spec.name) for spec in self._specs
                ]

        self._placeholders = placeholders
        feeders.append(TowerFeed(placeholders, self._reader))
        return placeholders

    def _reset_state(self) -> None:
        self._reader.restart()

    def _get_callbacks(self) -> list[Callback]:
        return [CallbackFactory(setup_graph=lambda _: self._reader.reset_dataflow())]


class FeedInput(_DataflowInput):
    """Feeds the datapoints of a dataflow. All towers get the same one. See Tensorpack."""


class FeedfreeInput(InputSource):
    """The base of inputs that give each tower its own datapoint."""


class QueueInput(_DataflowInput, FeedfreeInput):
    """Reads a dataflow ahead in a thread. Each tower gets its own datapoint.

    Args:
      ds: The dataflow.
      queue: Not used: the engine has its own queue.
      infinite: Whether another pass follows the last one.
    """

    is_queue = True

    def __init__(self, ds: DataFlow, queue: Any = None, infinite: bool = True) -> None:
        super().__init__(ds, infinite)

    def _get_callbacks(self) -> list[Callback]:
        return [*super()._get_callbacks(), QueueSize(type(self).__name__, self._reader)]


class QueueSize(Callback):
    """Reports how many datapoints lie ready, as a moving average over steps.

    Args:
      name: The name of the input.
      reader: The reader of its datapoints.
    """

    def __init__(self, name: str, reader: DataflowReader) -> None:
        self._name = name
        self._reader = reader
        self._average = 0.0

    def _after_run(self, context: Any, values: Any) -> None:
        self._average = (self._average + self._reader.ready_count) / 2

    def _trigger_epoch(self) -> None:
        self.trainer.monitors.put_scalar(f"{self._name}/queue_size", self._average)


class BatchQueueInput(QueueInput):
    """A QueueInput that puts datapoints into batches. See Tensorpack."""

    def __init__(self, ds: DataFlow, batch_size: int, queue: Any = None) -> None:
        super().__init__(BatchData(ds, batch_size))


class ZMQInput(FeedfreeInput):
    """Datapoints from another process, which the engine cannot resume."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        message = (
            "ZMQInput receives datapoints whose place no checkpoint knows; use QueueInput, with"
            " RemoteDataZMQ as its dataflow"
        )
        raise ProgramError(message)

    def _get_input_tensors(self) -> list[tf.Tensor]:
        return []


class TensorInput(FeedfreeInput):
    """Tensors that a function of the program returns.

    Args:
      get_tensor_fn: Returns the tensors. Called once for each tower, in graph.
      size: The number of steps in an epoch.
    """

    def __init__(
        self, get_tensor_fn: Callable[[], Sequence[tf.Tensor]], size: int | None = None
    ) -> None:
        self.get_tensor_fn = get_tensor_fn
        self._fixed_size = size

    def _size(self) -> int:
        if self._fixed_size is None:
            raise NotImplementedError("this TensorInput was created without a size")
        return self._fixed_size

    def _setup(self, inputs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(inputs)

    def _get_input_tensors(self) -> list[tf.Tensor]:
        with self.cached_name_scope():
            tensors = list(self.get_tensor_fn())
        if len(tensors) != len(self._specs):
            raise ProgramError(
                f"{type(self).__name__} returned {len(tensors)} tensors, and the model has"
                f" {len(self._specs)} inputs; return one for each"
            )
        return tensors


class DummyConstantInput(TensorInput):
    """Constant inputs, to measure a model without its data.

    Args:
      shapes: The shapes of the inputs.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        self._shapes = shapes
        super().__init__(self._build_tensors)

    def _build_tensors(self) -> list[tf.Tensor]:
        tensors = []
        for spec, shape in zip(self._specs, self._shapes, strict=True):
            initializer = _v1.zeros_initializer()
            name = f"dummy_{spec.name}"
            variable = _v1.get_variable(
                name, shape, spec.dtype, initializer=initializer, trainable=False
            )
            tensors.append(variable)
        return tensors


class TFDatasetInput(FeedfreeInput):
    """A tf.data.Dataset, or a dataflow. It is read once, so one for training has to repeat.

    Args:
      dataset: The dataset of batches, or a dataflow.
    """

    def __init__(self, dataset: tf.data.Dataset | DataFlow) -> None:
        self._dataset = dataset

    def _setup(self, inputs: Sequence[tf.TensorSpec]) -> None:
        dataset = self._dataset
        if not isinstance(dataset, DataFlow):
            dataset = DatasetFlow(dataset)
        self._queue = QueueInput(dataset, infinite=False)
        self._queue.setup(inputs)

    def _get_input_tensors(self) -> list[tf.Tensor]:
        return self._queue.get_input_tensors()

    def _get_callbacks(self) -> list[Any]:
        return self._queue._get_callbacks()

    def _reset_state(self) -> None:
        self._queue.reset_state()

    def _size(self) -> int:
        dataset = self._dataset
        if isinstance(dataset, DataFlow):
            return len(dataset)
        raise NotImplementedError("the size of a tf.data.Dataset is not known")

    @staticmethod
    def dataflow_to_dataset(df: DataFlow, types: Sequence[tf.DType]) -> tf.data.Dataset:
        """Returns a dataset of the datapoints of a dataflow. See Tensorpack."""
        df.reset_state()
        return tf.data.Dataset.from_generator(lambda: map(tuple, df), output_types=tuple(types))


class DatasetFlow(DataFlow):
    """The elements of a tf.data.Dataset, which a program may have built in its graph.

    Args:
      dataset: The dataset.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._program = current_program_graph()

    def __iter__(self) -> Any:
        variant = tf.data.experimental.to_variant(self._dataset)
        with tf.init_scope():
            dataset = self._dataset
            if not hasattr(variant, "numpy"):
                self._program.initialize_variables()
                function = self._program.prune([], [variant])
                value = function(tf.constant(0))[0]
                dataset = tf.data.experimental.from_variant(value, self._dataset.element_spec)
        iterator = iter(dataset)
        for element in iterator:
            yield [part.numpy() for part in tf.nest.flatten(element)]


class StagingInput(ProxyInputSource, FeedfreeInput):
    """Another input, unchanged: TensorFlow 2 stages its inputs itself. See Tensorpack."""

    def __init__(self, input: InputSource, nr_stage: int = 1, device: Any = None) -> None:
        super().__init__(input)

"""TensorFlow 1 for programs: `from trainer_kit.compat.tensorpack import tfv1 as tf`.

The names are those of tf.compat.v1. Sessions and graphs are those of the door, `layers` and
`nn.rnn_cell` are back, and `contrib` has what still exists. A function that is taken from here puts
the thread in graph mode.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import tensorflow as tf

# tf.keras is Keras 3, whose initializers draw from Python's generator, and TensorFlow refuses
# tf.compat.v1.layers with Keras 3. tf_keras has kept both as TensorFlow 1 had them.
from tf_keras.api._v1 import keras  # noqa: F401
from tf_keras.api._v1.keras.__internal__.legacy import layers as layers
from tf_keras.api._v1.keras.__internal__.legacy import rnn_cell

from trainer_kit.compat.tensorpack.checkpoint_reader import CheckpointReader
from trainer_kit.compat.tensorpack.input_producers import (
    REFUSED_NAMES,
    REFUSED_TRAIN_NAMES,
    RangeInputProducer,
    refuse_queues,
)
from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.program_graph import (
    ProgramGraph,
    enter_default_graph,
    leave_default_graph,
)
from trainer_kit.compat.tensorpack.session import Session

# Its summaries would need a writer of TensorFlow 2. The monitors of a program write them.
warnings.filterwarnings(
    "ignore", message="Cannot activate TF2 compatibility support for TF1 summary ops"
)

# Classes whose objects belong to the default graph. Others, such as TensorSpec, need no graph.
_GRAPH_CLASSES = (
    *("variable_scope", "name_scope", "Saver", "ExponentialMovingAverage"),
    *("Dataset", "TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset"),
)

_MISSING_CONTRIB = {
    "slim": "write the model with tf.layers or tensorpack.models",
    "keras": "use tf_keras, or a Keras 3 model with trainer_kit.compat.keras.fit",
}


def _take_name(module: Any, name: str) -> Any:
    """Returns an attribute of a module. One that builds a graph puts the thread in graph mode."""
    if module is tf.compat.v1.train and name in REFUSED_TRAIN_NAMES:
        refuse_queues("tf.train", name)
    if name in ("MonitoredSession", "MonitoredTrainingSession"):
        raise ProgramError(
            f"tf.train.{name} is not supported: a trainer runs its hooks; register them as"
            " HookToCallback(hook)"
        )
    if module is tf.compat.v1 and name in REFUSED_NAMES:
        refuse_queues("tf", name)
    value = getattr(module, name)
    if isinstance(value, types.FunctionType) or name in _GRAPH_CLASSES:
        enter_default_graph()
    return value


class ModuleView(types.ModuleType):
    """A module with some names replaced.

    Args:
      name: The name of the view.
      module: The module. None: only the replaced names exist.
      **replaced: The replaced names and the names that the module lacks.
    """

    def __init__(self, name: str, module: Any = None, **replaced: Any) -> None:
        super().__init__(name)
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return _take_name(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self.__dict__})


class _Contrib(ModuleView):
    """What still exists of tf.contrib."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__.replace('tfv1', 'tf')}.{name}"
        advice = _MISSING_CONTRIB.get(name, "use the function of tf that replaces it")
        message = f"{path} does not exist in TensorFlow 2; {advice}"
        raise ProgramError(message)


def Graph() -> tf.Graph:
    """Returns a new graph of a program."""
    return ProgramGraph().graph


def reset_default_graph() -> None:
    """Begins a new default graph."""
    leave_default_graph()
    enter_default_graph()


def disable_eager_execution() -> None:
    """Does nothing: a program is in graph mode."""


class _VariableType(type):
    """Has `isinstance(x, tf.Variable)` hold for all variables, as in TensorFlow 1."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, tf.Variable)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        enter_default_graph()
        return tf.compat.v1.Variable(*arguments, **options)


class Variable(metaclass=_VariableType):
    """Creates a variable of the graph. See tf.compat.v1.Variable."""


def _build_contrib() -> _Contrib:
    initializer = tf.compat.v1.variance_scaling_initializer

    def variance_scaling_initializer(
        factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: int | None = None
    ) -> Any:
        distribution = "uniform" if uniform else "truncated_normal"
        return initializer(factor, mode.lower(), distribution, seed)

    layers = _Contrib(
        "tfv1.contrib.layers",
        variance_scaling_initializer=variance_scaling_initializer,
        xavier_initializer=tf.compat.v1.glorot_uniform_initializer,
        l1_regularizer=lambda scale: tf.keras.regularizers.L1(scale),
        l2_regularizer=lambda scale: tf.keras.regularizers.L2(scale / 2),
    )
    rnn_names = {}
    for name in dir(nn.rnn_cell):
        if not name.startswith("_"):
            rnn_names[name] = getattr(nn.rnn_cell, name)

    def build_lstm_block_cell(num_units: int, forget_bias: float = 1.0, **options: Any) -> Any:
        # The fused kernel computed the same, with the same variables.
        name = options.pop("name", "lstm_cell")
        return nn.rnn_cell.BasicLSTMCell(num_units, forget_bias, name=name, **options)

    rnn_names["LSTMBlockCell"] = build_lstm_block_cell
    rnn = _Contrib("tfv1.contrib.rnn", static_rnn=tf.compat.v1.nn.static_rnn, **rnn_names)
    return _Contrib("tfv1.contrib", layers=layers, rnn=rnn)


# The names that differ from those of tf.compat.v1. keras, layers and Session differ too.
InteractiveSession = Session
data = ModuleView("tfv1.data", tf.compat.v1.data)
initializers = ModuleView("tfv1.initializers", tf.compat.v1.initializers)
losses = ModuleView("tfv1.losses", tf.compat.v1.losses)
nn = ModuleView("tfv1.nn", tf.compat.v1.nn, rnn_cell=rnn_cell)
summary = ModuleView("tfv1.summary", tf.compat.v1.summary)
train = ModuleView(
    "tfv1.train",
    tf.compat.v1.train,
    range_input_producer=RangeInputProducer,
    NewCheckpointReader=CheckpointReader,
    load_checkpoint=CheckpointReader,
)
contrib = _build_contrib()


def __getattr__(name: str) -> Any:
    return _take_name(tf.compat.v1, name)


def __dir__() -> list[str]:
    return sorted({*dir(tf.compat.v1), *globals()})

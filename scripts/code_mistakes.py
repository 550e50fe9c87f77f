"""Mistakes in a user's code, and what a command prints for each.

scripts/mistakes.py runs them with its own list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_HEAD = """
import keras
import numpy as np
import tensorflow as tf

import trainer_kit as tk


class Widen(keras.layers.Layer):
    def call(self, x):
        return tf.concat([x, tf.zeros([3, 8])], axis=1)


@tk.configclass
class MineConfig(tk.TaskConfig):
    pass


@tk.register_task(MineConfig)
class MineTask(tk.Task):
"""
_METHODS = {
    "build_model": """
    def build_model(self):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
""",
    "build_inputs": """
    def build_inputs(self, params, input_context=None):
        dataset = tf.data.Dataset.from_tensor_slices(points())
        return dataset.batch(20, drop_remainder=True).repeat(10)
""",
    "build_losses": """
    def build_losses(self, labels, model_outputs, aux_losses=None):
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, model_outputs, from_logits=True
        )
        return tf.reduce_mean(losses)
""",
    "build_metrics": """
    def build_metrics(self, training=True):
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]
""",
}
_TAIL = """

def points():
    points = np.random.default_rng(1).normal(size=(200, 8)).astype("float32")
    return points, (np.abs(points.sum(1)) % 3).astype("int32")


@tk.register_experiment("mine")
def mine():
    data = {name: {"global_batch_size": 20, "is_training": name == "train_data"} for name in SETS}
    adam = {"optimizer": {"type": "adam"}, "learning_rate": {"type": "constant"}}
    trainer = {
        "train_steps": 4,
        "steps_per_loop": 2,
        "validation_interval": 4,
        "summary_interval": 2,
        "optimizer_config": adam,
    }
    return tk.ExperimentConfig(task=MineConfig()).replace(task=data, trainer=trainer)


SETS = ("train_data", "validation_data")
"""


@dataclass(frozen=True)
class CodeMistake:
    """A mistake in a user's module.

    Attributes:
      name: What is wrong.
      expected: Texts that the output has; `{line: TEXT}` stands for the place of the line with
        TEXT, as "FILE:NUMBER".
      methods: The source of each method of the task that is wrong or added, by its name.
      code: The exit code.
      overrides: Config values, as --params_override takes them.
      head, tail: The source of the module before and after the methods.
    """

    name: str
    expected: tuple[str, ...]
    methods: dict[str, str] = field(default_factory=dict)
    code: int = 1
    overrides: str = ""
    head: str = _HEAD
    tail: str = _TAIL

    def format_module(self) -> str:
        """Returns the source of the module."""
        return "".join([self.head, *{**_METHODS, **self.methods}.values(), self.tail])


_LOSSES = """
    def build_losses(self, labels, model_outputs, aux_losses=None):
        {}
"""
_INPUTS = """
    def build_inputs(self, params, input_context=None):
        {}
"""
_MODEL = """
    def build_model(self):
        return {}
"""
_STEP = """
    def train_step(self, inputs, model, optimizer, metrics=None):
        features, labels = inputs
        with tf.GradientTape() as tape:
            outputs = model(features, training=True)
            loss = {}
        gradients = tape.gradient(loss, model.trainable_variables)
        tk.apply_gradients(optimizer, zip(gradients, model.trainable_variables))
        {}
"""
_DIFFERENCE = "return tf.reduce_mean(tf.square(tf.cast(labels, tf.float32) - model_outputs))"
_SHAPES = (
    "labels is int32 [20], model_outputs is float32 [20, 3]",
    "the model gives float32 [20, 3]",
)
_BATCH = "a batch of task.train_data is (float32 [20, 8], int32 [20])"
_LOADED = """        def load(index):
            raise OSError("image 7 is cut")
        def parse(point, label):
            return tf.ensure_shape(tf.numpy_function(load, [label], tf.float32), [8]), label
        return tf.data.Dataset.from_tensor_slices(points()).map(parse).batch(20)"""
_CALLBACK = """
class WithCallback(tk.Trainer):
    def build_train_actions(self, params, model_dir, manager):
        return [keras.callbacks.EarlyStopping()]


@tk.register_task(MineConfig, trainer=WithCallback)"""
_EAGER = "runtime.run_eagerly=true"
_TWO = "runtime.virtual_cpus=2,runtime.distribution_strategy=mirrored"

CODE_MISTAKES = [
    CodeMistake(
        "labels that do not fit",
        ("{line:_mean(tf.square(}, in build_losses", *_SHAPES, _BATCH),
        {"build_losses": _LOSSES.format(_DIFFERENCE)},
    ),
    CodeMistake(
        "labels that do not fit, run eagerly",
        ("{line:_mean(tf.square(}, in build_losses", *_SHAPES, _BATCH),
        {"build_losses": _LOSSES.format(_DIFFERENCE)},
        overrides=_EAGER,
    ),
    CodeMistake(
        "labels that do not fit, on two replicas",
        ("{line:_mean(tf.square(}, in build_losses", *_SHAPES, _BATCH),
        {"build_losses": _LOSSES.format(_DIFFERENCE)},
        overrides=_TWO,
    ),
    CodeMistake(
        "no labels",
        (
            "{line:losses = keras}, in build_losses",
            "float32 [None, 8]\n",
            "is not a pair (features, labels)",
        ),
        {
            "build_inputs": _INPUTS.format(
                "return tf.data.Dataset.from_tensor_slices(points()[0]).batch(20)"
            )
        },
    ),
    CodeMistake(
        "label out of range",
        ("{line:losses = keras}, in build_losses", "label value of 2", "gives float32 [20, 1]"),
        {
            "build_model": _MODEL.format(
                "keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])"
            )
        },
    ),
    CodeMistake(
        "a dict of outputs",
        ("{line:losses = keras}, in build_losses", "model_outputs is {logits: float32 [20, 3]}"),
        {
            "build_model": _MODEL.format(
                "keras.Model(x := keras.Input((8,)), {'logits': keras.layers.Dense(3)(x)})"
            )
        },
    ),
    CodeMistake(
        "a layer that raises",
        ("{line:return tf.concat}, in call", "but are 20 and 3", "x is float32 [20, 8]"),
        {"build_model": _MODEL.format("keras.Sequential([Widen(), keras.layers.Dense(3)])")},
    ),
    CodeMistake(
        "a metric that does not fit",
        ("the metric iou (MeanIoU) got this batch", "called the code that failed"),
        {
            "build_metrics": """
    def build_metrics(self, training=True):
        return [keras.metrics.MeanIoU(num_classes=3, name="iou")]
"""
        },
    ),
    CodeMistake(
        "an unknown name in train_step",
        ("{line:self.build_losses(lables}, in train_step", "NameError: name 'lables'"),
        {
            "train_step": _STEP.format(
                "self.build_losses(lables, outputs)", "return {self.loss: loss}"
            )
        },
    ),
    CodeMistake(
        "a train_step that returns nothing",
        ("MineTask.train_step has to return a dict", "returned None"),
        {"train_step": _STEP.format("self.build_losses(labels, outputs)", "return None")},
    ),
    CodeMistake(
        "a train_step that returns a loss for each example",
        ("train_step has to return a scalar", "tf.reduce_mean"),
        {"train_step": _STEP.format("tf.reduce_sum(outputs, 1)", "return {self.loss: loss}")},
        2,
    ),
    CodeMistake(
        "parameters of other names",
        ("{line:def build_losses}: MineTask.build_losses(l, o)", "declare it as"),
        {"build_losses": "\n    def build_losses(self, l, o):\n        return tf.reduce_mean(o)\n"},
    ),
    CodeMistake(
        "an error in validation alone",
        ("{line:[7, -1]}, in validation_step", "task.validation_data is"),
        {
            "validation_step": """
    def validation_step(self, inputs, model, metrics=None):
        return {self.loss: tf.reduce_sum(tf.reshape(inputs[0], [7, -1]))}
"""
        },
    ),
    CodeMistake(
        "arrays for a dataset",
        ("MineTask.build_inputs returned a tuple; return a tf.data.Dataset or a Source",),
        {"build_inputs": _INPUTS.format("return points()")},
        2,
    ),
    CodeMistake(
        "names of metrics",
        ("build_metrics returned a list with 'accuracy', which is not a metric",),
        {
            "build_metrics": (
                "\n    def build_metrics(self, training=True):\n        return ['accuracy']\n"
            )
        },
        2,
    ),
    CodeMistake(
        "no call of super().__init__",
        ("MineTask.__init__ has to call super().__init__(params",),
        {
            "__init__": (
                "\n    def __init__(self, params, logging_dir=None):\n        self.width = 3\n"
            )
        },
        2,
    ),
    CodeMistake(
        "a learning rate that ends early",
        ("the learning rate is 0 after 2 steps, so the last 2 of 4",),
        {},
        0,
        overrides=(
            "trainer.optimizer_config.learning_rate={type: cosine, cosine:"
            " {initial_learning_rate: 0.1, decay_steps: 2}}"
        ),
    ),
    CodeMistake(
        "a Keras callback",
        ("build_train_actions: <", "EarlyStopping object", "a Keras callback is none"),
        {},
        2,
        head=_HEAD.replace("@tk.register_task(MineConfig)", _CALLBACK),
    ),
    CodeMistake(
        "batches of 0",
        ("{line:.batch(0)}, in build_inputs", "Batch size must be greater than zero"),
        {
            "build_inputs": _INPUTS.format(
                "return tf.data.Dataset.from_tensor_slices(points()).batch(0)"
            )
        },
    ),
    CodeMistake(
        "data that raise in Python",
        ("cannot be read: OSError: image 7 is cut", "{line:raise OSError}, in load"),
        {"build_inputs": _INPUTS.format(_LOADED.lstrip())},
        5,
    ),
    CodeMistake(
        "data that raise in TensorFlow",
        ("cannot be read: StringToNumber", "{line:tf.strings.to_number}, in <lambda>"),
        {
            "build_inputs": _INPUTS.format(
                "numbers = tf.data.Dataset.range(40)\n        return numbers.map("
                "lambda i: (tf.fill([8], tf.strings.to_number('x')), i)).batch(20)"
            )
        },
        5,
    ),
    CodeMistake(
        "a missing file below a dataset",
        ("the data cannot be read: nowhere; No such file or directory",),
        {
            "build_inputs": _INPUTS.format(
                "records = tf.data.TFRecordDataset('nowhere')\n        return records.map("
                "lambda r: (tf.zeros([8]), 1)).batch(20)"
            )
        },
        5,
    ),
    CodeMistake(
        "a missing file",
        ("task.train_data cannot be opened: FileNotFoundError", "{line:np.load}, in build_inputs"),
        {"build_inputs": _INPUTS.format("return np.load('nowhere.npy')")},
        5,
    ),
    CodeMistake(
        "an error in a factory",
        ("{line:1 / 0}, in mine", "ZeroDivisionError: division by zero"),
        tail=_TAIL.replace("    data =", "    number = 1 / 0\n    data ="),
    ),
    CodeMistake(
        "a model that ends the program",
        ("{line:raise SystemExit(0)}: this line ends the program (SystemExit(0))",),
        {"build_model": "\n    def build_model(self):\n        raise SystemExit(0)\n"},
    ),
    CodeMistake(
        "an error in a module",
        ("{line:{}['data']}, in MineTask", "KeyError: 'data'"),
        head=_HEAD + "    PATH = {}['data']\n",
    ),
]

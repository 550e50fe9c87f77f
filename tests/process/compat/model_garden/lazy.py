"""Experiments of a user of Model Garden: a model that is built by its first call, tasks with a bug,
small ResNets.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
import tf_keras
from official.core import base_task, exp_factory, task_factory
from official.core import config_definitions as cfg
from official.modeling import optimization
from official.vision.modeling.backbones import resnet

# ResNets that are made sooner than their smallest, of four blocks: the number of blocks is their
# model_id.
ONE_BLOCK = 1
TWO_BLOCKS = 2
resnet.RESNET_SPECS.update(
    {number: [("residual", 64, 1)] * number for number in (ONE_BLOCK, TWO_BLOCKS)}
)


@dataclasses.dataclass
class LazyConfig(cfg.TaskConfig):
    """Of LazyTask.

    Attributes:
      bug: where it has one: model, data, map or slices (of the data), or nowhere.
    """

    bug: str = ""
    train_data: cfg.DataConfig = dataclasses.field(default_factory=cfg.DataConfig)
    validation_data: cfg.DataConfig = dataclasses.field(default_factory=cfg.DataConfig)


@task_factory.register_task_cls(LazyConfig)
class LazyTask(base_task.Task):
    """Two numbers in, one out."""

    def build_model(self) -> Any:
        """Has no variables yet."""
        if self.task_config.bug == "model":
            raise ValueError("a bug of the user's")
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """The same example again and again."""
        if self.task_config.bug == "data":
            len(None)  # type: ignore[arg-type]
        if params.input_path:
            raise FileNotFoundError(2, "No such file or directory", params.input_path)
        if self.task_config.bug == "slices":
            return tf.data.Dataset.from_tensor_slices((tf.zeros([3, 2]), tf.zeros([4])))
        if self.task_config.bug == "map":
            return tf.data.Dataset.range(2).map(lambda number: misspelt(number))  # type: ignore[name-defined]  # noqa: F821
        example = tf.data.Dataset.from_tensors((tf.ones([2]), tf.ones([1])))
        return example.repeat().batch(params.global_batch_size or 2, drop_remainder=True)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """The mean of the squares."""
        return tf.reduce_mean(tf.square(labels - model_outputs))


@exp_factory.register_config_factory("tests_lazy")
def lazy() -> cfg.ExperimentConfig:
    """Trains by sgd."""
    options = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
    }
    trainer = cfg.TrainerConfig(
        optimizer_config=optimization.OptimizationConfig(options), validation_steps=1
    )
    return cfg.ExperimentConfig(task=LazyConfig(), trainer=trainer)

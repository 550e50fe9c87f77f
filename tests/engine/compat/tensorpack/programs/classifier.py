"""A small classifier, which the real package and the door run.

python classifier.py FOLDER     trains with the real package, and stores what it predicts
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

_RANDOM = np.random.RandomState(0)
IMAGES = _RANDOM.rand(32, 6, 6, 1).astype("float32")
LABELS = _RANDOM.randint(0, 4, 32).astype("int32")


class Program:
    """The classifier with one of the two packages.

    Args:
      package: The name of the package.
      tf: TensorFlow 1 as the package knows it.
    """

    def __init__(self, package: str, tf: Any) -> None:
        self.tf = tf
        self.tensorpack = importlib.import_module(package)
        self.logger = importlib.import_module(f"{package}.utils.logger")

    def build_model(self, filters: int = 3) -> Any:
        """Returns the ModelDesc."""
        tensorpack = self.tensorpack
        tf = self.tf

        class Model(tensorpack.ModelDesc):
            def inputs(self) -> list[Any]:
                images = tf.TensorSpec((None, 6, 6, 1), tf.float32, "images")
                return [images, tf.TensorSpec((None,), tf.int32, "labels")]

            def build_graph(self, images: Any, labels: Any) -> Any:
                # The gradient of a bias before batch norm is rounding error only.
                net = tensorpack.Conv2D(
                    "conv", images, filters, 3, activation=tensorpack.BNReLU, use_bias=False
                )
                logits = tf.identity(tensorpack.FullyConnected("fc", net, 4), name="logits")
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    logits=logits, labels=labels
                )
                return tf.reduce_mean(losses, name="cost")

            def optimizer(self) -> Any:
                rate = tf.get_variable("learning_rate", initializer=0.01, trainable=False)
                return tf.train.AdamOptimizer(rate)

        return Model()

    def read_data(self) -> Any:
        """Returns the dataflow of four batches."""
        datapoints = [[image, label] for image, label in zip(IMAGES, LABELS, strict=True)]
        dataflow = self.tensorpack.DataFromList(datapoints, shuffle=False)
        return self.tensorpack.BatchData(dataflow, 8)

    def train(self, folder: str, epochs: int, callbacks: list[Any], session_init: Any) -> None:
        """Trains with four steps in an epoch."""
        tensorpack = self.tensorpack
        self.logger.set_logger_dir(folder, action="d")
        config = tensorpack.TrainConfig(
            model=self.build_model(),
            data=tensorpack.FeedInput(self.read_data()),
            callbacks=[tensorpack.ModelSaver(), *callbacks],
            steps_per_epoch=4,
            max_epoch=epochs,
            session_init=session_init,
            # The package's own session uses one thread for an operation, and the order of a sum
            # depends on their number.
            session_config=self.tf.ConfigProto(allow_soft_placement=True),
        )
        tensorpack.launch_train_with_config(config, tensorpack.SimpleTrainer())

    def build_predictor(self, session_init: Any, **options: Any) -> Any:
        """Returns the function from images and labels to logits and the cost."""
        tensorpack = self.tensorpack
        arguments = {
            "model": self.build_model(),
            "input_names": ["images", "labels"],
            "output_names": ["logits", "cost"],
            **options,
        }
        config = tensorpack.PredictConfig(session_init=session_init, **arguments)
        return tensorpack.OfflinePredictor(config)


def open_real_package() -> Program:
    """Returns the program with the real package, which needs sessions and NumPy 1."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    np.sctypes = {"int": [np.int32, np.int64], "float": [np.float32, np.float64]}
    np.object = object
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    return Program("tensorpack", tf.compat.v1)


def main(folder: str) -> None:
    """Trains two epochs, and stores the predictions after the first."""
    program = open_real_package()
    program.train(folder, 2, [], None)
    checkpoint = program.tensorpack.SmartInit(f"{folder}/model-4")
    logits, cost = program.build_predictor(checkpoint)(IMAGES, LABELS)
    np.savez(f"{folder}/predictions.npz", logits=logits, cost=cost)


if __name__ == "__main__":
    main(sys.argv[1])

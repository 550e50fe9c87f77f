"""A job on records of examples, with a model of tf_keras; it runs in processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.builders import write_records
from trainer_kit.compat.pipelines import Training, get_train_ds, get_valid_ds
from trainer_kit.training.base_trainer import BaseTrainer

STEPS = 9  # in an epoch
EPOCHS = 5  # at most
INPUTS = np.linspace(0, 1, 128, dtype="float32").reshape(2, 64)
_PARSED = {
    "pixels": tf.io.FixedLenFeature([64], tf.float32),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def write_data(folder: Path) -> None:
    """Writes 300 examples for training, in two files, and 100 for evaluations; a tenth has the
    label 9.
    """
    random = np.random.RandomState(0)
    for name, size in {"train-0": 150, "train-1": 150, "valid-0": 100}.items():
        records = []
        for number in range(size):
            features = {
                "pixels": tf.train.Feature(float_list=tf.train.FloatList(value=random.rand(64))),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            records.append(example.SerializeToString())
        write_records(folder / f"{name}.tfrec", records)


def serve_without_trainer_kit(saved_model: Path, output: Path) -> None:
    """Loads a SavedModel and writes its outputs, in a process that cannot import trainer_kit."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "trainer_kit":
            sys.modules[name] = None  # type: ignore[assignment]
    model = tf.saved_model.load(str(saved_model))
    output.write_text(json.dumps(model(INPUTS).numpy().tolist()))


def run_job(data: Path, folder: Path, stop: int = 0) -> None:
    """Trains, and writes the result to a file; the process gets SIGTERM after a step if one is
    given.
    """
    import tf_keras

    def build_model(checkpoint: Any = "none is given") -> Any:
        assert checkpoint == "none is given"
        layers = [
            tf_keras.layers.Input((64,)),
            tf_keras.layers.Dropout(0.2),
            tf_keras.layers.Dense(10),
        ]
        model = tf_keras.Sequential(layers)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    tf.random.set_seed(5)
    job = Training(build_model, str(folder / "job"), str(folder / "artifacts"), use_tpu=False)
    stop_requested = threading.Event()
    request_stop = BaseTrainer.request_stop

    def request_and_note(trainer: BaseTrainer) -> None:
        request_stop(trainer)
        stop_requested.set()

    BaseTrainer.request_stop = request_and_note  # type: ignore[method-assign]

    class Signal(tf_keras.callbacks.Callback):  # type: ignore[misc]
        steps = STEPS * job.last_epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == stop:
                os.kill(os.getpid(), signal.SIGTERM)
                # Or the epoch could end before the run sees the signal.
                assert stop_requested.wait(20)

    first_epoch = job.last_epoch
    options = {"monitor": "val_loss", "patience": 1, "min_delta": 10.0}
    callbacks = [
        tf_keras.callbacks.EarlyStopping(**options),
        tf_keras.callbacks.ReduceLROnPlateau(**options),
    ]
    job.add_callbacks([*callbacks, Signal()])

    def parse(example: Any) -> Any:
        return tuple(tf.io.parse_single_example(example, _PARSED).values())

    def swap(label: Any, pixels: Any) -> Any:
        return pixels, label

    examples = get_train_ds(data, parse, 10).map(swap).unbatch()
    train_ds = examples.filter(lambda _, label: label < 9).batch(32)
    history = job.run_train(train_ds, get_valid_ds(data, parse, 50).map(swap), EPOCHS)

    variables = [*job.model.variables, *job.model.optimizer.variables]
    result = {
        "last_epoch": job.last_epoch,
        "epochs": history.epoch,
        "history": history.history,
        "variables": [
            tf.convert_to_tensor(variable).numpy().tobytes().hex() for variable in variables
        ],
        "output": np.asarray(job.model(INPUTS)).tolist(),
    }
    (folder / f"result-from-{first_epoch}.json").write_text(json.dumps(result))

"""Two jobs on records of examples, one in the form of each generation of the class; they run in processes."""

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

from trainer_kit.compat.pipelines import Training, get_train_ds, get_valid_ds
from trainer_kit.training.base_trainer import BaseTrainer

STEPS = 9  # in an epoch
INPUTS = np.linspace(0, 1, 128, dtype="float32").reshape(2, 64)
_PARSED = {"pixels": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


def write_records(folder: Path) -> None:
    """Writes 300 examples for training, in two files, and 100 for evaluations; a tenth has the label 9."""
    random = np.random.RandomState(0)
    for name, size in {"train-0": 150, "train-1": 150, "valid-0": 100}.items():
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrec")) as writer:
            for number in range(size):
                features = {
                    "pixels": tf.train.Feature(float_list=tf.train.FloatList(value=random.rand(64))),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def run_to_the_end(data: Path, folder: Path) -> None:
    """Goes on with the stopped jobs, first in this process; then runs whole ones, and starts the first job again."""
    for kind in ("again", "whole"):
        for form, run in FORMS.items():
            run(data, folder / f"{kind}_{form}")
    job = folder / "again_1"
    files = {"found.json": json.loads((job / "result.json").read_text()), "before.json": states(job)}
    run_first(data, job)
    for name, content in {**files, "after.json": states(job)}.items():
        (folder / name).write_text(json.dumps(content))


def serve_without_trainer_kit(first: Path, second: Path, output: Path) -> None:
    """Loads the SavedModels of both forms and writes what they return, in a process that cannot import trainer_kit."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "trainer_kit":
            sys.modules[name] = None  # type: ignore[assignment]
    exported, saved = (tf.saved_model.load(str(path)) for path in (first, second))
    output.write_text(json.dumps([exported.serve(INPUTS).numpy().tolist(), saved(INPUTS).numpy().tolist()]))


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of change of all artifacts of a job."""
    paths = list((folder / "artifacts").rglob("*"))
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def run_first(data: Path, folder: Path, kill: int = 0) -> None:
    """A job of the first generation: Training compiles a model of Keras 3, which it wraps in a custom class."""
    import keras

    class Counting(keras.Model):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {**super().train_step(batch), "examples": tf.cast(tf.shape(batch[0])[0], tf.float32)}

    def build() -> Any:
        return keras.Sequential([keras.layers.Input((64,)), keras.layers.Dropout(0.2), keras.layers.Dense(10)])

    tf.random.set_seed(5)
    job = Training(
        build_model_func=build, job_dir=str(folder / "job"), artifacts_dir=str(folder / "artifacts"), use_tpu=False,
        custom_model_class=Counting, optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
    )  # fmt: skip
    job.add_callback(keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10.0))
    _train(job, keras, data, folder, 3, signal.SIGKILL, kill)


def run_second(data: Path, folder: Path, stop: int = 0) -> None:
    """A job of the second generation: build_model compiles a model of tf_keras, and may take a checkpoint."""
    import tf_keras

    def build_model(checkpoint: Any = "none is given") -> Any:
        assert checkpoint == "none is given"
        layers = [tf_keras.layers.Input((64,)), tf_keras.layers.Dropout(0.2), tf_keras.layers.Dense(10)]
        model = tf_keras.Sequential(layers)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    tf.random.set_seed(5)
    job = Training(build_model, str(folder / "job"), str(folder / "artifacts"), use_tpu=False)
    options = {"monitor": "val_loss", "patience": 1, "min_delta": 10.0}
    job.add_callbacks([tf_keras.callbacks.EarlyStopping(**options), tf_keras.callbacks.ReduceLROnPlateau(**options)])
    _train(job, tf_keras, data, folder, 5, signal.SIGTERM, stop)


def _train(
    job: Training, library: Any, data: Path, folder: Path, epochs: int, number: signal.Signals, step: int,
) -> None:  # fmt: skip
    """Trains, and writes the result to a file; the process gets a signal after a step if one is given."""
    heard, request_stop = threading.Event(), BaseTrainer.request_stop

    def noted(trainer: BaseTrainer) -> None:
        request_stop(trainer)
        heard.set()

    BaseTrainer.request_stop = noted  # type: ignore[method-assign]

    class Signal(library.callbacks.Callback):  # type: ignore[name-defined, misc]
        steps = STEPS * job.last_epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == step:
                os.kill(os.getpid(), number)
                assert heard.wait(20)  # the epoch could end before the run sees the signal

    begun = job.last_epoch
    job.add_callback(Signal())
    parse = lambda example: tuple(tf.io.parse_single_example(example, _PARSED).values())  # noqa: E731
    pair = lambda label, pixels: (pixels, label)  # noqa: E731
    train_ds = get_train_ds(data, parse, 10).map(pair).unbatch().filter(lambda _, label: label < 9).batch(32)
    history = job.run_train(train_ds, get_valid_ds(data, parse, 50).map(pair), epochs)
    variables = [*job.model.variables, *_of_optimizer(job.model.optimizer)]
    result = {
        "begun": begun,
        "last_epoch": job.last_epoch,
        "epochs": history.epoch,
        "history": history.history,
        "weights": [tf.convert_to_tensor(one).numpy().tobytes().hex() for one in job.model.weights],
        "variables": [tf.convert_to_tensor(one).numpy().tobytes().hex() for one in variables],
        "output": np.asarray(job.model(INPUTS)).tolist(),
    }
    (folder / "result.json").write_text(json.dumps(result))


def _of_optimizer(optimizer: Any) -> Any:
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


FORMS = {1: run_first, 2: run_second}

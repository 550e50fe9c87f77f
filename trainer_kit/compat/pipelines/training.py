"""Training: the class that gets the model, the data and the folders of a pipeline component."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.compat.keras.callback_state import load_history
from trainer_kit.compat.keras.model_fit import fit
from trainer_kit.compat.pipelines.artifacts import export_saved_model, write_history_csv
from trainer_kit.compat.pipelines.job_exits import exit_codes
from trainer_kit.compat.pipelines.job_folder import JobFolder
from trainer_kit.compat.pipelines.model_building import (
    build_model,
    get_input_size,
    job_strategy,
    use_custom_objects,
)
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.runtime.keras_internals import is_keras_2_model

if TYPE_CHECKING:
    import tensorflow as tf

    from trainer_kit.typing import Optimizer

_LOG = logging.getLogger(__name__)

# The artifacts in artifacts_dir.
_HISTORY = "history.csv"
_MODEL = "saved_model"


class Training:
    """A training job that gets its model, data and folders from a pipeline component.

    A job that was stopped or killed continues when the same program is started again: with the
    optimizer, the callbacks and the remaining epochs. A subclass may replace `__init__` and
    `run_train`. Runs eagerly, on the host.

    Args:
      build_model_func: A function without arguments that returns a model of Keras 3 or tf_keras,
        compiled or not. An argument `checkpoint` of it is not used, since the engine restores the
        checkpoint.
      job_dir: The folder for checkpoints/, logs/ and job_meta.json. "": a temporary folder, from
        which no later start can continue.
      artifacts_dir: The folder for saved_model/ and history.csv. "": they are not written.
      use_tpu: Whether to train on a TPU. If there is none, one line says so, and the current
        strategy is used.
      custom_model_class: A class of models with its own steps. It gets the inputs and outputs of
        the model that build_model_func returns, unless that is one of this class.
      custom_objects: Objects by name that Keras finds while the model is built or loaded.
      optimizer, loss, metrics: The arguments of `compile`. None: as build_model_func has compiled
        the model.

    Attributes:
      model: The model, which `run_train` trains. A finished job leaves it with the trained weights.
      callbacks: The callbacks of Keras and of trainer_kit that `run_train` uses. A TensorBoard at
        first.
      last_epoch: The number of complete epochs, 0 at first.
      last_checkpoint: The path of the newest checkpoint, without the endings of its files. None at
        first.
      distribute_strategy: The strategy in whose scope the model was built.
      history: The History of `run_train`. None before.
      job_dir, artifacts_dir, use_tpu, custom_objects: The arguments.

    Raises:
      SystemExit: After a message, with exit code 2 when an argument cannot be used, and 6 when a
        folder cannot be written.
    """

    def __init__(
        self,
        build_model_func: Callable[..., keras.Model | tf.keras.Model],
        job_dir: str | os.PathLike[str] = "",
        artifacts_dir: str | os.PathLike[str] = "",
        use_tpu: bool = True,
        *,
        custom_model_class: type | None = None,
        custom_objects: Mapping[str, object] | None = None,
        optimizer: Optimizer | str | None = None,
        loss: Any = None,
        metrics: Any = None,
    ) -> None:
        self.job_dir = files.follow_links(os.fspath(job_dir or ""))
        self.artifacts_dir = files.follow_links(os.fspath(artifacts_dir or ""))
        self.use_tpu = use_tpu
        self.custom_objects = custom_objects
        self.history: keras.callbacks.History | None = None

        with exit_codes():
            folders = {"job_dir": self.job_dir, "artifacts_dir": self.artifacts_dir}
            for name, folder in folders.items():
                if files.is_remote(folder):
                    raise UsageError(
                        f"{name}={folder!r} is a remote folder; mount it (gcsfuse, s3fs, ...) and"
                        " give the path of the mount"
                    )
                # The error comes before the training, and not after it.
                if folder:
                    files.check_writable(folder)

            self.distribute_strategy = job_strategy(use_tpu)
            with self.distribute_strategy.scope(), use_custom_objects(custom_objects):
                self.model = build_model(
                    build_model_func,
                    custom_model_class,
                    optimizer=optimizer,
                    loss=loss,
                    metrics=metrics,
                )

        if not self.job_dir:
            self.job_dir = tempfile.mkdtemp(prefix="trainer_kit-job-")
            _LOG.warning(
                "job_dir is not given: the files are in %s, and no later start goes on there",
                self.job_dir,
            )

        self.last_epoch = self._folder.last_epoch()
        self.last_checkpoint = self._folder.last_checkpoint()

        # A model takes callbacks of its own library.
        library = keras
        if is_keras_2_model(self.model):
            library = sys.modules["tf_keras"]
        tensorboard = library.callbacks.TensorBoard(self._folder.logs_dir)
        self.callbacks: list[Callback | keras.callbacks.Callback] = [tensorboard]

    @property
    def checkpoints_dir(self) -> str:
        """The folder of the run.

        It is the argument `model_dir` of `trainer_kit.compat.keras` and of the command line.
        """
        return self._folder.checkpoints_dir

    @property
    def _folder(self) -> JobFolder:
        return JobFolder(self.job_dir)

    def model_summary(self) -> None:
        """Prints the layers of the model."""
        self.model.summary()

    def get_model_input_size(self) -> int | tuple[int, ...]:
        """Returns the height of the images that the model takes.

        It is (height, width) if they differ. For a model of vectors it is the number of features.

        Raises:
          UsageError: When the model takes inputs of any size.
        """
        return get_input_size(self.model)

    def add_callback(self, callback: Callback | keras.callbacks.Callback) -> None:
        """Adds a callback of Keras or of trainer_kit."""
        self.callbacks.append(callback)

    def add_callbacks(self, callbacks: Iterable[Callback | keras.callbacks.Callback]) -> None:
        """Adds callbacks of Keras or of trainer_kit."""
        self.callbacks.extend(callbacks)

    def run_train(
        self, train_ds: Any, valid_ds: Any, epochs: int, **options: Any
    ) -> keras.callbacks.History:
        """Trains up to the end of epoch `epochs` and writes the artifacts.

        A finished job trains nothing and leaves its artifacts alone.

        Args:
          train_ds: The training data in global batches, a tf.data.Dataset or whatever `Model.fit`
            takes.
          valid_ds: The validation data, evaluated after each epoch. None: nothing is evaluated.
          epochs: The total number of epochs, including those of earlier starts.
          **options: Further arguments of `trainer_kit.compat.keras.fit`, such as
            checkpoint_interval.

        Returns:
          The History of all epochs.

        Raises:
          SystemExit: After a message, with an exit code of `errors.EXIT_CODES`: 75 after SIGTERM, 3
            if the loss or a weight is not finite, 2 for a mistake of the caller.
        """
        with exit_codes(), use_custom_objects(self.custom_objects):
            self.history = self._train(train_ds, valid_ds, epochs, options)
            if not self.artifacts_dir:
                return self.history

            # An earlier start may have written the artifacts of the newest checkpoint.
            checkpoint = os.path.basename(self.last_checkpoint or "")
            history_path = os.path.join(self.artifacts_dir, _HISTORY)
            model_path = os.path.join(self.artifacts_dir, _MODEL)
            are_complete = os.path.exists(history_path) and os.path.exists(model_path)
            if not are_complete or self._folder.read_meta().get("artifacts_of") != checkpoint:
                # The note comes last: a job that is killed before writes the artifacts again.
                self.save_history()
                self.save_model()
                self._folder.update_meta(artifacts_of=checkpoint)
        return self.history

    def save_history(
        self, history: keras.callbacks.History | Mapping[str, Sequence[object]] | None = None
    ) -> None:
        """Writes the history to artifacts_dir/history.csv, as a DataFrame of pandas is written.

        Args:
          history: A History, or a dict of the values of the epochs by name. None: the one of
            `run_train`.

        Raises:
          UsageError: When there is no artifacts_dir or no history yet.
        """
        if history is None:
            history = self.history
        if not self.artifacts_dir or history is None:
            raise UsageError("save_history: artifacts_dir is not given, or run_train has not ended")

        values = getattr(history, "history", history)
        path = os.path.join(self.artifacts_dir, _HISTORY)
        write_history_csv(path, values)

    def save_model(self) -> None:
        """Writes the model to artifacts_dir/saved_model, for `tf.saved_model.load`.

        Raises:
          UsageError: When there is no artifacts_dir.
        """
        if not self.artifacts_dir:
            raise UsageError("save_model: artifacts_dir is not given")
        export_saved_model(self.model, os.path.join(self.artifacts_dir, _MODEL))

    def _train(
        self, train_ds: Any, valid_ds: Any, epochs: int, options: dict[str, Any]
    ) -> keras.callbacks.History:
        """Trains up to the end of an epoch, and returns the History of all epochs."""
        if train_ds is None:
            raise UsageError("train_ds is None; give the training data")

        # A job whose loss is not finite ends with an error. Keras would continue, and the artifact
        # would contain NaN.
        trainer = {"recovery_max_trials": 0, **options.pop("trainer", {})}
        more_callbacks = options.pop("callbacks", None) or ()
        callbacks = [*self.callbacks, *more_callbacks, _Progress(self)]
        try:
            history = fit(
                self.model,
                train_ds,
                validation_data=valid_ds,
                epochs=epochs,
                model_dir=self.checkpoints_dir,
                callbacks=callbacks,
                trainer=trainer,
                **options,
            )
        finally:
            # An error of the run says more than one of the progress, and has the exit code.
            with contextlib.suppress(StorageError):
                self.note_progress()

        # The numbers have the same types as in a later start.
        load_history(self.checkpoints_dir, history)
        return history

    def note_progress(self) -> None:
        """Reads `last_epoch` and `last_checkpoint` from the checkpoints.

        Writes them to job_meta.json.

        Raises:
          StorageError: When the file cannot be written.
        """
        self.last_epoch = self._folder.last_epoch()
        self.last_checkpoint = self._folder.last_checkpoint()
        if self.last_checkpoint:
            checkpoint = os.path.relpath(self.last_checkpoint, self.job_dir)
            self._folder.update_meta(last_epoch=self.last_epoch, last_checkpoint=checkpoint)


class _Progress(Callback):
    """Notes the progress of a job when a checkpoint is complete."""

    def __init__(self, job: Training) -> None:
        self._job = job

    def checkpoint_saved(self, run: Run, path: str, step: int) -> None:
        """Notes how many epochs the job has trained."""
        self._job.note_progress()

"""TensorBoard event files of scalars, with the meaning of Orbit's summary managers.

All scalars of one call go into one event, written through the same `tf.summary` writer that users
get from `summary_writer()`. So each folder has one file, which every reader understands. Some
readers skip a second file in the folder that grows at the same time. One event costs 0.1 ms, while
`tf.summary.scalar` takes 0.2 ms for each scalar.

A resumed run is one curve: `resume` writes events that make readers drop later steps. TensorBoard's
server drops them by itself, tag by tag, as soon as an earlier step comes. Its Python reader waits
for a SessionLog START and treats the first one in each folder as the beginning of the run, so
`resume` writes two. The older `event_accumulator`, which TensorBoard no longer uses, never drops
the scalars of TensorFlow 2.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from trainer_kit.config.fields import flatten_values
from trainer_kit.config.resolve import non_default_paths
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.process.error_report import format_reason
from trainer_kit.telemetry.report import CHANGE, DEVICE_USAGE_FIELDS, Report
from trainer_kit.telemetry.scalars import as_scalar

_LOG = logging.getLogger(__name__)
_SCALAR_METADATA = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)
_FLOAT = tf.float32.as_datatype_enum
_LOSS_NAMES = ("training_loss", "validation_loss")


class SummaryManagerLike(Protocol):
    """A SummaryManager, or one of another program with Orbit's interface."""

    @property
    def write_summaries(self) -> Callable[..., None]:
        """Writes a dict of scalars. Some managers also take the argument `step`."""

    def summary_writer(self, relative_path: str = ..., /) -> tf.summary.SummaryWriter:
        """Returns the `tf.summary` writer of a folder."""

    def flush(self) -> None:
        """Waits until all events are in the files."""


class SummaryManager:
    """Writes dicts of scalars below `directory`, like a summary manager of Orbit.

    Orbit is not imported. A folder and its event file are created with the first event. Runs
    eagerly, on the host.

    Args:
      directory: The local or remote folder. None writes nothing.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._handles: weakref.WeakKeyDictionary[tf.summary.SummaryWriter, tf.Tensor] = (
            weakref.WeakKeyDictionary()
        )
        self._warned_names: set[str] = set()
        self._newest_steps: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def summary_writer(self, relative_path: str = "") -> tf.summary.SummaryWriter:
        """Returns the `tf.summary` writer of a folder, for any kind of summary.

        It writes nothing if the directory is None. `flush` and `close` include it.

        Args:
          relative_path: The folder, below the directory.

        Raises:
          StorageError: when the folder or the event file cannot be created.
        """
        # Reports come from another thread. Two writers in one folder would write two files.
        with self._lock:
            if relative_path not in self._writers:
                self._writers[relative_path] = self._open(relative_path)
            return self._writers[relative_path]

    def write_summaries(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Writes the scalars in `values`, as 32-bit floats.

        A nested mapping goes into a folder of its name. Other values are left out, with one warning
        per name. Scalars already written for this step are left out too.

        Args:
          values: The scalars (see `as_scalar`) or mappings of them, by name.
          step: The step of the values. None uses `tf.summary`'s default step.

        Raises:
          UsageError: when no step is known.
          StorageError: when the scalars cannot be written.
        """
        if self._directory is None:
            return
        if step is None:
            step = tf.summary.experimental.get_step()
        if step is None:
            raise UsageError(
                "summaries need a step: pass step= or call tf.summary.experimental.set_step"
            )
        self._write(values, int(step), "")

    def write_config(self, config: ExperimentConfig, step: int) -> None:
        """Writes a config as text, and its values that are no defaults for the HParams tab.

        The tab has a row for the folder around the directory, with the scalars of the directory.

        Raises:
          StorageError: when they cannot be written.
        """
        if self._directory is None:
            return
        # The import takes 0.2 s.
        from tensorboard.plugins.hparams import api

        values = flatten_values(config)
        hparams = {}
        for path in non_default_paths(config):
            value = values.get(path)
            if not isinstance(value, (bool, int, float)):
                value = str(value)
            hparams[path] = value
        run_folder = os.path.dirname(self._directory)
        start = api.hparams_pb(hparams, trial_id=run_folder)
        with self._storage_errors(""), self.summary_writer().as_default(step=step):
            tf.summary.text("config", f"```yaml\n{to_yaml(config)}```")
            tf.summary.experimental.write_raw_pb(start.SerializeToString())

    def resume(self, step: int) -> None:
        """Removes the events of steps after `step` from the curves, since the run resumes there.

        Call it at every start and rollback, while no report is waiting, and with `step - 1` if the
        events of `step` itself will come again (a repeated evaluation). Writes to each folder that
        has event files, through the open writer if there is one.

        Raises:
          StorageError: when the events cannot be written.
        """
        self._newest_steps.clear()
        if self._directory is None or not tf.io.gfile.isdir(self._directory):
            return

        # The folders with event files of this process or of earlier ones.
        relative_paths = []
        with self._storage_errors(""):
            for folder, _, names in tf.io.gfile.walk(self._directory):
                seconds = [_parse_opening_second(name) for name in names]
                has_events = any(second is not None for second in seconds)
                if has_events:
                    path = os.path.relpath(folder, self._directory)
                    relative_paths.append("" if path == "." else path)

        for relative_path in relative_paths:
            # The event makes readers forget the events of its step and of later steps.
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            next_step = int(step) + 1
            event = tf.compat.v1.Event(wall_time=time.time(), step=next_step)
            event.session_log.CopyFrom(start)
            self._append(relative_path, event, times=2)

    def flush(self) -> None:
        """Waits until all events are in the files.

        Raises:
          StorageError: when they cannot be written.
        """
        for relative_path, writer in list(self._writers.items()):
            with self._storage_errors(relative_path):
                writer.flush()

    def close(self) -> None:
        """Flushes and closes the event files. Later events go into new files.

        Raises:
          StorageError: when the last events cannot be written.
        """
        writers = self._writers
        self._writers = {}
        for relative_path, writer in writers.items():
            with self._storage_errors(relative_path):
                writer.close()

    def _open(self, relative_path: str) -> tf.summary.SummaryWriter:
        if self._directory is None:
            return tf.summary.create_noop_writer()
        folder = os.path.join(self._directory, relative_path)
        with self._storage_errors(relative_path):
            # Readers sort files by name, which contains the second of opening. Within one second
            # the order is arbitrary, so this file is opened in a later one.
            newest = 0
            if tf.io.gfile.isdir(folder):
                for name in tf.io.gfile.listdir(folder):
                    second = _parse_opening_second(name)
                    newest = max(newest, second or 0)
            if newest > time.time():
                _LOG.warning(
                    "%s has event files from the future; TensorBoard will read new events before"
                    " those files",
                    folder,
                )
            else:
                while (wait := newest + 1 - time.time()) > 0:
                    time.sleep(wait)
            return tf.summary.create_file_writer(folder)

    @contextlib.contextmanager
    def _storage_errors(self, relative_path: str) -> Iterator[None]:
        """Turns an error of TensorFlow into a StorageError that names the folder."""
        try:
            yield
        except tf.errors.OpError as error:
            path = os.path.join(self._directory or "", relative_path)
            folder = path.rstrip(os.sep)
            reason, *_ = format_reason(error)
            raise StorageError(
                f"no TensorBoard summary can be written in {folder}: {reason}"
            ) from error

    def _write(self, values: Mapping[str, object], step: int, relative_path: str) -> None:
        # All scalars of a folder go into one event.
        event = tf.compat.v1.Event(wall_time=time.time(), step=step)
        summary = event.summary
        for name, value in values.items():
            if isinstance(value, Mapping):
                folder = os.path.join(relative_path, name)
                self._write(value, step, folder)
                continue
            number = as_scalar(value)
            if number is None:
                self._warn(os.path.join(relative_path, name), value)
            elif self._newest_steps.get((relative_path, name)) != step:
                tensor = summary.value.add(tag=name, metadata=_SCALAR_METADATA).tensor
                tensor.dtype = _FLOAT
                # An empty shape is that of a scalar.
                tensor.tensor_shape.SetInParent()
                tensor.float_val.append(number)

        # A scalar counts as written once its event is in the file.
        if summary.value:
            self._append(relative_path, event)
            for scalar in summary.value:
                self._newest_steps[relative_path, scalar.tag] = step

    def _append(self, relative_path: str, event: tf.compat.v1.Event, times: int = 1) -> None:
        with self._storage_errors(relative_path):
            writer = self.summary_writer(relative_path)
            # The public writer takes only summaries and needs three times as long. The event is
            # passed as a tensor, because the operation converts other values slowly.
            serialized = tf.constant(event.SerializeToString())
            if writer not in self._handles:
                self._handles[writer] = _get_resource_handle(writer)
            handle = self._handles[writer]
            for _ in range(times):
                tf.raw_ops.ImportEvent(writer=handle, event=serialized)
            writer.flush()

    def _warn(self, name: str, value: object) -> None:
        if name in self._warned_names:
            return
        self._warned_names.add(name)
        shape = getattr(value, "shape", None)
        description = type(value).__name__
        if shape is not None:
            description += f" of shape {tuple(shape)}"
        _LOG.warning(
            "%s is not written to TensorBoard: it is a %s, not a single number", name, description
        )


@dataclass(frozen=True)
class TensorBoardOptions:
    """What a SummaryManager writes for TensorBoard beside the metrics.

    Attributes:
      loss_tag: The name of the losses of training and of validation, since one name in several
        folders is one chart. "" leaves them their names.
      config: The config of the run. None writes none.
      config_kind: The kind of the reports that the config is written with, "train" or "validation".
    """

    loss_tag: str = "loss"
    config: ExperimentConfig | None = None
    config_kind: str = "validation"


class TensorBoardWriter:
    """Writes reports through two summary managers: one for training, one for everything else.

    It adds the rates, and how the machine is used, to the metrics. The options apply to each
    SummaryManager. A manager of another class is called by Orbit's interface with the unchanged
    metrics. The step is passed if its `write_summaries` takes one. Runs eagerly, on the host.

    Args:
      train_manager: The manager that gets reports of kind "train".
      validation_manager: The manager that gets the others. It may be the same object.
      options: What is written beside the metrics. None means the defaults.
    """

    def __init__(
        self,
        train_manager: SummaryManagerLike,
        validation_manager: SummaryManagerLike,
        options: TensorBoardOptions | None = None,
    ) -> None:
        self._options = options or TensorBoardOptions()
        self._has_config = False
        self._managers = {"train": train_manager, "validation": validation_manager}
        self._takes_step = {}
        for kind, manager in self._managers.items():
            self._takes_step[kind] = _takes_step(manager)

    @property
    def needs_caller_thread(self) -> bool:
        """Whether a manager takes no step.

        Such a manager reads the run's counter, which is right only until the next loop.
        """
        return not all(self._takes_step.values())

    def write(self, report: Report) -> None:
        """Writes the metrics and rates of `report` at its step.

        A change is not written, since the curve of the learning rate shows it.
        """
        if report.kind == CHANGE:
            return
        kind = "train" if report.kind == "train" else "validation"
        values = dict(report.metrics)
        for name in ("steps_per_second", "examples_per_second", *DEVICE_USAGE_FIELDS):
            rate = getattr(report, name)
            if rate is not None:
                values[name] = rate
        manager = self._managers[kind]
        if isinstance(manager, SummaryManager):
            options = self._options
            if options.loss_tag:
                values = _unify_loss_tags(values, options.loss_tag)
            if options.config and options.config_kind == kind and not self._has_config:
                manager.write_config(options.config, report.step)
                self._has_config = True
        if self._takes_step[kind]:
            manager.write_summaries(values, step=report.step)
        else:
            manager.write_summaries(values)

    def flush(self) -> None:
        """Flushes both managers."""
        for manager in self._managers.values():
            manager.flush()

    def close(self) -> None:
        """Flushes both managers, and closes those that can be closed."""
        for manager in self._managers.values():
            close = getattr(manager, "close", manager.flush)
            close()


def _unify_loss_tags(values: Mapping[str, object], loss_tag: str) -> dict[str, object]:
    """Returns nested values with one name for the losses of training and validation.

    A loss keeps its name in a group that has another value of that name.
    """
    renamed: dict[str, object] = {}
    for name, value in values.items():
        tag = loss_tag if name in _LOSS_NAMES and loss_tag not in values else name
        if isinstance(value, Mapping):
            value = _unify_loss_tags(value, loss_tag)
        renamed[tag] = value
    return renamed


def _get_resource_handle(writer: tf.summary.SummaryWriter) -> tf.Tensor:
    """Returns TensorFlow's resource of a writer, in a public way.

    A function that flushes the writer captures the resource.
    """

    @tf.function(autograph=False)
    def flush() -> None:
        writer.flush()

    (handle,) = flush.get_concrete_function().captured_inputs
    return handle


def _parse_opening_second(name: str) -> int | None:
    """Returns when the event file of this name was opened, in seconds since 1970.

    Returns None if it is not an event file.
    """
    match = re.search(r"\.tfevents\.(\d+)", name)
    if match is None:
        return None
    return int(match.group(1))


def _takes_step(manager: SummaryManagerLike) -> bool:
    parameters = inspect.signature(manager.write_summaries).parameters.values()
    return any(
        parameter.name == "step" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )

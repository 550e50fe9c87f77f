"""Named tensors for callbacks: requests them, and writes the summaries of `trainer.summaries`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.schema.durations import is_due
from trainer_kit.config.schema.metric_configs import SummaryConfig
from trainer_kit.errors import UsageError
from trainer_kit.telemetry.summary_manager import SummaryManagerLike
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.loops.train_loop import SummaryTimer

_FIELD = "trainer.summaries"


def request_tensors(trainer: BaseTrainer, callbacks: Iterable[Callback]) -> None:
    """Asks a trainer for the tensors that callbacks read.

    Call it on all workers, before the first step is traced.

    Raises:
      UsageError: when the trainer cannot return tensors, or has traced its step.
    """
    for callback in callbacks:
        where = _FIELD if isinstance(callback, TensorSummaries) else f"callback {callback.name}"
        for names in (callback.tensors, callback.evaluation_tensors):
            if isinstance(names, str):
                raise UsageError(
                    f"{where}: {names!r} is not a list of names of tensors; give [{names!r}]"
                )
            if names and trainer.custom_parts.replaces_steps:
                raise UsageError(
                    f"{where}: {trainer.class_name} has steps of its own, which expose no tensors"
                )

        for name in callback.tensors:
            trainer.train_tensors.request_value(name, where)
        for name in callback.evaluation_tensors:
            trainer.eval_tensors.request_value(name, where)


class TensorSummaries(Callback):
    """Writes the summaries of named tensors.

    Scalars go to the reports, histograms and images to TensorBoard. Runs eagerly, on the host, on
    the chief.

    Args:
      sections: The entries of `trainer.summaries`.
      interval: The steps between histograms and images of training loops, or a timer. None writes
        no histograms and images.
      train_manager: The summary manager of training.
      evaluation_manager: The summary manager of evaluations.
    """

    name = "summaries"

    def __init__(
        self,
        sections: Sequence[SummaryConfig],
        interval: int | SummaryTimer | None,
        train_manager: SummaryManagerLike,
        evaluation_manager: SummaryManagerLike,
    ) -> None:
        self._train_sections = [section for section in sections if section.of != "evaluation"]
        self._evaluation_sections = [section for section in sections if section.of != "training"]
        self._interval = interval
        self._train_manager = train_manager
        self._evaluation_manager = evaluation_manager
        self.tensors = [section.tensor for section in self._train_sections]
        self.evaluation_tensors = [section.tensor for section in self._evaluation_sections]

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Writes the tensors of the loop's last step."""
        del logs
        assert run.loop is not None
        if self._interval is None:
            writes_arrays = False
        elif isinstance(self._interval, SummaryTimer):
            writes_arrays = self._interval.choose(run.loop.end)
        else:
            writes_arrays = is_due(run.loop.begin, run.loop.end, self._interval)
        manager = self._train_manager if writes_arrays else None
        self._write(run, self._train_sections, run.tensors, manager)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Writes the tensors of the evaluation's last batch."""
        del logs
        assert run.evaluation is not None
        if run.evaluation.is_replayed:
            return

        manager = self._evaluation_manager if self._interval is not None else None
        for name in run.evaluation.sets:
            values = run.evaluation_tensors.get(name, {}) if name else run.evaluation_tensors
            self._write(run, self._evaluation_sections, values, manager, name)

    def _write(
        self,
        run: Run,
        sections: Sequence[SummaryConfig],
        values: Mapping[str, np.ndarray],
        manager: SummaryManagerLike | None,
        folder: str = "",
    ) -> None:
        """Writes the tensors of `sections` that `values` contains.

        Args:
          run: The run, which scalars are reported to.
          sections: The summaries to write.
          values: The values of the tensors by name.
          manager: The summary manager for histograms and images. None writes none.
          folder: The name of the validation set if there are several, else "".
        """
        for section in sections:
            if section.tensor not in values:
                continue
            value = values[section.tensor]
            if section.type == "scalar":
                if np.ndim(value):
                    raise UsageError(
                        f"{_FIELD}: the tensor {section.tensor!r} has the shape"
                        f" {list(value.shape)}, and type=scalar needs a single number; use"
                        " type=histogram, or expose its mean"
                    )
                name = f"{folder}/{section.tensor}" if folder else section.tensor
                run.report(name, value)
            elif manager is not None:
                writer = manager.summary_writer(folder) if folder else manager.summary_writer()
                with writer.as_default(step=run.step), tf.summary.record_if(True):
                    if section.type == "histogram":
                        tf.summary.histogram(section.tensor, value)
                        continue
                    if np.ndim(value) != 4 or value.shape[-1] not in (1, 3, 4):
                        raise UsageError(
                            f"{_FIELD}: the tensor {section.tensor!r} has the shape"
                            f" {list(np.shape(value))}, and type=image needs [batch, height,"
                            " width, channels] with 1, 3 or 4 channels"
                        )
                    tf.summary.image(section.tensor, value)

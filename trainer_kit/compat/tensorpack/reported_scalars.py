"""ReportedScalars: the statistics that a program reports, for the engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainer_kit.compat.tensorpack.callbacks.base import Callback
from trainer_kit.compat.tensorpack.callbacks.monitor import JSONWriter, MonitorBase
from trainer_kit.compat.tensorpack.utils import logger


class ReportedScalars(MonitorBase):
    """A monitor that keeps the newest value of each scalar.

    Attributes:
      evaluation: The scalars of the last evaluation, by name.
      evaluated_step: The step of the run that it belongs to. None before the first one.
      evaluation_seconds: How long it took.
    """

    def __init__(self) -> None:
        self.evaluation: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self.evaluation_seconds = 0.0
        self._scalars: dict[str, float] = {}
        self._is_in_evaluation = False
        self._finished_runners: set[int] = set()

    def process_scalar(self, name: str, val: Any) -> None:
        """Keeps a scalar. Called by Monitors."""
        target = self.evaluation if self._is_in_evaluation else self._scalars
        target[name] = float(val)

    def collect_runner(
        self, trigger: Callable[[], None], number: int, get_step: Callable[[], int]
    ) -> Callable[[], None]:
        """Returns the trigger of an InferenceRunner, whose scalars are those of an evaluation.

        Args:
          trigger: The runner's method `trigger`.
          number: The number of the runner.
          get_step: Returns the step of the run.
        """

        def collect() -> None:
            if self.evaluated_step != get_step():
                self.forget_evaluation()
            self.evaluated_step = get_step()
            self._is_in_evaluation = True
            start = time.perf_counter()
            try:
                trigger()
            finally:
                self._is_in_evaluation = False
            self.evaluation_seconds += time.perf_counter() - start
            self._finished_runners.add(number)

        return collect

    def select_missing(self, runners: Sequence[Any], step: int) -> list[Any]:
        """Returns the runners that have not run at a step of the run."""
        if self.evaluated_step != step:
            return list(runners)
        missing_runners = []
        for number, runner in enumerate(runners):
            if number not in self._finished_runners:
                missing_runners.append(runner)
        return missing_runners

    def forget_evaluation(self) -> None:
        """Forgets the last evaluation."""
        self.evaluation = {}
        self.evaluated_step = None
        self.evaluation_seconds = 0.0
        self._finished_runners = set()

    def evaluation_state(self) -> list[Any]:
        """Returns the last evaluation, in JSON types."""
        return [self.evaluated_step, self.evaluation, sorted(self._finished_runners)]

    def restore_evaluation(self, state: Sequence[Any]) -> None:
        """Continues with what `evaluation_state` returned."""
        self.evaluated_step, self.evaluation, finished_runners = state
        self._finished_runners = set(finished_runners)

    def take(self) -> dict[str, float]:
        """Returns the scalars of the training since the last call."""
        scalars = self._scalars
        self._scalars = {}
        return scalars


def continue_statistics(callbacks: Iterable[Callback], step: int) -> None:
    """Lets each JSONWriter continue its stats.json, without the records of later steps.

    Args:
      callbacks: The callbacks of the run.
      step: The step of the run that it begins with. A new run leaves the file to the writer, which
        keeps an older one under another name.
    """
    if step == 0:
        return
    for writer in callbacks:
        if not isinstance(writer, JSONWriter):
            continue
        records = JSONWriter.load_existing_json() or []
        last_step = writer.global_step
        writer._stats = [record for record in records if record["global_step"] <= last_step]
        writer._fname = os.path.join(logger.get_logger_dir(), JSONWriter.FILENAME)
        if len(writer._stats) < len(records):
            writer._write_stat()
        # It takes a run that continues inside an epoch for another run.
        writer._before_train = writer._trigger

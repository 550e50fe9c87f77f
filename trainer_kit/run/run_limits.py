"""What limits a run: one run in a process at a time, and trainer.max_time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import TracebackType

from trainer_kit.config.schema.durations import get_seconds
from trainer_kit.errors import UsageError
from trainer_kit.process.signals import StopSignals

_LOG = logging.getLogger(__name__)
_single_run_lock = threading.RLock()


@contextlib.contextmanager
def forbid_concurrent_runs() -> Iterator[None]:
    """Raises UsageError while another thread runs an experiment.

    One thread may run one inside another. The loops of two threads can wait for each other
    permanently, since both need the threads of TensorFlow's only pool.
    """
    if not _single_run_lock.acquire(blocking=False):
        raise UsageError(
            "another thread of this process runs an experiment; run one after the other, or in"
            " processes"
        )
    try:
        yield
    finally:
        _single_run_lock.release()


class TimeLimit:
    """While entered, stops the run like a SIGTERM as soon as its time is over, counted from now.

    So the run saves and ends with exit code 75. With several workers, all end at the same step.

    Args:
      max_time: The value of trainer.max_time, such as "2 h". None means no limit.
      signals: The stop signals of the run.
    """

    def __init__(self, max_time: str | None, signals: StopSignals) -> None:
        self._max_time = max_time
        self._signals = signals
        self._timer: threading.Timer | None = None
        if max_time is not None:
            self._timer = threading.Timer(get_seconds(max_time), self._stop)

    def _stop(self) -> None:
        _LOG.warning("trainer.max_time=%s is over: stopping", self._max_time)
        self._signals.stop(f"trainer.max_time={self._max_time}")

    def __enter__(self) -> TimeLimit:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

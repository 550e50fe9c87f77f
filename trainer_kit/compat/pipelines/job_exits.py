"""The exit codes of a job: a pipeline reads from them whether it should start the job again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from trainer_kit.errors import ExitCode, find_trainer_kit_error
from trainer_kit.process.error_report import print_error


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the program with the exit code of an error that explains itself, and prints its message.

    Any other error, such as one of the user's code, continues as it is: Python prints its traceback
    and ends with 1. SIGTERM outside of a run, which handles it, ends the process at once with 75,
    as there is nothing to save. Runs eagerly, on the host.

    Raises:
      SystemExit: With a code of `errors.EXIT_CODES`, after an error that explains itself.
    """
    # Only the main thread can set handlers.
    is_main = threading.current_thread() is threading.main_thread()
    sets_handler = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if sets_handler:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except Exception as error:
        explanation = find_trainer_kit_error(error)
        if explanation is None:
            raise
        raise SystemExit(int(print_error(explanation))) from error
    finally:
        if sets_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM outside of a run: ends the process."""
    # The program may be in the middle of a print.
    with contextlib.suppress(Exception):
        sys.stdout.flush()

    # An exception could be lost in a library. What was begun outside of a run, the next start does
    # again.
    os.write(2, b"stopped by SIGTERM; there was nothing to save; start the job again\n")
    os._exit(ExitCode.PREEMPTED)

"""A process that has imported TensorFlow and forks a child for each run, which starts in 0.1 s.

It is the standard library's fork server. No op may run before the fork: TensorFlow starts its
threads with the first op, and a child would not have them.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from types import TracebackType
from typing import Any, ClassVar

from trainer_kit.errors import UsageError

TRAIN = "train"
_PRELOADED = "tests.preloaded"
_LAST_WAIT = 30.0  # seconds for a child to end that was killed

# An exit code can be read once: of two threads that ask at the same moment, a start included, one
# gets a wrong one.
_ASKING = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
      code: The exit code, or minus the number of the signal that ended the child.
      text: The text that the child wrote to its standard output and error.
      seconds: The time from start to end.
    """

    code: int
    text: str
    seconds: float


class Child:
    """A run that was started in its own process and session.

    Attributes:
      pid: The id of the process.
    """

    def __init__(self, process: Any, output: str) -> None:
        self._process = process
        self._output = output
        self._begin = time.monotonic()
        self.pid = int(process.pid)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        with _ASKING:
            return bool(self._process.is_alive())

    @property
    def text(self) -> str:
        """The text that the child has written so far to its standard output and error."""
        with (
            contextlib.suppress(OSError),
            open(self._output, encoding="utf-8", errors="replace") as stream,
        ):
            return stream.read()
        return ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the child; does nothing if it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float = 120.0) -> Ended:
        """Waits for the child and returns how it ended.

        Raises:
          TimeoutError: when it has not ended within `timeout` seconds; the message has the text
            that it wrote.
        """
        connection.wait([self._process.sentinel], timeout)
        if self.alive:
            raise TimeoutError(
                f"process {self.pid} has not ended within {timeout:g} s; it has written:\n"
                f"{self.text}"
            )
        return Ended(self._process.exitcode, self.text, time.monotonic() - self._begin)


class ForkServer:
    """Starts runs; at the end of the `with` block, those that still run are killed. The server ends
    with this process.

    Args:
      preload: Modules that the server imports in addition to TensorFlow, Keras and trainer_kit, if
        it does not run yet. They may not run an op.
      needs: Further modules, which take seconds to import: a running server without one of them is
        replaced by a new one, so no run of an earlier ForkServer may be left.
    """

    _needed: ClassVar[list[str]] = []  # what the server has imported of what was needed
    _runs: ClassVar[bool] = False  # whether the server was started here

    def __init__(self, preload: Sequence[str] = (), *, needs: Sequence[str] = ()) -> None:
        self._preload = [_PRELOADED, *preload]
        self._needs = needs
        self._children: list[Child] = []
        self._numbers = itertools.count()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> ForkServer:
        self._folder = self._open.enter_context(
            tempfile.TemporaryDirectory(prefix="trainer_kit_runs_")
        )
        self._context = multiprocessing.get_context("forkserver")
        if missing := [name for name in self._needs if name not in self._needed]:
            self._needed.extend(missing)
            if self._runs:
                _end_server(self._context)
        self._context.set_forkserver_preload([*self._preload, *self._needed])
        with _quiet_tensorflow():
            forkserver.ensure_running()
        ForkServer._runs = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait(_LAST_WAIT)
        self._open.close()

    def start(
        self, function: str | Callable[..., Any], *arguments: Any, folder: str | None = None
    ) -> Child:
        """Starts a run.

        Args:
          function: "train" for `python -m trainer_kit.train ARGUMENTS`; else what can be pickled,
            whose exit code is that of the SystemExit it raises, 1 after another exception, else 0.
          *arguments: of the command or the function.
          folder: The working directory of the run; None means that of this process.

        Raises:
          UsageError: when `function` is a text other than "train".
        """
        if isinstance(function, str) and function != TRAIN:
            raise UsageError(f"{function!r} is not a run; give {TRAIN!r} or a function")
        output = os.path.join(self._folder, f"{next(self._numbers)}.txt")
        process = self._context.Process(
            target=_run, args=(output, folder, function, arguments), daemon=False
        )
        with _ASKING:
            process.start()
        child = Child(process, output)
        self._children.append(child)
        return child

    def run(
        self,
        function: str | Callable[..., Any],
        *arguments: Any,
        timeout: float = 120.0,
        folder: str | None = None,
    ) -> Ended:
        """Starts a run, and returns how it ended; after `timeout` seconds it is killed.

        Raises:
          TimeoutError: when it has not ended by then.
        """
        child = self.start(function, *arguments, folder=folder)
        try:
            return child.wait(timeout)
        finally:
            child.kill()


def train(*arguments: str) -> None:
    """Does what `python -m trainer_kit.train ARGUMENTS` does, in this process.

    Raises:
      SystemExit: with the exit code of the command.
    """
    sys.argv = ["trainer_kit.train", *arguments]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module("trainer_kit.train", run_name="__main__", alter_sys=True)


def _run(
    output: str, folder: str | None, function: str | Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """In the child: a session of its own, output to a file, then the function."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    if folder is not None:
        os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(function, str):
        function = train
    function(*arguments)


def _end_server(context: Any) -> None:
    """Ends the fork server of this process; multiprocessing starts another for the next child."""
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_tell_parent, args=(there,))
    child.start()
    there.close()
    server = here.recv()
    child.join()
    os.kill(server, signal.SIGTERM)
    # Multiprocessing itself asks for the exit code.
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def _tell_parent(pipe: Any) -> None:
    """In a child: tells the process that has forked it, which is the server."""
    pipe.send(os.getppid())


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    """For the server that is started inside: TensorFlow reads the variable when it is imported."""
    name = "TF_CPP_MIN_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "2")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]

"""`python -m trainer_kit.sweep_worker` runs the trials that `trainer-kit sweep` sends to it in turn.

Wiring only. Each trial is a run of `python -m trainer_kit.train` with the flags that arrive.
"""

from __future__ import annotations

if __name__ == "__main__":
    from trainer_kit.process.startup_signals import install_exit_handlers

    # This comes before the other imports, which take seconds.
    install_exit_handlers()

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import ExitCode
from trainer_kit.files import follow_links
from trainer_kit.process.error_report import format_reason, print_error
from trainer_kit.run.flags import parse_flags
from trainer_kit.sweeps.worker_process import Ended, Evaluated
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.train import prepare_run


class ReportToSweep(Callback):
    """Reports each value of a metric to the sweep, and ends the run if the sweep answers so.

    Args:
      connection: The connection to the sweep.
      metric: The metric. `a|b` is the metric b of the validation set a.
    """

    name = "sweep"

    def __init__(self, connection: Connection, metric: str) -> None:
        self._connection = connection
        self._metric = metric

    def evaluation_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Reports the value. An evaluation of another validation set has none."""
        value = flatten_scalars(logs, "|").get(self._metric)
        if value is None:
            return
        try:
            self._connection.send(Evaluated(run.step, float(value)))
            ends_trial = self._connection.recv()
        except (EOFError, OSError):
            # The sweep is being stopped, and so is this process.
            return
        if ends_trial:
            run.stop(f"the sweep has pruned this trial at {self._metric} {value:.6g}")


def run_trial(arguments: Sequence[str], callback: Callback) -> Ended:
    """Runs a trial in this process, and removes what it leaves there.

    Args:
      arguments: The flags of `python -m trainer_kit.train`.
      callback: What reports its evaluations.
    """
    ended = Ended(ExitCode.DONE, "")
    model_dir = None
    try:
        # manifest.json records the command that runs this trial alone.
        sys.argv = ["trainer_kit/train.py", *arguments]
        values = parse_flags(sys.argv)
        values.model_dir = follow_links(values.model_dir)
        model_dir = values.model_dir
        prepare_run(values)(callbacks=[callback])
    except (Exception, SystemExit) as error:
        exit_code = print_error(error, model_dir=model_dir)
        ended = Ended(exit_code, format_reason(error)[0])

    # After the block, whose error would keep the run in memory. `prepare_run` has frozen objects.
    import keras

    keras.utils.clear_session()
    gc.unfreeze()
    gc.collect()
    return ended


def end_with_sweep() -> None:
    """Ends this process at once when the process of the sweep is gone. Runs in a thread."""
    sys.stdin.buffer.read()
    os._exit(ExitCode.PREEMPTED)


def main(descriptor: int, cores: Sequence[int]) -> int:
    """Runs trials until the sweep closes the connection, or a signal stops one.

    Args:
      descriptor: The file descriptor of the connection to the sweep.
      cores: The CPU cores to use.
    """
    # Before TensorFlow is imported, which counts the cores.
    os.sched_setaffinity(0, cores)
    os.set_inheritable(descriptor, False)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("trainer_kit").setLevel(logging.INFO)
    threading.Thread(target=end_with_sweep, name="end-with-sweep", daemon=True).start()

    connection = Connection(descriptor)
    exit_code: int = ExitCode.DONE
    while exit_code not in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        try:
            arguments, metric = connection.recv()
            ended = run_trial(arguments, ReportToSweep(connection, metric))
            connection.send(ended)
        except (EOFError, OSError):
            return ExitCode.DONE
        exit_code = ended.exit_code
    return exit_code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [int(core) for core in sys.argv[2].split(",")]))

"""`python -m trainer_kit.sweep_worker` runs the trials that `trainer-kit sweep` sends to it.

Wiring only. Each trial is a run of `python -m trainer_kit.train` with the flags that arrive.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import ExitCode
from trainer_kit.process.error_report import format_reason, print_error
from trainer_kit.run.flags import parse_flags
from trainer_kit.sweeps.trial_runner import PRUNED, Ended, Evaluated
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.train import prepare_run


class ReportToSweep(Callback):
    """Reports the metric that decides to the sweep, and ends the run if the sweep answers so.

    Args:
      connection: The connection to the sweep.
    """

    name = "sweep"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def evaluation_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        """Reports the value. An evaluation of another validation set has none."""
        metric = run.trainer.config.trainer.best_checkpoint_eval_metric
        scalars = flatten_scalars(logs, "|")
        if metric not in scalars:
            return
        evaluation = Evaluated(run.step, scalars[metric])
        self._connection.send(evaluation)
        is_pruned = self._connection.recv()
        if is_pruned:
            run.stop(PRUNED)


def run_trial(arguments: Sequence[str], callback: Callback) -> Ended:
    """Runs a trial in this process, and removes what it leaves there.

    Args:
      arguments: The flags of `python -m trainer_kit.train`.
      callback: What reports its evaluations.
    """
    # manifest.json records the command that runs this trial alone.
    sys.argv = ["trainer_kit/train.py", *arguments]
    values = parse_flags(sys.argv)
    ended = Ended(ExitCode.DONE, "")
    try:
        run = prepare_run(values)
        run(callbacks=[callback])
    except (Exception, SystemExit) as error:
        exit_code = print_error(error, model_dir=values.model_dir)
        lines = format_reason(error)
        ended = Ended(exit_code, lines[0])

    # After the block, whose error would keep the run in memory. `prepare_run` has frozen objects.
    import keras

    keras.utils.clear_session()
    gc.unfreeze()
    gc.collect()
    return ended


def end_with_sweep(descriptor: int) -> None:
    """Ends this process at once when the process of the sweep is gone. Runs in a thread."""
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    poll.poll()
    os._exit(ExitCode.PREEMPTED)


def main(descriptor: int) -> None:
    """Runs trials until the sweep closes the connection.

    Args:
      descriptor: The file descriptor of the connection to the sweep.
    """
    os.set_inheritable(descriptor, False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("trainer_kit").setLevel(logging.INFO)
    threading.Thread(target=end_with_sweep, args=[descriptor], daemon=True).start()

    connection = Connection(descriptor)
    # The connection ends with the sweep.
    with contextlib.suppress(EOFError):
        while True:
            flags = connection.recv()
            callback = ReportToSweep(connection)
            ended = run_trial(flags, callback)
            connection.send(ended)


if __name__ == "__main__":
    main(descriptor=int(sys.argv[1]))

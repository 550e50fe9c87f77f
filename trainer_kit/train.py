"""`python -m trainer_kit.train` turns flags into a config and runs it. Wiring only.

Mistakes in flags, files and config are reported before TensorFlow is imported.
"""

from __future__ import annotations

if __name__ == "__main__":
    from trainer_kit.process.startup_signals import install_exit_handlers

    # This comes before the other imports, which take seconds.
    install_exit_handlers()

import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

from absl import flags

from trainer_kit.config.experiment_registry import lookup_task_class
from trainer_kit.config.modes import MODES
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import get_operative_gin_config, run_gin_second_pass
from trainer_kit.errors import ExitCode
from trainer_kit.files import expand_argument, follow_links
from trainer_kit.process.environment import prepare_environment
from trainer_kit.process.error_report import print_error
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.startup_signals import record_exit_code
from trainer_kit.run.flag_texts import format_help_text
from trainer_kit.run.flags import (
    build_request,
    format_attempt_flags,
    format_first_attempt_flags,
    parse_flags,
)
from trainer_kit.run.preflight import check_request
from trainer_kit.run.supervisor import supervise
from trainer_kit.runtime.tf_config import read_worker_index

_LOG = logging.getLogger("trainer_kit")


class _CurrentStderr:
    """Writes to the current sys.stderr, which the progress display replaces while it draws."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def prepare_run(values: flags.FlagValues) -> Callable[..., Any]:
    """Returns a function that runs the experiment. It takes further options of `launch`.

    Imports TensorFlow after the config is checked.
    """
    # Imports take seconds, in which somebody who watches would see nothing.
    if sys.stderr.isatty():
        _LOG.info("reading the config and importing TensorFlow ...")
    resolved = check_request(build_request(values))

    # The imports make half a million objects that stay. To collect garbage among them, now and at
    # the end of the process, would take a quarter of the start of a run.
    gc.disable()
    from trainer_kit.run.launcher import launch

    task_class = lookup_task_class(resolved.config.task)
    gc.freeze()
    gc.enable()
    # Somebody may have forgotten to import an own experiment of the same name.
    if task_class.__module__.startswith("trainer_kit.experiments."):
        _LOG.info("the experiment %s comes with trainer_kit", values.experiment)

    return functools.partial(
        launch,
        resolved.config,
        values.mode,
        values.model_dir,
        before_task=lambda: run_gin_second_pass(values.gin_file, values.gin_params),
        experiment=values.experiment,
        checkpoint=values.checkpoint,
        eval_name=values.eval_name,
        allow_config_change=values.allow_config_change,
        from_step=values.from_step,
        allow_partial_restore=values.allow_partial_restore,
        profile=values.profile,
        records=lambda: {f"operative_config.{values.mode}.gin": get_operative_gin_config()},
    )


def run_supervised(values: flags.FlagValues) -> int:
    """Runs the same flags under a supervisor, and returns its exit code.

    After a mistake in the flags it starts no attempt.
    """
    resolved = check_request(build_request(values))
    return supervise(
        [sys.executable, "-m", "trainer_kit.train", *format_attempt_flags(values)],
        max_restarts=values.max_restarts,
        log_dir=get_attempts_dir(values, resolved.config),
        first_attempt_arguments=format_first_attempt_flags(values),
        run_dir=values.model_dir,
    )


def get_attempts_dir(values: flags.FlagValues, config: ExperimentConfig) -> str:
    """Returns the folder of the supervisor's attempts.jsonl.

    Each process that shares a model_dir has a separate one. It is model_dir for the process that
    trains there, and for the first of its workers. A process that only evaluates has
    model_dir/evals/<name>/. Other workers have workers/<number>/ in the folder of the first one.
    """
    folder: str = values.model_dir
    if not MODES[values.mode].trains:
        name = "eval" if values.mode == "eval" else values.eval_name
        folder = RunDirectory(folder, config.trainer, name).output_dir
    number = read_worker_index(config.runtime.worker_hosts, config.runtime.task_index)
    return os.path.join(folder, "workers", str(number)) if number else folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Prints errors in a few lines."""
    argv = list(map(expand_argument, sys.argv if argv is None else argv))
    stderr = cast(TextIO, _CurrentStderr())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=stderr)
    logging.getLogger("trainer_kit").setLevel(logging.INFO)

    # The values for mistakes in the flags themselves.
    debug = "--debug" in argv
    model_dir = None
    try:
        prepare_environment()
        values = parse_flags(argv)
        # Links are followed once, before any code of the user runs.
        values.model_dir = follow_links(values.model_dir)
        debug = values.debug
        model_dir = values.model_dir
        if values.help:
            print(format_help_text())
        elif values.max_restarts:
            return run_supervised(values)
        else:
            prepare_run(values)()
    except (Exception, SystemExit) as error:
        return print_error(error, debug=debug, model_dir=model_dir)
    except KeyboardInterrupt:
        print("stopped by SIGINT; there was nothing to save", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


if __name__ == "__main__":
    code = record_exit_code(main())
    train_data = sys.modules.get("trainer_kit.inputs.train_data")
    if train_data is not None and train_data.is_still_saving():
        # All is done, but Python's exit would wait for the save.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

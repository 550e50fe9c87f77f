"""`trainer-kit VERB ...` finds the verb and runs it.

It turns explained errors into messages and exit codes.

TensorFlow is imported only by verbs that need it, when they run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from trainer_kit import __version__
from trainer_kit.cli import (
    best,
    check,
    checkpoint_average,
    checkpoint_diff,
    checkpoint_list,
    checkpoint_rename,
    evals,
    export,
    init_project,
    list_names,
    predict,
    show,
    tensorboard,
)
from trainer_kit.cli.doctor import doctor_data, doctor_learning_rate, doctor_resume
from trainer_kit.cli.runs import compare_runs, list_runs, run_sweep
from trainer_kit.cli.stop_signals import StopSignalHandler
from trainer_kit.errors import EXIT_CODES, ExitCode, find_similar_names
from trainer_kit.files import expand_argument
from trainer_kit.process.environment import prepare_environment
from trainer_kit.process.error_report import print_error, print_to_stderr
from trainer_kit.process.startup_signals import get_signal_exit_code

VERBS = {
    "init": init_project,
    "list": list_names,
    "show": show,
    "check": check,
    "runs": list_runs,
    "compare": compare_runs,
    "sweep": run_sweep,
    "evals": evals,
    "best": best,
    "export": export,
    "predict": predict,
    "tensorboard": tensorboard,
}

# The checks of the verb `doctor`.
CHECKS = {
    "resume": doctor_resume,
    "learning_rate": doctor_learning_rate,
    "data": doctor_data,
}

# The commands of the verb `checkpoint`.
CHECKPOINTS = {
    "list": checkpoint_list,
    "diff": checkpoint_diff,
    "average": checkpoint_average,
    "rename": checkpoint_rename,
}
_TRAIN = "Runs an experiment. It is the program python -m trainer_kit.train."
_CHECKPOINT = "Lists, compares, averages and renames the variables of checkpoints, of any program."
_DOCTOR = "Tries a question on your experiment: exact resume, the learning rate, or the data."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name near commands and near options.

    The errors of Python's own parser name near commands from 3.14 on.
    """

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and ends the process with exit code 2."""
        match = re.search(
            r"(?:invalid choice: '|unrecognized arguments:.*? (?=--))([^'= ]+)", message
        )
        if match:
            _, _, choices_text = message.partition("choose from")
            choices = re.findall(r"[\w-]+", choices_text)
            names = choices or re.findall(r"--\w+", self.format_help())
            similar_names = find_similar_names(match[1], names)
            if similar_names:
                suggestion = " or ".join(similar_names)
                message = f"{message}; did you mean {suggestion}?"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    lines = []
    for code, meaning in EXIT_CODES.items():
        lines.append(f"  {code.value:>3}  {meaning}")
    codes = "\n".join(lines)
    parser = _Parser(
        prog="trainer-kit",
        description=(
            "Machine-learning experiments on TensorFlow. To run one: trainer-kit train --help"
        ),
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trainer_kit {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    # It is listed here, and runs in trainer_kit/__main__.py.
    train = verbs.add_parser("train", help=_TRAIN, add_help=False)
    train.set_defaults(parser=train)
    _add_parsers(verbs.add_parser, VERBS)

    # The verbs that have commands.
    for verb, text, inner_name, modules in (
        ("checkpoint", _CHECKPOINT, "command", CHECKPOINTS),
        ("doctor", _DOCTOR, "check", CHECKS),
    ):
        command = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        inner_commands = command.add_subparsers(
            dest=inner_name, required=True, metavar=inner_name.upper()
        )
        _add_parsers(inner_commands.add_parser, modules)
    return parser


def _add_parsers(
    add_parser: Callable[..., argparse.ArgumentParser], modules: dict[str, ModuleType]
) -> None:
    """Adds a parser for each module, including the arguments that all commands take."""
    for name, module in modules.items():
        help_text = (module.__doc__ or "").split("\n")[0]
        command = add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        add_common_arguments(command)
        command.set_defaults(run=module.run, parser=command)


def add_common_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the argument that all verbs take."""
    command.add_argument(
        "--debug", action="store_true", help="Prints the whole traceback of an error."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    # argparse itself takes the paths of `show` only before the flags.
    texts = map(expand_argument, sys.argv[1:] if argv is None else argv)
    arguments, rest = build_parser().parse_known_args(list(texts))
    if rest:
        has_flags = any(text.startswith("-") for text in rest)
        if has_flags or not hasattr(arguments, "paths"):
            arguments.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.paths += rest

    with StopSignalHandler() as stops:
        try:
            prepare_environment()
            code = int(arguments.run(arguments))
            # A reader that is gone is noticed here, and not when Python ends.
            sys.stdout.flush()
            return code
        except BaseException as error:
            if stops.received_signal is not None:
                print_to_stderr(f"stopped by {stops.received_signal.name}")
                return get_signal_exit_code(stops.received_signal)
            if isinstance(error, BrokenPipeError):
                return _handle_broken_pipe(arguments)
            if not isinstance(error, (Exception, SystemExit)):
                raise
            return print_error(error, debug=arguments.debug)


def _handle_broken_pipe(arguments: argparse.Namespace) -> int:
    """Ends a verb whose output is no longer read, as with `| head`, and returns its exit code.

    For a verb that only shows something this is no failure: the code is 0. A verb that checks or
    writes something has not finished: the code is 141, that of a program ended by SIGPIPE.
    """
    # Python flushes both streams when it exits.
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null_device, stream.fileno())
    checks = arguments.verb in ("check", "doctor", "sweep")
    writes = getattr(arguments, "output", "")
    shows = not checks and not writes
    return ExitCode.DONE if shows else 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())

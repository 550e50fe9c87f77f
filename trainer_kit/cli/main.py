"""`trainer-kit VERB ...`: finds the verb, runs it, and turns explained errors into messages and exit codes.

TensorFlow is imported only by verbs that need it, when they run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from trainer_kit import __version__
from trainer_kit.cli import best, check, doctor, evals, list_experiments, show, watch
from trainer_kit.cli.stop_signals import Stops
from trainer_kit.errors import EXIT_CODES, ExitCode
from trainer_kit.process.deferred_imports import defer_imports
from trainer_kit.process.error_report import print_error, print_line
from trainer_kit.process.startup import exit_code

VERBS = {
    "list": list_experiments,
    "show": show,
    "check": check,
    "watch": watch,
    "evals": evals,
    "best": best,
    "doctor": doctor,
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command."""
    codes = "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    whole = argparse.ArgumentParser(
        prog="trainer-kit",
        description="Machine-learning experiments on TensorFlow. To run one: python -m trainer_kit.train --help",
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"trainer_kit {__version__}")
    verbs = whole.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        help_text = (module.__doc__ or "").split("\n")[0]
        verb = verbs.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        module.add_arguments(verb)
        verb.add_argument("--import_module", action="append", default=[], metavar="MODULE",
                          help="module or .py file that registers experiments; may be repeated")  # fmt: skip
        verb.add_argument("--debug", action="store_true", help="print the whole traceback of an error")
        verb.set_defaults(run=module.run)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    defer_imports()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = parser().parse_args(argv)
    with Stops() as stops:
        try:
            code = int(arguments.run(arguments))
            sys.stdout.flush()
            return code
        except BaseException as error:
            if stops.received is not None:
                print_line(f"stopped by {stops.received.name}")
                return exit_code(stops.received)
            if isinstance(error, BrokenPipeError):
                return _unread(arguments)
            if not isinstance(error, (Exception, SystemExit)):
                raise
            return print_error(error, debug=arguments.debug)


def _unread(arguments: argparse.Namespace) -> int:
    """Ends a verb whose output nobody reads any more, as after `| head`; returns its exit code.

    For a verb that only shows something this is no failure: 0, however much of it fitted into the pipe. One that
    checks or writes something has not done so: 141, as of a tool that SIGPIPE has ended.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # Python writes what is left of them at its end
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nothing, stream.fileno())
    shows = arguments.verb not in ("check", "doctor") and not getattr(arguments, "recompute", False)
    return ExitCode.DONE if shows else 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())

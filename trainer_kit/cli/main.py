"""`trainer-kit VERB ...`: finds the verb, runs it, and turns explained errors into messages and exit codes.

TensorFlow is imported only by verbs that need it, when they run.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from trainer_kit import __version__
from trainer_kit.cli import best, check, doctor, evals, list_experiments, show, watch
from trainer_kit.deferred_imports import defer_imports
from trainer_kit.errors import EXIT_CODES, ExitCode, TrainerKitError

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
        verb.add_argument("--debug", action="store_true", help="show tracebacks of errors that are explained")
        verb.set_defaults(run=module.run)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    defer_imports()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TrainerKitError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())

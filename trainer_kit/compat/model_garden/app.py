"""absl's app for programs that are ported: errors that explain themselves are one line, with their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app

from trainer_kit.errors import explained


def run(main: Callable[[list[str]], Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the flags, calls `main`, and ends the process; as absl.app.run, but for errors of trainer_kit.

    Those end it with one line and their exit code, which supervisors and clusters go by: 75 after a preemption, 2 for a
    mistake. All others stay tracebacks.

    Args:
      main: called with the command's name and its positional arguments.
      argv: the command line; None: sys.argv.
    """

    def told(arguments: list[str]) -> Any:
        try:
            return main(arguments)
        except Exception as error:
            mistake = explained(error)
            if mistake is None:
                raise
            print(f"error: {mistake}", file=sys.stderr)
            return int(mistake.exit_code)

    sys.exit(app.run(told, argv))

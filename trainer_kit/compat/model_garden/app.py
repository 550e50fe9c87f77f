"""absl's app for ported programs: errors of trainer_kit have one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app

from trainer_kit.errors import find_trainer_kit_error


def run(main: Callable[[list[str]], object], argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the flags, calls `main`, and ends the process, as absl.app.run does.

    Only errors of trainer_kit differ: they end the process with one line and their exit code, which
    supervisors and clusters read: 75 after a preemption, 2 for a mistake. All other errors end with
    a traceback.

    Args:
      main: Called with a list of the command's name and its positional arguments.
      argv: The command line. None: sys.argv.
    """

    def explained_main(arguments: list[str]) -> object:
        try:
            return main(arguments)
        except Exception as error:
            mistake = find_trainer_kit_error(error)
            if mistake is None:
                raise
            print(f"error: {mistake}", file=sys.stderr)
            # absl ends the process with what main returns.
            return int(mistake.exit_code)

    sys.exit(app.run(explained_main, argv))

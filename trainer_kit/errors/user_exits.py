"""Turns a SystemExit of the user's code into an error.

So the SystemExit does not choose the exit code of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainer_kit.errors import TrainerKitError
from trainer_kit.errors.user_frames import find_autograph_function, find_user_frames


def build_exit_error(error: SystemExit) -> TrainerKitError:
    """Returns an error that names the deepest line of the user's code, which ended the program.

    In a function that AutoGraph has translated the line is not known, so the error names the
    function.
    """
    user_frames = find_user_frames(error)
    function = find_autograph_function(error)
    if function:
        place = f"your code, in {function},"
    elif user_frames:
        deepest = user_frames[-1]
        place = f"{deepest.file}:{deepest.line}: this line"
    else:
        place = "your code"

    exit_error = TrainerKitError(
        f"{place} ends the program ({error!r}); raise an error there, or, to end a run early,"
        " let an action raise trainer_kit.StopTraining"
    )
    exit_error.__cause__ = error
    return exit_error


@contextlib.contextmanager
def convert_system_exit() -> Iterator[None]:
    """Raises a TrainerKitError instead of a SystemExit of the block."""
    try:
        yield
    except SystemExit as error:
        raise build_exit_error(error) from error

"""Turns a SystemExit of the user's code into an error, so that it does not choose the exit code of the program."""

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
    users = find_user_frames(error)
    if function := find_autograph_function(error):
        place = f"your code, in {function},"
    else:
        place = f"{users[-1].file}:{users[-1].line}: this line" if users else "your code"
    explained = TrainerKitError(
        f"{place} ends the program ({error!r}); raise an error there, or, to end a run early, let"
        " an action raise trainer_kit.StopTraining"
    )
    explained.__cause__ = error
    return explained


@contextlib.contextmanager
def convert_system_exit() -> Iterator[None]:
    """Raises a TrainerKitError instead of a SystemExit of the block."""
    try:
        yield
    except SystemExit as error:
        raise build_exit_error(error) from error

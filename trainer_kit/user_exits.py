"""A SystemExit that a user's code raises is an error like others: it does not choose the exit code of the program."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from trainer_kit.errors import TrainerKitError
from trainer_kit.user_frames import user_frames


def exit_error(error: SystemExit) -> TrainerKitError:
    """Returns the error that says which line has ended the program: the deepest one of the user's own code."""
    users = [f"{frame.file}:{frame.line}" for frame in user_frames(error)]
    others = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    place = (users or others or ["your code"])[-1]
    explained = TrainerKitError(
        f"{place}: this line ends the program ({error!r}); raise an error there, or, to end a run early, let an action "
        "raise trainer_kit.StopTraining"
    )
    explained.__cause__ = error
    return explained


@contextlib.contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raises a TrainerKitError in the place of a SystemExit of the code inside."""
    try:
        yield
    except SystemExit as error:
        raise exit_error(error) from error

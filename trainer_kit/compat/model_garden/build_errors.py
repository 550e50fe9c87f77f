"""Reports Model Garden's errors with the path of the config section that was in use."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.errors import DataError, TrainerKitError, UsageError, add_note
from trainer_kit.errors.user_frames import find_user_frames
from trainer_kit.process.error_report import format_reason

_DOWNLOADERS = ("/tensorflow_datasets/", "/tensorflow_hub/")
# The words of Model Garden's input reader.
_NO_FILES = "does not match any files"


@contextlib.contextmanager
def explain_config_errors(path: str) -> Iterator[None]:
    """A context in which Model Garden's errors name the section of the config that is in use.

    An error of the user's own code keeps its traceback, and gets a note.

    Args:
      path: The dotted path of the section: "task", "task.model", "task.train_data", ...

    Raises:
      DataError: When a file does not exist, or TensorFlow Datasets or TensorFlow Hub cannot provide
        the data.
      UsageError: When a package is missing, or Model Garden fails.
    """
    try:
        yield
    except TrainerKitError:
        raise
    except (FileNotFoundError, tf.errors.NotFoundError) as error:
        raise DataError(f"{path}: {format_reason(error)[0]}") from error
    except ImportError as error:
        raise UsageError(
            f"{path}: a package is missing: {format_reason(error)[0]}; install it"
        ) from error
    except Exception as error:
        frames = find_user_frames(error)
        file = ""
        if frames:
            file = frames[-1].file
        is_of_downloader = any(package in file for package in _DOWNLOADERS)
        if is_of_downloader or _NO_FILES in str(error):
            raise DataError(f"{path}: {format_reason(error)[0]}") from error

        # Without code of the user, an error in Model Garden is nearly always about a value.
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        raises_itself = (last_frame.line or "").startswith(("raise ", "assert "))
        is_on_purpose = "/official/" in last_frame.filename and raises_itself
        if is_on_purpose or "/official/" in file:
            raise UsageError(
                f"{path}: Model Garden refuses its values: {format_reason(error)[0]}"
            ) from error
        add_note(error, f"this happened in the use of the section {path} of the config")
        raise

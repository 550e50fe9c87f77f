"""Finds the frames of the user's code that an error comes from, in its traceback or in its text.

TensorFlow runs a step long after Python has left it. The user's lines are then in the text of the
error: the stack in which the failed operation was created, the lines that AutoGraph has translated,
the traceback of a Python function in a tf.data pipeline. That text comes first; the traceback of
the error is used for all other errors.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_ERRORS_FOLDER = os.path.dirname(os.path.abspath(__file__))
# The folders of this package and of Python's libraries, with a slash at the end
_PACKAGE = os.path.dirname(_ERRORS_FOLDER) + os.sep
# They are written as those of users, and count as theirs.
_SHIPPED_EXPERIMENTS = os.path.join(_PACKAGE, "experiments", "")
_STANDARD = (
    os.path.join(sysconfig.get_path("stdlib"), ""),
    os.path.join(sysconfig.get_path("platstdlib"), ""),
)
_SITE_PACKAGES = ("/site-packages/", "/dist-packages/")
_FRAMEWORKS = {
    "tensorflow",
    "keras",
    "tf_keras",
    "orbit",
    "numpy",
    "absl",
    "gin",
    "pydantic",
    "wrapt",
    "six",
}
_FRAME_PATTERN = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\s,]+)')
_AUTOGRAPH_FILE = "__autograph_generated_file"


@dataclass(frozen=True)
class Frame:
    """One line of a stack.

    Attributes:
      file: The path of the file.
      line: The number of the line.
      function: The name of the function.
    """

    file: str
    line: int
    function: str

    @property
    def code(self) -> str:
        """The text of the line; "" if the file cannot be read."""
        text = linecache.getline(self.file, self.line)
        return text.strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


def find_user_frames(error: BaseException) -> list[Frame]:
    """Returns the frames of the user's code that `error` comes from, the deepest last.

    The user's code is neither installed nor part of Python or trainer_kit. If there is no such
    frame, code of installed packages counts, except TensorFlow, Keras and the packages that they
    use, since a task may be installed. The list is empty if no frame counts.
    """
    message = get_error_message(error)
    text_frames = parse_frames(message)
    traceback_frames = list(_traceback_frames(error))
    for is_users in (is_user_file, _is_installed):
        for frames in (text_frames, traceback_frames):
            user_frames = [frame for frame in frames if is_users(frame.file)]
            if user_frames:
                return user_frames
    return []


def is_user_file(file: str) -> bool:
    """Whether a source file is the user's: neither installed nor part of Python or trainer_kit.

    Experiments that come with trainer_kit count as the user's.
    """
    if file.startswith(_SHIPPED_EXPERIMENTS):
        return True
    if (
        file.startswith((_PACKAGE, *_STANDARD))
        or _AUTOGRAPH_FILE in file
        or any(part in file for part in _SITE_PACKAGES)
    ):
        return False
    if os.path.isfile(file):
        return True
    # A notebook's cell has known lines without a file; "<string>" and compiled modules have none.
    return file in linecache.cache and not file.startswith("<")


def parse_frames(text: str) -> list[Frame]:
    """Returns the frames in the text of an error, the deepest last."""
    frames = []
    for file, line, name in _FRAME_PATTERN.findall(text):
        frame = Frame(file, int(line), name)
        frames.append(frame)
    return frames


def parse_user_frames(text: str) -> list[Frame]:
    """Returns the frames in the text of an error that belong to the user's code."""
    return [frame for frame in parse_frames(text) if is_user_file(frame.file)]


def select_user_frames(stack: Iterable[Any]) -> list[Frame]:
    """Returns the frames of the user's code in a stack.

    The stack contains frame summaries of Python or TensorFlow.
    """
    return [
        Frame(summary.filename, summary.lineno, summary.name or "<lambda>")
        for summary in stack
        if is_user_file(summary.filename)
    ]


def caller_location(modules: Collection[str]) -> str:
    """Returns file and line of the code that called into `modules`; "" if it is not the user's."""
    inner_modules = (__name__, *modules)
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        module = frame.f_globals.get("__name__")
        if module not in inner_modules:
            return f"{path}:{line}" if is_user_file(path) else ""
    return ""


def find_autograph_function(error: BaseException) -> str | None:
    """Returns the name of the user's function that `error` comes from.

    None unless AutoGraph has translated the function. AutoGraph adds the user's lines to the text
    of an Exception, not to that of a SystemExit.
    """
    frames = [
        frame
        for frame in _traceback_frames(error)
        if _AUTOGRAPH_FILE in frame.file or is_user_file(frame.file)
    ]
    if not frames:
        return None
    deepest = frames[-1]
    if _AUTOGRAPH_FILE not in deepest.file:
        return None
    return deepest.function.removeprefix("tf__")


def find_package_frames(error: BaseException) -> list[Frame]:
    """Returns the frames of trainer_kit in the traceback of `error`, the deepest last."""
    return [frame for frame in _traceback_frames(error) if frame.file.startswith(_PACKAGE)]


def get_frame_locals(error: BaseException, frame: Frame) -> dict[str, Any]:
    """Returns the local variables of `frame` by name.

    Empty if Python had left the frame before the error.
    """
    names = {frame.function, f"tf__{frame.function}"}
    local_variables: dict[str, Any] = {}
    for python_frame, _ in _walk(error):
        # AutoGraph runs a translation of the function, from another file.
        code = python_frame.f_code
        is_same_file = code.co_filename == frame.file or _AUTOGRAPH_FILE in code.co_filename
        if code.co_name in names and is_same_file:
            local_variables = dict(python_frame.f_locals)
    return local_variables


def get_error_message(error: BaseException) -> str:
    """Returns the message of an error.

    For TensorFlow's errors it is the attribute `message`, which has no decoration.
    """
    message = getattr(error, "message", None)
    return message if isinstance(message, str) else str(error)


def _traceback_frames(error: BaseException) -> Iterator[Frame]:
    for frame, line in _walk(error):
        code = frame.f_code
        yield Frame(code.co_filename, line, code.co_name)


def _walk(error: BaseException) -> Iterable[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_installed(file: str) -> bool:
    parts = [part for part in _SITE_PACKAGES if part in file]
    if not parts or file.startswith(_PACKAGE) or not os.path.isfile(file):
        return False

    _, path_in_packages = file.rsplit(parts[0], 1)
    package = re.split(r"[/.]", path_in_packages, maxsplit=1)[0]
    return package not in _FRAMEWORKS

"""Prints the error that ends a command.

Of an explained error it prints the message, of any other error the user's line, the reason and the
shapes in 15 lines. The whole traceback goes to a file. Only commands print: in a program that calls
trainer_kit errors are exceptions.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping

from trainer_kit import files
from trainer_kit.errors import (
    ConfigError,
    ExitCode,
    InterruptedRunError,
    PreemptedError,
    StorageError,
    find_trainer_kit_error,
)
from trainer_kit.errors.user_exits import build_exit_error
from trainer_kit.errors.user_frames import (
    find_package_frames,
    find_user_frames,
    get_error_message,
    get_frame_locals,
)

LINES = 15

# The largest number of characters of a line.
_WIDTH = 300
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

# What a message of TensorFlow contains for its developers, and what replaces it.
_NOISE = (
    (re.compile(r"\{\{function_node [^}]*\}\} "), ""),
    (re.compile(r" for '\{\{node [^}]*\}\} = (\w+)[^']*'"), r" for the operation \1"),
    (re.compile(r" \[Op:\w+\]( name: \S*)?$"), ""),
    (re.compile(r"^\s*\(0\) [A-Z_]+:\s+"), ""),
)

# The beginnings of lines that do not give the reason of an error.
_NO_REASON = re.compile(
    r"(\w+: )?(in user code:|Graph execution error:|Detected at node|Traceback \(most recent|"
    r"<stack traces unavail|Exception encountered when calling|\d+ root error\(s\) found|"
    r"Error encountered:|Could not automatically infer the output shape)|[\s~^]*$"
)

# By words of TensorFlow's message.
_ADVICE = {
    "OOM when allocating": (
        "the device is out of memory: reduce task.train_data.global_batch_size, compute each batch"
        " in parts with trainer.accumulate_steps, or set runtime.mixed_precision_dtype=bfloat16"
    ),
    "Unable to lift tensor": (
        "the step creates a variable whose initial value depends on the step: create variables "
        "in build_model, and those of an optimizer with optimizer.build(variables)"
    ),
}
_END = re.compile(r"\n\s*\[\[|\n\s*Arguments received by")
_FRAME = re.compile(r'(\s*)File "')


def print_error(
    error: Exception | SystemExit, *, debug: bool = False, model_dir: str | None = None
) -> int:
    """Prints the error that ended a command to standard error, and returns the exit code.

    Of an explained error the message is printed. Any other error is described in at most LINES
    lines, and its traceback goes to `model_dir`/errors if a run is recorded there, else to the
    folder for temporary files. A SystemExit comes from the user's code, and its exit code is
    ignored: 0 would mean that the run is done, and 75 that it was preempted.

    Args:
      error: The error.
      debug: Whether to print the whole traceback instead of writing it to a file.
      model_dir: The folder of the run, if there is one.
    """
    if isinstance(error, SystemExit):
        error = build_exit_error(error)
    mistake = find_trainer_kit_error(error)
    if debug:
        traceback.print_exception(error)

    if mistake is not None:
        # The notes of a config error name the code that set the wrong values.
        notes: list[str] = []
        for cause in (mistake, mistake.__cause__):
            if isinstance(cause, ConfigError):
                notes += getattr(cause, "__notes__", ())
        # The run can be started again, and nothing has to be corrected.
        is_stop = isinstance(mistake, (PreemptedError, InterruptedRunError))
        message = str(mistake) if is_stop else f"error: {mistake}"
        text = "\n  ".join([message, *notes])
        print_to_stderr(text)
        return mistake.exit_code

    place = "above" if debug else _save_traceback(error, model_dir)
    # The last line is the place of the traceback.
    description = list(_describe(error))
    lines = description[: LINES - 1]
    lines.append(f"  the whole traceback: {place}")
    text = "\n".join(lines)
    print_to_stderr(f"error: {text}")
    return ExitCode.BUG


def print_to_stderr(text: str) -> None:
    """Prints to standard error. Does nothing when its reader is gone, as after `2>&1 | head`."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def format_reason(error: BaseException) -> list[str]:
    """Returns the reason in one or two lines.

    They contain the error's type and its text without stacks, node names and colours.
    """
    message = _COLOURS.sub("", get_error_message(error))
    text = _END.split(message, maxsplit=1)[0]
    lines = []
    all_lines = text.splitlines()
    for line in _remove_stacks(all_lines):
        for pattern, replacement in _NOISE:
            line = pattern.sub(replacement, line)
        lines.append(line.strip())
    error_name = type(error).__name__
    if not lines:
        return [error_name]

    # The message of a wrapped error may begin with a type already.
    is_named = re.match(r"[\w.]+(Error|Exception|Warning|Interrupt|Stop): ", lines[0])
    if not is_named:
        lines[0] = f"{error_name}: {lines[0]}"
    return lines[:2]


def _describe(error: BaseException) -> Iterator[str]:
    frames = find_user_frames(error)
    package_frames = find_package_frames(error)
    last_frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_raised_here = False
    if package_frames and last_frames:
        is_raised_here = package_frames[-1].file == last_frames[0].filename

    # Where the error came from.
    if frames:
        deepest_frame = frames[-1]
        yield str(deepest_frame)
        yield f"    {deepest_frame.code}"
    elif is_raised_here:
        yield "no line of your code is in this traceback, so it may be a bug in trainer_kit"
    else:
        yield "no line of your code is in this traceback; trainer_kit called the code that failed"

    # The reason.
    for line in format_reason(error):
        yield f"  {line}"[:_WIDTH]
    message = get_error_message(error)
    for words, advice in _ADVICE.items():
        if words in message:
            yield f"  {advice}"

    # The shapes, and the calls that led there.
    if frames:
        local_values = get_frame_locals(error, deepest_frame)
        if values := describe_values(local_values):
            yield f"  where {values}"[:_WIDTH]

        # The user's functions that called the deepest one.
        outer_frames = dict.fromkeys(frames[:-1])
        function = deepest_frame.function
        callers = [frame for frame in outer_frames if frame.function != function]
        last_callers = callers[-2:]
        for frame in reversed(last_callers):
            yield f"  called from {frame}: {frame.code}"[:_WIDTH]
    else:
        for frame in package_frames[-3:]:
            yield f"  {frame}: {frame.code}"[:_WIDTH]

    for note in getattr(error, "__notes__", ()):
        for line in note.splitlines():
            yield f"  {line}"[:_WIDTH]


def describe_values(values: Mapping[str, object]) -> str:
    """Returns names, dtypes and shapes of the values that contain arrays or tensors.

    The text looks like "x is float32 [20, 8], y is ...". It covers the first eight values.
    """
    phrases = []
    first_items = list(values.items())[:8]
    for name, value in first_items:
        if text := describe_structure(value):
            phrases.append(f"{name} is {text}")
    return ", ".join(phrases)


def describe_structure(value: object, depth: int = 0) -> str:
    """Returns structure, dtypes and shapes of nested tensors, arrays or their specs.

    Returns "" for any other value.
    """
    if isinstance(value, Mapping) and value and depth < 4:
        parts = []
        first_items = list(value.items())[:12]
        for key, part in first_items:
            text = describe_structure(part, depth + 1)
            if not text:
                return ""
            parts.append(f"{key}: {text}")
        joined_parts = ", ".join(parts)
        return f"{{{joined_parts}}}"
    if isinstance(value, (tuple, list)) and value and depth < 4:
        texts = [describe_structure(part, depth + 1) for part in value[:12]]
        if not all(texts):
            return ""
        joined_texts = ", ".join(texts)
        return f"({joined_texts})"

    dtype = getattr(value, "dtype", None)
    shape = getattr(value, "shape", None)
    if dtype is None or shape is None or callable(shape) or hasattr(value, "assign"):
        return ""
    name = getattr(dtype, "name", None) or str(dtype)
    if getattr(shape, "rank", 0) is None:
        return f"{name} [?]"
    sizes = ", ".join(str(size) for size in shape)
    return f"{name} [{sizes}]"


def _remove_stacks(lines: list[str]) -> Iterator[str]:
    """Yields the lines without frames, the code below frames, and announcements of a stack."""
    # The indentation of the current frame, whose code follows.
    frame_indentation: int | None = None
    for line in lines:
        text = line.lstrip()
        indentation = len(line) - len(text)
        if match := _FRAME.match(line):
            frame_indentation = len(match[1])
        elif _NO_REASON.match(text):
            continue
        elif frame_indentation is None or indentation <= frame_indentation:
            frame_indentation = None
            yield line


def _save_traceback(error: BaseException, model_dir: str | None) -> str:
    """Writes the whole traceback to a file and returns its path.

    Prints the traceback if no file can be written.
    """
    command = " ".join(sys.argv)
    lines = "".join(traceback.format_exception(error))
    text = f"command: {command}\n\n{lines}"
    now = time.strftime("%Y-%m-%dT%H-%M-%S")
    name = f"{now}-{os.getpid()}.txt"
    paths = [os.path.join(tempfile.gettempdir(), f"trainer_kit-error-{name}")]
    if model_dir:
        # A recorded run has this file.
        params_path = os.path.join(model_dir, "params.yaml")
        if os.path.exists(params_path):
            paths.insert(0, os.path.join(model_dir, "errors", name))
    for path in paths:
        with contextlib.suppress(StorageError):
            # The name of a folder may not be UTF-8.
            files.write_bytes(path, text.encode(errors="backslashreplace"), point="error")
            return path
    print(text, file=sys.stderr)
    return "above, because no file can be written"

"""Prints the error that ends a command: its message, or the user's line, the reason and the shapes in 15 lines.

The whole traceback goes to a file. Only commands print: in a program that calls trainer_kit errors
are exceptions.
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
from typing import Any

from trainer_kit import files
from trainer_kit.errors import ConfigError, ExitCode, StorageError, find_trainer_kit_error
from trainer_kit.errors.user_exits import build_exit_error
from trainer_kit.errors.user_frames import (
    find_package_frames,
    find_user_frames,
    get_error_message,
    get_frame_locals,
)

LINES = 15
_WIDTH = 300  # characters of a line
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NOISE = (
    (re.compile(r"\{\{function_node [^}]*\}\} "), ""),
    (re.compile(r" for '\{\{node [^}]*\}\} = (\w+)[^']*'"), r" for the operation \1"),
    (re.compile(r" \[Op:\w+\]( name: \S*)?$"), ""),
    (re.compile(r"^\s*\(0\) [A-Z_]+:\s+"), ""),
)
_NO_REASON = re.compile(
    r"(\w+: )?(in user code:|Graph execution error:|Detected at node|Traceback \(most recent|<stack"
    r" traces unavail|"
    r"Exception encountered when calling|\d+ root error\(s\) found|Error encountered:|"
    r"Could not automatically infer the output shape)|[\s~^]*$"
)
_ADVICE = {  # by words of TensorFlow's message
    "OOM when allocating": (
        "the device is out of memory: reduce task.train_data.global_batch_size or the model"
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
        causes = [cause for cause in (mistake, mistake.__cause__) if isinstance(cause, ConfigError)]
        notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
        print_to_stderr("\n  ".join([f"error: {mistake}", *notes]))
        return mistake.exit_code
    place = "above" if debug else _save_traceback(error, model_dir)
    lines = [*list(_describe(error))[: LINES - 1], f"  the whole traceback: {place}"]
    print_to_stderr("error: " + "\n".join(lines))
    return ExitCode.BUG


def print_to_stderr(text: str) -> None:
    """Prints to standard error; does nothing when its reader is gone, as after `2>&1 | head`."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def format_reason(error: BaseException) -> list[str]:
    """Returns the reason in one or two lines: the error's type and text without stacks, node names and colours."""
    text = _END.split(_COLOURS.sub("", get_error_message(error)), maxsplit=1)[0]
    found = [_remove_noise(line) for line in _remove_stacks(text.splitlines())]
    kind = type(error).__name__
    if not found:
        return [kind]
    named = re.match(r"[\w.]+(Error|Exception|Warning|Interrupt|Stop): ", found[0])
    return [found[0] if named else f"{kind}: {found[0]}", *found[1:2]]


def _describe(error: BaseException) -> Iterator[str]:
    frames = find_user_frames(error)
    ours = find_package_frames(error)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if frames:
        yield str(frames[-1])
        yield f"    {frames[-1].code}"
    elif ours and last and ours[-1].file == last[0].filename:
        yield "no line of your code is in this traceback, so it may be a bug in trainer_kit"
    else:
        yield "no line of your code is in this traceback; trainer_kit called the code that failed"
    yield from (f"  {line}"[:_WIDTH] for line in format_reason(error))
    yield from (
        f"  {advice}" for words, advice in _ADVICE.items() if words in get_error_message(error)
    )
    if frames:
        if values := describe_values(get_frame_locals(error, frames[-1])):
            yield f"  where {values}"[:_WIDTH]
        # The user's functions that called the deepest one.
        callers = [
            frame for frame in dict.fromkeys(frames[:-1]) if frame.function != frames[-1].function
        ]
        yield from (
            f"  called from {frame}: {frame.code}"[:_WIDTH] for frame in reversed(callers[-2:])
        )
    else:
        yield from (f"  {frame}: {frame.code}"[:_WIDTH] for frame in ours[-3:])
    for note in getattr(error, "__notes__", ()):
        yield from (f"  {line}"[:_WIDTH] for line in note.splitlines())


def describe_values(values: Mapping[str, Any]) -> str:
    """Returns names, dtypes and shapes of the values that hold arrays or tensors: "x is float32 [20, 8], y is ..."."""
    found = {name: describe_structure(value) for name, value in values.items()}
    return ", ".join(f"{name} is {text}" for name, text in list(found.items())[:8] if text)


def describe_structure(value: Any, depth: int = 0) -> str:
    """Returns structure, dtypes and shapes of nested tensors, arrays or their specs; "" for any other value."""
    if isinstance(value, Mapping) and value and depth < 4:
        parts = {key: describe_structure(one, depth + 1) for key, one in list(value.items())[:12]}
        return (
            f"{{{', '.join(f'{key}: {text}' for key, text in parts.items())}}}"
            if all(parts.values())
            else ""
        )
    if isinstance(value, (tuple, list)) and value and depth < 4:
        texts = [describe_structure(one, depth + 1) for one in value[:12]]
        return f"({', '.join(texts)})" if all(texts) else ""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None or callable(shape) or hasattr(value, "assign"):
        return ""
    name = getattr(dtype, "name", None) or str(dtype)
    rank = getattr(shape, "rank", 0)
    return f"{name} [?]" if rank is None else f"{name} [{', '.join(str(size) for size in shape)}]"


def _remove_stacks(lines: list[str]) -> Iterator[str]:
    """Yields the lines without frames, the code below frames, and lines that only announce a stack."""
    inside: int | None = None  # the indentation of the current frame, whose code follows
    for line in lines:
        if match := _FRAME.match(line):
            inside = len(match[1])
        elif _NO_REASON.match(line.lstrip()):
            continue
        elif inside is None or len(line) - len(line.lstrip()) <= inside:
            inside = None
            yield line


def _remove_noise(line: str) -> str:
    for pattern, instead in _NOISE:
        line = pattern.sub(instead, line)
    return line.strip()


def _save_traceback(error: BaseException, model_dir: str | None) -> str:
    """Writes the whole traceback to a file and returns its path; prints it if no file can be written."""
    text = "".join([f"command: {' '.join(sys.argv)}\n\n", *traceback.format_exception(error)])
    name = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}.txt"
    places = [os.path.join(tempfile.gettempdir(), f"trainer_kit-error-{name}")]
    if model_dir and os.path.exists(os.path.join(model_dir, "params.yaml")):
        places.insert(0, os.path.join(model_dir, "errors", name))
    for place in places:
        with contextlib.suppress(StorageError):
            files.write_text(place, text, point="error")
            return place
    print(text, file=sys.stderr)
    return "above, because no file can be written"

"""The exceptions of trainer_kit, the report of several mistakes, and the table of exit codes.

Exit codes are an interface: supervisors and Kubernetes' podFailurePolicy act on them.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# The name in package indexes, as in pyproject.toml. `trainer-kit` is too near to another project's.
DISTRIBUTION = "tf-trainer-kit"


class ExitCode(enum.IntEnum):
    """The exit codes of all commands; EXIT_CODES has their meanings."""

    DONE = 0
    BUG = 1
    USAGE = 2
    DIVERGED = 3
    MODEL_DIR_IN_USE = 4
    DATA = 5
    STORAGE = 6
    STALLED = 7
    NOTHING_TO_WAIT_FOR = 8
    PREEMPTED = 75
    INTERRUPTED = 130


EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.DONE: "The command succeeded.",
    ExitCode.BUG: "There is a bug in trainer_kit or in the user's code.",
    ExitCode.USAGE: "The flags, the files that they name or the config are wrong.",
    ExitCode.DIVERGED: (
        "The run diverged (NaN, or a loss above its bound), and no recovery attempt is left."
    ),
    ExitCode.MODEL_DIR_IN_USE: "Another process trains in model_dir.",
    ExitCode.DATA: "The data is empty, unreadable, or not what the config says.",
    ExitCode.STORAGE: "Storage is full or unwritable, or every checkpoint is damaged.",
    ExitCode.STALLED: "Nothing happened for trainer.hang_timeout_seconds.",
    ExitCode.NOTHING_TO_WAIT_FOR: (
        "A sidecar has nothing left to wait for, because the training run is gone."
    ),
    ExitCode.PREEMPTED: (
        "The run was preempted after it had saved, or it lost another worker: run it again."
    ),
    ExitCode.INTERRUPTED: "Ctrl-C stopped the run after it had saved.",
}


class TrainerKitError(Exception):
    """A failure whose message explains it to the user, without a traceback."""

    exit_code: ExitCode = ExitCode.BUG


def get_install_command(extra: str) -> str:
    """Returns the command that installs what an extra of trainer_kit needs."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def find_trainer_kit_error(error: BaseException) -> TrainerKitError | None:
    """Returns `error` if it is a TrainerKitError, or the one that AutoGraph wrapped in it."""
    cause: BaseException | None = error
    while cause is not None:
        # AutoGraph marks the errors that it wraps.
        is_wrapped = hasattr(cause, "ag_error_metadata")
        if isinstance(cause, TrainerKitError) and (cause is error or is_wrapped):
            return cause
        cause = cause.__context__
    return None


def add_note(error: BaseException, note: str) -> None:
    """Adds lines to the report of an error, like `add_note` of Python 3.11.

    Tracebacks of Python 3.11 show the lines too.
    """
    notes = getattr(error, "__notes__", None)
    error.__notes__ = [*(notes or []), note]


class UsageError(TrainerKitError, ValueError):
    """The request cannot be carried out, as flags, files or the config show."""

    exit_code = ExitCode.USAGE


class DivergedError(TrainerKitError, RuntimeError):
    """The loss is not finite or above its bound, and no recovery is left."""

    exit_code = ExitCode.DIVERGED


class ModelDirInUseError(TrainerKitError):
    """Another trainer writes to the same model_dir."""

    exit_code = ExitCode.MODEL_DIR_IN_USE


class DataError(TrainerKitError):
    """The data is empty, unreadable or not what the config says."""

    exit_code = ExitCode.DATA


class StorageError(TrainerKitError):
    """A file or folder cannot be written or read."""

    exit_code = ExitCode.STORAGE


class StalledError(TrainerKitError):
    """Nothing has happened for `trainer.hang_timeout_seconds`."""

    exit_code = ExitCode.STALLED


class NothingToWaitForError(TrainerKitError):
    """A sidecar waits for checkpoints that will not come."""

    exit_code = ExitCode.NOTHING_TO_WAIT_FOR


class PreemptedError(TrainerKitError):
    """The run was asked to stop (SIGTERM) and did so after saving: run it again."""

    exit_code = ExitCode.PREEMPTED


class InterruptedRunError(TrainerKitError, KeyboardInterrupt):
    """The run was asked to stop by Ctrl-C (SIGINT) and did so after saving.

    It is also the KeyboardInterrupt that a program expects after Ctrl-C.
    """

    exit_code = ExitCode.INTERRUPTED


class StopTraining(Exception):
    """Ends the run as if there were no more steps.

    An action raises it after a training loop or an evaluation. The results are reported, and the
    weights are saved and, in modes that evaluate, evaluated. final.json contains the reason. With
    several workers, all of them have to raise it after the same step.

    Args:
      reason: Why the run ends, for the log and for final.json.
    """

    def __init__(self, reason: str = "an action asked for it") -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class Mistake:
    """One thing that a user has to change.

    Attributes:
      path: The dotted path of the value in the config, or the flag. "" when there is none.
      problem: The value and why it is wrong, e.g. "'abc' is not a whole number".
      advice: The allowed values, or what to do.
      origin: The place of the value, e.g. "conf.yaml:12" or "--params_override".
    """

    path: str
    problem: str
    advice: str = ""
    origin: str = ""

    def __str__(self) -> str:
        text = self.problem
        if self.path and self.origin:
            text = f"{self.path} ({self.origin}): {text}"
        elif self.path or self.origin:
            text = f"{self.path or self.origin}: {text}"
        return f"{text}; {self.advice}" if self.advice else text


class ConfigError(UsageError):
    """All mistakes found in flags, files and config, in one report."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes: tuple[Mistake, ...] = tuple(mistakes)
        lines = [str(mistake) for mistake in self.mistakes]
        if len(lines) > 1:
            lines = [f"{len(lines)} mistakes", *lines]
        super().__init__("\n  ".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Mistake, ...]]]:
        """Makes the error picklable.

        A pool of processes can then return it, instead of waiting permanently.
        """
        return ConfigError, (self.mistakes,)


# The largest gap in similarity (0 to 1) between the best name and another name to suggest.
_MAX_SIMILARITY_GAP = 0.15


def find_similar_names(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Returns at most `limit` candidates that are similar to `name`, best first.

    Candidates that are much less similar than the best one are left out.
    """
    lower_name = name.lower()
    by_lower = {candidate.lower(): candidate for candidate in sorted(set(candidates))}
    best = difflib.get_close_matches(lower_name, by_lower, n=1, cutoff=0.6)
    if not best:
        return ()

    similarity = difflib.SequenceMatcher(None, best[0], lower_name).ratio()
    cutoff = max(0.6, similarity - _MAX_SIMILARITY_GAP)
    matches = difflib.get_close_matches(lower_name, by_lower, n=limit, cutoff=cutoff)
    return tuple(by_lower[match] for match in matches)


def suggest_names(name: str, candidates: Sequence[str], max_listed: int = 12) -> str:
    """Returns the advice for an unknown name: similar candidates if any exist, else a list."""
    similar = find_similar_names(name, candidates)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    if not candidates:
        return "there are none"

    ordered = sorted(candidates)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > max_listed else ""
    return f"there are: {', '.join(ordered[:max_listed])}{more}"


def suggest_paths(missing: Path, names: Sequence[str], kind: str) -> str:
    """Returns the advice for a path that does not exist: similar paths, or entries of its folder.

    Args:
      missing: The path.
      names: The names of the entries of its folder that could be meant.
      kind: What the entries are, such as "folders".
    """
    folder = missing.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"

    similar_names = find_similar_names(missing.name, names)
    if similar_names:
        similar_paths = [str(folder / name) for name in similar_names]
        return f"did you mean {' or '.join(similar_paths)}?"

    place = "here" if folder == Path() else f"in {folder}"
    if not names:
        return f"{place} there are no {kind}"
    return f"{place} {suggest_names(missing.name, names)}"

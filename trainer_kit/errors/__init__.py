"""Our exceptions, the report of several mistakes at once, and the one table of exit codes.

Exit codes are an interface: supervisors and Kubernetes' podFailurePolicy act on them.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """What a process ends with; the only table of its kind."""

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
    ExitCode.DONE: "The command has done what it was asked to do.",
    ExitCode.BUG: "There is a bug in trainer_kit or in the user's code.",
    ExitCode.USAGE: "The flags, the files that they name or the config are wrong.",
    ExitCode.DIVERGED: "The run diverged (NaN, or a loss above its bound), and no recovery is left.",
    ExitCode.MODEL_DIR_IN_USE: "Another process trains in model_dir.",
    ExitCode.DATA: "The data is empty, unreadable, or not what the config says.",
    ExitCode.STORAGE: "Storage is full or unwritable, or every checkpoint is damaged.",
    ExitCode.STALLED: "Nothing happened for trainer.hang_timeout_seconds.",
    ExitCode.NOTHING_TO_WAIT_FOR: "A sidecar has nothing more to wait for, because the training run is gone.",
    ExitCode.PREEMPTED: "The run was preempted after it had saved, or another worker is gone: run it again.",
    ExitCode.INTERRUPTED: "Ctrl-C stopped the run after it had saved.",
}


class TrainerKitError(Exception):
    """A failure that is explained to the user in its message, without a traceback."""

    exit_code: ExitCode = ExitCode.BUG


def explained(error: BaseException) -> TrainerKitError | None:
    """Returns the error itself if it explains itself, or the one that TensorFlow's AutoGraph has wrapped in it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TrainerKitError) and (seen is error or hasattr(seen, "ag_error_metadata")):
            return seen
        seen = seen.__context__
    return None


def add_note(error: BaseException, note: str) -> None:
    """Adds lines to what is shown of an error; as `add_note` of Python 3.11, whose tracebacks show them too."""
    notes = getattr(error, "__notes__", None)
    error.__notes__ = [*(notes or []), note]


class UsageError(TrainerKitError, ValueError):
    """What was asked for cannot be done; flags, files and config alone tell."""

    exit_code = ExitCode.USAGE


class DivergedError(TrainerKitError, RuntimeError):
    """The loss is not finite or passed its bound, and no recovery is left."""

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


class InterruptedRunError(TrainerKitError):
    """The run was asked to stop by Ctrl-C (SIGINT) and did so after saving."""

    exit_code = ExitCode.INTERRUPTED


class StopTraining(Exception):
    """Raised by an action after a training loop or an evaluation: the run ends here, as if it had no more steps.

    What was found is reported, the weights are saved and, where the mode evaluates, evaluated; final.json tells the
    reason. Of several workers, all have to raise it after the same step.

    Args:
      reason: why, for the log and for final.json.
    """

    def __init__(self, reason: str = "an action asked for it") -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class Mistake:
    """One thing that a user has to change.

    Attributes:
      path: dotted path of the value in the config, or the flag; empty when there is none.
      problem: what was given and why it cannot be, e.g. "'abc' is not a whole number".
      advice: what is allowed or what to do.
      origin: where the value came from, e.g. "conf.yaml:12" or "--params_override".
    """

    path: str
    problem: str
    advice: str = ""
    origin: str = ""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        head = f"{self.path}{where}: " if self.path else f"{self.origin}: " if self.origin else ""
        return f"{head}{self.problem}" + (f"; {self.advice}" if self.advice else "")


class ConfigError(UsageError):
    """All mistakes found in flags, files and config, in one report."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes: tuple[Mistake, ...] = tuple(mistakes)
        lines = [str(mistake) for mistake in self.mistakes]
        super().__init__("\n  ".join([f"{len(lines)} mistakes", *lines]) if len(lines) > 1 else "".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Mistake, ...]]]:
        """Has the error survive the way back from another process, as in a pool of workers, which would wait for it."""
        return ConfigError, (self.mistakes,)


_FAR_BEHIND = 0.15  # between the likeness of the best name and that of one still worth naming; likeness is 0 to 1


def near_names(name: str, candidates: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Returns the candidates that look like `name`, best first, at most `most`; none that is far behind the best."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(set(candidates))}
    best = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not best:
        return ()
    cutoff = max(0.6, difflib.SequenceMatcher(None, best[0], name.lower()).ratio() - _FAR_BEHIND)
    return tuple(by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=most, cutoff=cutoff))


def suggestion(name: str, candidates: Sequence[str], listed: int = 12) -> str:
    """Returns the advice for a missed lookup: near names if any, else what there is."""
    near = near_names(name, candidates)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not candidates:
        return "there are none"
    known = sorted(candidates)
    more = f", ... ({len(known)} in all)" if len(known) > listed else ""
    return f"there are: {', '.join(known[:listed])}{more}"

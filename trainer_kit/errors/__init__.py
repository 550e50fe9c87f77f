"""The exceptions of trainer_kit, the report of several mistakes at once, and the table of exit codes.

Exit codes are an interface: supervisors and Kubernetes' podFailurePolicy act on them.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    ExitCode.DONE: "The command has done what it was asked to do.",
    ExitCode.BUG: "There is a bug in trainer_kit or in the user's code.",
    ExitCode.USAGE: "The flags, the files that they name or the config are wrong.",
    ExitCode.DIVERGED: (
        "The run diverged (NaN, or a loss above its bound), and no recovery is left."
    ),
    ExitCode.MODEL_DIR_IN_USE: "Another process trains in model_dir.",
    ExitCode.DATA: "The data is empty, unreadable, or not what the config says.",
    ExitCode.STORAGE: "Storage is full or unwritable, or every checkpoint is damaged.",
    ExitCode.STALLED: "Nothing happened for trainer.hang_timeout_seconds.",
    ExitCode.NOTHING_TO_WAIT_FOR: (
        "A sidecar has nothing more to wait for, because the training run is gone."
    ),
    ExitCode.PREEMPTED: (
        "The run was preempted after it had saved, or another worker is gone: run it again."
    ),
    ExitCode.INTERRUPTED: "Ctrl-C stopped the run after it had saved.",
}


class TrainerKitError(Exception):
    """A failure whose message explains it to the user, without a traceback."""

    exit_code: ExitCode = ExitCode.BUG


def find_trainer_kit_error(error: BaseException) -> TrainerKitError | None:
    """Returns `error` if it is a TrainerKitError, or the TrainerKitError that TensorFlow's AutoGraph wrapped in it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TrainerKitError) and (
            seen is error or hasattr(seen, "ag_error_metadata")
        ):
            return seen
        seen = seen.__context__
    return None


def add_note(error: BaseException, note: str) -> None:
    """Adds lines to the report of an error, like `add_note` of Python 3.11, whose tracebacks show them too."""
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
    """An action raises it after a training loop or an evaluation to end the run as if there were no more steps.

    The results are reported, and the weights are saved and, in modes that evaluate, evaluated.
    final.json holds the reason. With several workers, all of them have to raise it after the same
    step.

    Args:
      reason: Why the run ends, for the log and for final.json.
    """

    def __init__(self, reason: str = "an action asked for it") -> None:
        super().__init__(reason)


@dataclass(frozen=True)
class Mistake:
    """One thing that a user has to change.

    Attributes:
      path: The dotted path of the value in the config, or the flag; "" when there is none.
      problem: The value and why it is wrong, e.g. "'abc' is not a whole number".
      advice: The allowed values, or what to do.
      origin: The place of the value, e.g. "conf.yaml:12" or "--params_override".
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
        super().__init__(
            "\n  ".join([f"{len(lines)} mistakes", *lines]) if len(lines) > 1 else "".join(lines)
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Mistake, ...]]]:
        """Makes the error picklable, so that a pool of processes can return it instead of waiting for ever."""
        return ConfigError, (self.mistakes,)


_MAX_SIMILARITY_GAP = (
    0.15  # the largest gap in similarity (0 to 1) between the best name and another one to suggest
)


def find_similar_names(name: str, candidates: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Returns at most `limit` candidates that are similar to `name`, best first; leaves out much weaker ones."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(set(candidates))}
    best = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not best:
        return ()
    cutoff = max(
        0.6, difflib.SequenceMatcher(None, best[0], name.lower()).ratio() - _MAX_SIMILARITY_GAP
    )
    return tuple(
        by_lower[match]
        for match in difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=cutoff)
    )


def suggest_names(name: str, candidates: Sequence[str], max_listed: int = 12) -> str:
    """Returns the advice for an unknown name: similar candidates if there are any, else the candidates."""
    near = find_similar_names(name, candidates)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not candidates:
        return "there are none"
    known = sorted(candidates)
    more = f", ... ({len(known)} in all)" if len(known) > max_listed else ""
    return f"there are: {', '.join(known[:max_listed])}{more}"


def suggest_paths(missing: Path, names: Sequence[str], kind: str) -> str:
    """Returns the advice for a path that does not exist: similar paths, or what its folder holds.

    Args:
      missing: The path.
      names: The names of the entries of its folder that could be meant.
      kind: What these are, such as "folders".
    """
    if not missing.parent.is_dir():
        return f"there is no folder {missing.parent} either"
    if near := find_similar_names(missing.name, names):
        return f"did you mean {' or '.join(str(missing.parent / name) for name in near)}?"
    place = "here" if missing.parent == Path() else f"in {missing.parent}"
    return (
        f"{place} {suggest_names(missing.name, names)}" if names else f"{place} there are no {kind}"
    )

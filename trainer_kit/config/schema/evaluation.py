"""The config of evaluations: validation sets, best checkpoints, early stopping and sidecars."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.durations import PartOfRun
from trainer_kit.config.schema.number_types import IntFromMinusOne, NonNegativeInt, PositiveInt
from trainer_kit.errors import UsageError

# The ledgers of training runs and of mode eval have these names.
RESERVED_EVAL_NAMES = ("validation", "eval")


def describe_folder_name_problem(name: str, reserved_names: Collection[str]) -> str:
    """Returns why `name` cannot be a folder among the files of a run, and what to do.

    The text is empty if it can be one.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return (
            f"{name!r} is not a plain folder name;"
            " use a name without / and \\ that is not empty, . or .."
        )
    if name in reserved_names:
        return f"{name!r} is a name that trainer_kit uses itself; choose another name"
    return ""


def get_validation_sets(task: object) -> dict[str, Any]:
    """Returns the datasets that a task is evaluated on, by name.

    A single dataset is called "".

    Args:
      task: The section `task` of a config. One that has several tasks says itself what they are
        evaluated on.
    """
    if callable(get_sets := getattr(task, "get_validation_sets", None)):
        return dict(get_sets())

    data = getattr(task, "validation_data", None)
    if isinstance(data, Mapping):
        return dict(data)
    return {"": data}


def get_training_sets(task: object) -> dict[str, Any]:
    """Returns the datasets that a task trains on, by their dotted paths in the experiment's config.

    Args:
      task: The section `task` of a config. One that has several tasks says itself what they train
        on.
    """
    if callable(get_sets := getattr(task, "get_training_sets", None)):
        return dict(get_sets())
    return {"task.train_data": getattr(task, "train_data", None)}


@configclass
class ValidationSetConfig(Config):
    """How one of several validation sets is evaluated.

    Attributes:
      steps: The number of batches in an evaluation of this set; -1 takes all of them, and unset
        means trainer.validation_steps.
      interval: Steps between evaluations of this set in mode train_and_eval, or epochs or a share
        of the run; unset means trainer.validation_interval.
    """

    steps: IntFromMinusOne | None = None
    interval: PartOfRun | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that an evaluation uses at least one batch."""
        if self.steps == 0:
            yield "steps", "0 evaluates nothing; use -1 for all of the data or a number above 0"


@configclass
class ContinuousEvalConfig(Config):
    """How a training run and the sidecars that evaluate it share checkpoints.

    Attributes:
      policy: Which checkpoints a sidecar evaluates: `all` takes each one in order, `latest` takes
        the newest one next and logs the ones that it leaves out.
      validation_sets: Names of the validation sets that a sidecar evaluates; empty means all of
        them.
      max_wait_checkpoints: How many checkpoints beyond trainer.max_to_keep the training run keeps
        for a sidecar that has not evaluated them yet.
    """

    policy: Literal["all", "latest"] = "all"
    validation_sets: tuple[str, ...] = ()
    max_wait_checkpoints: NonNegativeInt = 20


@configclass
class EarlyStoppingConfig(Config):
    """When a run ends before its last step: when evaluations bring no improvement any more.

    Attributes:
      metric: The metric that decides whether an evaluation is an improvement; `a|b` is the entry b
        of the nested metrics a. It has to be set.
      metric_comp: Whether a higher or a lower value of the metric is better.
      patience: How many evaluations in a row may pass without an improvement; the last of them ends
        the run.
      min_delta: A value is an improvement if it is better than the best before it by more than
        this. NaN never is one.
      start_step: Evaluations before this step do not count.
      eval_name: The name of the sidecar whose evaluations decide; empty means those of the training
        run. A sidecar's evaluations come at times that differ from run to run, and so does the step
        at which the run ends; with the run's own it is the same step however often the run is
        killed.
    """

    metric: str = ""
    metric_comp: Literal["higher", "lower"] = "higher"
    patience: PositiveInt = 10
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    start_step: NonNegativeInt = 0
    eval_name: str = ""

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that eval_name is a name that a sidecar can have."""
        if self.eval_name in RESERVED_EVAL_NAMES:
            problem = f"{self.eval_name!r} is not the name of a sidecar"
            yield "eval_name", f"{problem}; leave it empty for the run's own evaluations"
        elif self.eval_name and (problem := describe_folder_name_problem(self.eval_name, ())):
            yield "eval_name", problem


@configclass
class BestCheckpointConfig(Config):
    """What is kept as the best under a name of its own, in `best_checkpoints/<name>/`.

    Attributes:
      metric: The metric that decides what is best; `a|b` is the entry b of the nested metrics a.
      metric_comp: Whether a higher or a lower value of the metric is better.
      keep: How many checkpoints are kept under this name.
      min_delta: Once `keep` checkpoints are kept, another one has to be better than the worst of
        them by more than this.
    """

    metric: str
    metric_comp: Literal["higher", "lower"] = "higher"
    keep: PositiveInt = 1
    min_delta: Annotated[float, Field(ge=0)] = 0.0

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that the metric is not empty."""
        if not self.metric:
            yield "metric", "is empty; name the metric that decides, or remove the entry"


def get_evaluation_name(mode: str, eval_name: str) -> str:
    """Returns the name under which a run that only evaluates writes its files.

    It is empty for a run that trains.

    Args:
      mode: The mode of the run.
      eval_name: The name of the sidecar, for mode continuous_eval.

    Raises:
      UsageError: When `eval_name` cannot name the folder of a sidecar.
    """
    if mode == "continuous_eval":
        if problem := describe_folder_name_problem(eval_name, RESERVED_EVAL_NAMES):
            raise UsageError(f"eval_name: {problem}")
        return eval_name
    return "eval" if mode == "eval" else ""

"""The modes of a run, and what each needs.

The module needs no TensorFlow, so that a wrong name is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.errors import UsageError, suggest_names


@dataclass(frozen=True)
class Mode:
    """What a mode needs.

    Attributes:
      trains: Whether it changes weights, and so owns model_dir.
      evaluates: Whether it needs validation data.
      meaning: One line for the help text.
      is_single_run: Whether it is one run in model_dir. Otherwise each checkpoint of another run
        gets a separate run.
    """

    trains: bool
    evaluates: bool
    meaning: str
    is_single_run: bool = True


CONTINUOUS_FINETUNE = "continuous_train_and_eval"
MODES: dict[str, Mode] = {
    "train": Mode(True, False, "train up to trainer.train_steps"),
    "eval": Mode(False, True, "evaluate one checkpoint: the latest, the best, a step or a path"),
    "train_and_eval": Mode(
        True, True, "train, with an evaluation every trainer.validation_interval steps"
    ),
    "continuous_eval": Mode(
        False, True, "evaluate each checkpoint that a training run in another process writes"
    ),
    "train_and_post_eval": Mode(True, True, "train, then evaluate once"),
    CONTINUOUS_FINETUNE: Mode(
        True,
        True,
        "fine-tune and evaluate each checkpoint of the run in the folder task.init_checkpoint",
        is_single_run=False,
    ),
}


def lookup_mode(name: str) -> Mode:
    """Returns the mode called `name`.

    Raises:
      UsageError: When there is none. The message lists all modes.
    """
    if name not in MODES:
        advice = suggest_names(name, list(MODES))
        if advice.endswith("?"):
            advice = f"{advice} (all: {', '.join(MODES)})"
        raise UsageError(f"no mode is called {name!r}; {advice}")
    return MODES[name]

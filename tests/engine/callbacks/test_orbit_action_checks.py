"""What cannot be an action is refused before the run begins, with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.callbacks.orbit_action_checks import checked_actions
from trainer_kit.errors import UsageError
from trainer_kit.run.runner import run_experiment


class _Own(keras.callbacks.Callback):
    pass


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([keras.callbacks.EarlyStopping()], "EarlyStopping is a Keras callback, .*; set trainer.early_stopping"),
        ([print, keras.callbacks.CSVLogger], "CSVLogger is a Keras callback, .*metrics.jsonl"),
        ([_Own()], "_Own is a Keras callback, .*; give a function that takes the logs"),
        ([5], "5 cannot be called"),
        (print, "builtin_function_or_method is not a list"),
    ],
)
def test_what_cannot_be_an_action_is_refused(actions: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_actions(actions, None)


def test_any_iterable_of_actions_is_called_after_each_loop(tmp_path: Path) -> None:
    seen: list[str] = []
    config = linear_experiment(train_steps=10)
    given: dict[str, Any] = {
        "train_actions": (lambda logs, name=name: seen.append(name) for name in "ab"),
        "eval_actions": {"one": lambda logs: seen.append("eval")}.values(),
    }
    run_experiment(None, LinearTask(config.task), "train_and_eval", config, str(tmp_path / "run"), **given)
    assert seen == ["a", "b", "a", "b", "eval"]


@pytest.mark.parametrize("kind", ["train_actions", "eval_actions"])
def test_a_refused_action_leaves_no_folder(kind: str, tmp_path: Path) -> None:
    config = linear_experiment()
    given: dict[str, Any] = {kind: [keras.callbacks.EarlyStopping()]}
    with pytest.raises(UsageError, match=f"{kind}: EarlyStopping"):
        run_experiment(None, LinearTask(config.task), "train_and_eval", config, str(tmp_path / "run"), **given)
    assert not (tmp_path / "run").exists()

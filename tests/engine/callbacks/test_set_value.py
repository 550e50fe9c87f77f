"""Hyper-parameters that are functions of the step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.builders import replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.set_value import SetAtSteps, SetByFunction
from trainer_kit.errors import UsageError
from trainer_kit.files import read_json_lines
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything

CONSTANT = {"type": "constant", "constant": {"learning_rate": 0.5}}


def halve_rate(step: int) -> float:
    return float(0.5 ** (1 + step // 4))


def _train_weights(
    folder: Path, rate: Any, *callbacks: Any, count: int = 1, **trainer: Any
) -> list[np.ndarray]:
    seed_everything(1)
    strategy = replicas(count)
    sgd = {"optimizer": {"type": "sgd"}, "learning_rate": rate}
    config = linear_experiment(optimizer_config=sgd, train_steps=15, **trainer)
    with strategy.scope():
        task = LinearTask(config.task)
    model, _ = run_experiment(
        strategy,
        task,
        "train",
        config,
        str(folder),
        callbacks=callbacks,
        enable_async_checkpointing=False,
    )
    return [variable.numpy() for variable in model.trainable_variables]


def _read_changes(folder: Path) -> list[tuple[int, dict[str, float]]]:
    lines = [line for line in read_json_lines(folder / "metrics.jsonl") if line["kind"] == "change"]
    return [(line["step"], line["metrics"]) for line in lines]


@pytest.mark.parametrize("options", [{"count": 2}, {"fuse_steps": 2}], ids=["2 replicas", "fused"])
def test_lists_of_steps_train_like_a_stepwise_schedule(tmp_path: Path, options: Any) -> None:
    rates = SetAtSteps("learning_rate", [[7, 0.25]])
    factors = SetAtSteps("learning_rate_factor", [[0, 0.5], [1, 1.0], [7, 0.5]])
    changed = _train_weights(tmp_path / "list", CONSTANT, rates, factors, **options)
    boundaries = [0, 6]  # which are included
    ladder = {
        "type": "stepwise",
        "stepwise": {"boundaries": boundaries, "values": [0.25, 0.5, 0.125]},
    }

    expected = _train_weights(tmp_path / "schedule", ladder, **options)

    assert all(np.array_equal(value, other) for value, other in zip(changed, expected, strict=True))
    assert _read_changes(tmp_path / "list") == [
        (0, {"learning_rate_factor": 0.5}),
        (1, {"learning_rate_factor": 1.0}),
        (7, {"learning_rate": 0.25}),
        (7, {"learning_rate_factor": 0.5}),
    ]


def test_functions_count_steps_and_lists_may_count_epochs(tmp_path: Path) -> None:
    function = SetByFunction("learning_rate", f"{__name__}:halve_rate", every=4)
    _train_weights(
        tmp_path,
        CONSTANT,
        function,
        SetAtSteps("learning_rate_factor", [["1.5 epochs", 0.25]]),
        steps_per_epoch=4,
    )
    changes = _read_changes(tmp_path)
    # The rate of step 0 is set already: 0.5.
    rates = [(step, {"learning_rate": halve_rate(step)}) for step in (4, 8, 12)]

    assert [rates[0], (6, {"learning_rate_factor": 0.25}), *rates[1:]] == changes


@pytest.mark.parametrize(
    "steps", [[[0, 0.1], [5]], [["3 min", 0.1]], [[5, "low"]], [[5, 0.1], [5, 0.2]], 0.1], ids=str
)
def test_a_list_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(UsageError):
        SetAtSteps("learning_rate", steps)


@pytest.mark.parametrize(
    ("function", "every", "message"),
    [
        (
            "no_such_module:rate",
            1,
            r"there is no module 'no_such_module'.*write function as module:name",
        ),
        (f"{__name__}:halve", 1, r"has no function called 'halve'; did you mean halve_rate"),
        (":sqrt", 1, "write it as module:name"),
        (0.5, 1, "0.5 is not a function"),
        (halve_rate, None, "every is None"),
    ],
)
def test_a_function_that_is_none_is_refused(function: Any, every: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SetByFunction("learning_rate", function, every)


@pytest.mark.parametrize("value", ["low", [0.1, 0.2], float("nan"), True])
def test_a_callback_can_set_only_finite_numbers(value: Any) -> None:
    run: Any = SimpleNamespace(step=0, hyper_parameters=None)
    with pytest.raises(UsageError):
        Run.change(run, "learning_rate", value)


@pytest.mark.parametrize(
    ("steps", "trainer"),
    [([[4, 0.0], [8, -0.25]], {}), ([[4, 0.5], ["1 epochs", 0.25]], {"steps_per_epoch": 4})],
    ids=["a negative rate", "two values at one step"],
)
def test_a_list_that_cannot_be_is_refused_before_training(
    tmp_path: Path, steps: Any, trainer: dict[str, int]
) -> None:
    with pytest.raises(UsageError):
        _train_weights(tmp_path, CONSTANT, SetAtSteps("learning_rate", steps), **trainer)

    assert not (tmp_path / "metrics.jsonl").exists()

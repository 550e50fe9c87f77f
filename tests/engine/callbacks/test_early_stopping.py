"""Runs that end before their last step: without improvement, or by an action."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer_kit
from tests.builders import assert_all_close, evaluated_steps, final_record
from tests.engine.linear_task import BatchSource, LinearConfig, LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.early_stopping import EarlyStopping, compute_metric_progress
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError, TrainerKitError, UsageError
from trainer_kit.evals.ledger import Ledger
from trainer_kit.files import read_json_lines
from trainer_kit.run.launcher import launch

_NAN = math.nan
_SCORES: dict[int, float] = {}  # step -> what an evaluation of the scripted task gives


class _Stopping:
    def __float__(self) -> float:
        raise trainer_kit.StopTraining("enough")


@trainer_kit.configclass
class BatchedConfig(LinearConfig):
    """The linear task on ready-made batches."""


@trainer_kit.register_task(BatchedConfig)
class BatchedTask(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        if not params.is_training:
            return super().build_inputs(params, input_context)
        return BatchSource()


@trainer_kit.configclass
class ScriptedConfig(BatchedConfig):
    """A task whose evaluations report group|score."""


@trainer_kit.register_task(ScriptedConfig)
class ScriptedTask(BatchedTask):
    def aggregate_logs(self, state: Any, step_logs: Mapping[str, Any]) -> Any:
        return True

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"group": {"score": float(_SCORES[int(global_step.numpy())])}}


def _build_experiment(**trainer: Any) -> ExperimentConfig:
    return linear_experiment(**trainer).replace(task=BatchedConfig())


def _build_config(scores: Sequence[float], **early: Any) -> ExperimentConfig:
    """An experiment of 100 steps, evaluated every 10 on one batch, with these scores."""
    _SCORES.clear()
    _SCORES.update({10 * number: score for number, score in enumerate(scores, 1)})
    early = {"metric": "group|score", "patience": 2, **early}
    config = _build_experiment(train_steps=100, validation_steps=1, early_stopping=early)
    return config.replace(task=ScriptedConfig())


def _build_tiny_config(**early: Any) -> ExperimentConfig:
    """Returns an experiment of 100 steps whose evaluations, every 10, do not improve enough."""
    wanted = {
        "metric": "validation_loss",
        "metric_comp": "lower",
        "min_delta": 100.0,
        "patience": 2,
    }
    return _build_experiment(train_steps=100, early_stopping={**wanted, **early})


def _launch(
    folder: Path, config: ExperimentConfig, mode: str = "train_and_eval", **arguments: Any
) -> Any:
    # Saves in the foreground take less time in a run this short.
    return launch(config, mode, str(folder), enable_async_checkpointing=False, **arguments)


def _find_newest(folder: Path) -> int:
    return max(complete_checkpoints(str(folder)))


def _stop_at(step: int, interval: int) -> Callable[[Any], None]:
    """An action that ends the run when it has been called for `step`, counting by `interval`."""
    step_count = 0

    def action(logs: Any) -> None:
        nonlocal step_count
        step_count += interval
        if step_count == step:
            raise trainer_kit.StopTraining(f"enough at {step}")

    return action


@pytest.fixture(scope="module")
def linear() -> ReadyTrainer:
    """The trainer of runs with one validation set, whose evaluations report a loss."""
    return ReadyTrainer(_build_experiment(), BatchedTask)


@pytest.fixture(scope="module")
def scripted_trainer() -> ReadyTrainer:
    """The trainer of runs with one validation set, whose evaluations report what the test says."""
    return ReadyTrainer(_build_config([]), ScriptedTask)


@pytest.fixture(scope="module")
def of_two_sets() -> ReadyTrainer:
    return ReadyTrainer(_build_two_set_config(), ScriptedTask)


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, linear: ReadyTrainer
) -> tuple[Path, list[np.ndarray]]:
    """A run of 60 steps that was never stopped: its folder and the values of its model."""
    folder = tmp_path_factory.mktemp("straight")
    model, _ = _launch(
        folder, _build_experiment(train_steps=60, max_to_keep=6), "train", trainer=linear.again()
    )
    return folder, [variable.numpy() for variable in model.variables]


@pytest.fixture(scope="module")
def stopped_run(
    tmp_path_factory: pytest.TempPathFactory, linear: ReadyTrainer
) -> tuple[Path, dict[str, Any]]:
    """A run of 100 steps that was stopped at step 30: its folder and its last logs."""
    folder = tmp_path_factory.mktemp("stopped")
    _, logs = _launch(folder, _build_tiny_config(), trainer=linear.again())
    return folder, logs


# ---- the pure part

_VALUES = st.lists(
    st.sampled_from([_NAN, math.inf, -math.inf, -1.0, 0.0, 0.5, 1.0, 1.5, 2.0]), max_size=12
)


def _find_improvements(values: Sequence[float], sign: int, delta: float) -> list[int]:
    """Returns the places that are finite and better, by more than delta, than those before."""
    improvements: list[int] = []
    for place, value in enumerate(values):
        if math.isfinite(value) and all(
            sign * (value - values[other]) > delta for other in improvements
        ):
            improvements.append(place)

    return improvements


@given(
    _VALUES,
    st.sampled_from(["higher", "lower"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 120),
)
def test_the_fold_agrees_with_brute_force(
    values: list[float], comparison: str, delta: float, start: int
) -> None:
    steps = list(range(10, 10 * len(values) + 10, 10))
    progress = compute_metric_progress(zip(steps, values, strict=True), comparison, delta, start)
    counted = [(step, value) for step, value in zip(steps, values, strict=True) if step >= start]
    places = _find_improvements(
        [value for _, value in counted], 1 if comparison == "higher" else -1, delta
    )
    last = places[-1] if places else -1

    assert progress.evaluations_since_best == len(counted) - 1 - last
    assert progress.last_step == (counted[-1][0] if counted else -1)
    assert progress.best_step == (counted[last][0] if places else -1)
    assert progress.best == counted[last][1] if places else math.isnan(progress.best)


def _write_ledger_beside(
    folder: Path, *records: tuple[int, float], config_hash: str = "a"
) -> Ledger:
    ledger = Ledger(folder / "evals/side.jsonl", dataset="eval", config_hash=config_hash)
    ledger.follow(folder / "evals/validation.jsonl")
    for step, value in records:
        ledger.append(step, {"score": value}, 0.1)

    return ledger


def _create_early_stopping(folder: Path, **options: Any) -> tuple[EarlyStopping, Ledger]:
    own = Ledger(folder / "evals/validation.jsonl", dataset="validation", config_hash="own")
    config = EarlyStoppingConfig(
        **{"metric": "score", "patience": 2, "eval_name": "side", **options}
    )
    return EarlyStopping(config, own, str(folder / "evals")), own


def test_what_a_sidecar_tells_counts_as_soon_as_it_is_there(tmp_path: Path) -> None:
    early, _ = _create_early_stopping(tmp_path)

    assert early.find_stop_reason(50) == ""  # there is no ledger yet

    side = _write_ledger_beside(tmp_path, (10, 0.5), (20, 0.4))
    assert early.find_stop_reason(50) == ""

    side.append(30, {"score": 0.3}, 0.1)

    assert early.find_stop_reason(20) == ""
    assert early.find_stop_reason(50).startswith(
        "score of side has not improved on 0.5 of step 10 in the last 2 evaluations"
    )

    run = Run(SimpleNamespace())
    run.step = 50

    early.loop_end(run, {})

    assert run.requests.stop_reason.endswith("up to step 30 (trainer.early_stopping.patience=2)")


def test_changed_sidecars_and_rewinds_discard_evaluations(tmp_path: Path) -> None:
    early, own = _create_early_stopping(tmp_path)

    _write_ledger_beside(tmp_path, (10, 0.5), (20, 0.4), (30, 0.3))

    assert early.find_stop_reason(30)

    own.rewind(20)  # which the sidecar has yet to note

    assert early.find_stop_reason(30) == ""

    _write_ledger_beside(tmp_path, (40, 0.4), (50, 0.3))

    assert early.find_stop_reason(50)

    _write_ledger_beside(tmp_path, (50, 0.1), config_hash="b")

    assert early.find_stop_reason(50) == ""


def test_a_validation_set_that_no_evaluation_is_of_is_told(tmp_path: Path) -> None:
    early, _ = _create_early_stopping(tmp_path, metric="dev|score")
    side = Ledger(
        tmp_path / "evals/side.jsonl",
        dataset="eval",
        config_hash="",
        sets={"hard": "a", "rare": "a"},
    )
    for step in (10, 20):
        assert early.find_stop_reason(step) == ""  # its set may be evaluated next
        side.append(
            step, {"hard": {"score": 0.5}, "rare": {"score": 0.5}}, {"hard": 0.1, "rare": 0.1}
        )

    with pytest.raises(
        UsageError, match=r"evals/side.jsonl reports no .* called 'dev\|score'; .*hard\|score"
    ):
        early.find_stop_reason(20)


# ---- early stopping


def test_a_run_ends_with_the_evaluation_that_uses_up_patience(
    scripted_trainer: ReadyTrainer, tmp_path: Path
) -> None:
    scores = [0.1, 0.3, _NAN, 0.1, 0.05, _NAN, 0.9]  # from step 20 on, 0.1 is the only improvement
    config = _build_config(scores, metric_comp="lower", start_step=20, min_delta=0.15)

    _, logs = _launch(tmp_path, config, trainer=scripted_trainer.again())

    assert evaluated_steps(tmp_path) == list(range(10, 61, 10))
    assert _find_newest(tmp_path) == 60

    final = final_record(tmp_path)
    score = logs["group"]["score"]
    assert final["step"] == 60
    assert final["metrics"]["group"]["score"] == pytest.approx(score, nan_ok=True)
    assert final["stopped"].startswith("group|score has not improved on 0.1 of step 40")


def test_patience_used_up_at_the_last_step_finishes_the_run(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_tiny_config().replace(trainer={"train_steps": 30})

    # An action may ask for it, too.
    _launch(tmp_path, config, train_actions=[_stop_at(30, 5)], trainer=linear.again())

    final = final_record(tmp_path)
    assert final["step"] == 30
    assert "stopped" not in final
    assert evaluated_steps(tmp_path) == [10, 20, 30]


def test_a_restart_does_nothing_until_patience_is_raised(
    stopped_run: tuple[Path, dict[str, Any]],
    straight: tuple[Path, list[np.ndarray]],
    linear: ReadyTrainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Path(shutil.copytree(stopped_run[0], tmp_path / "run"))
    first = stopped_run[1]
    params = (run / "params.yaml").stat().st_mtime_ns

    with caplog.at_level(logging.INFO, "trainer_kit"):
        _, again = _launch(run, _build_tiny_config(), trainer=linear.again())

    assert "was stopped early at step 30: validation_loss has not improved on" in caplog.text
    assert (
        "raise trainer.early_stopping.patience, or remove trainer.early_stopping, to continue"
        in caplog.text
    )
    assert again == {name: pytest.approx(float(value)) for name, value in first.items()}
    assert (run / "params.yaml").stat().st_mtime_ns == params

    # With a separate trainer, as in a new process.
    resumed, _ = _launch(run, _build_tiny_config(patience=5))

    assert final_record(run)["step"] == 60
    assert evaluated_steps(run) == [10, 20, 30, 40, 50, 60]
    assert_all_close([variable.numpy() for variable in resumed.variables], straight[1])


def test_a_run_past_its_stop_ends_at_once_and_is_evaluated(
    stopped_run: tuple[Path, dict[str, Any]], linear: ReadyTrainer, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(stopped_run[0], tmp_path / "run"))
    longer = _build_tiny_config().replace(trainer={"early_stopping": None, "train_steps": 37})

    _launch(run, longer, mode="train", trainer=linear.again())

    assert final_record(run)["step"] == 37
    assert "stopped" not in final_record(run)

    _, logs = _launch(run, _build_tiny_config(), trainer=linear.again())
    assert evaluated_steps(run) == [10, 20, 30, 37]
    assert final_record(run)["step"] == 37
    assert _find_newest(run) == 37
    assert final_record(run)["metrics"]["validation_loss"] == pytest.approx(
        float(logs["validation_loss"])
    )


def _build_two_set_config(metric: str = "often|group|score", **early: Any) -> ExperimentConfig:
    """Two validation sets, every 10 and every 40 steps, whose scores never improve."""
    config = _build_config([0.9] * 12, metric=metric, **early)
    data = config.task.validation_data
    sets = {"rare": {"interval": 40}}
    return config.replace(
        task={"validation_data": {"often": data, "rare": data}}, trainer={"validation_sets": sets}
    )


def test_only_the_validation_set_of_the_metric_decides(
    of_two_sets: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_two_set_config("rare|group|score", patience=1)
    _SCORES.update(zip(range(10, 81, 10), [0.9, 0.4, 0.8, 0.3, 0.7, 0.2, 0.6, 0.1], strict=True))

    _launch(tmp_path, config, trainer=of_two_sets.again())

    assert final_record(tmp_path)["stopped"].startswith(
        "rare|group|score has not improved on 0.3 of step 40"
    )
    assert _find_newest(tmp_path) == 80
    assert sorted(evaluated_steps(tmp_path)) == [10, 20, 30, 40, 40, 50, 60, 70, 80, 80]


def test_a_stop_at_one_set_also_evaluates_the_others(
    of_two_sets: ReadyTrainer, tmp_path: Path
) -> None:
    set_names: list[set[str]] = []
    config = _build_two_set_config(patience=1)
    actions = [lambda logs: set_names.append(set(logs))]

    _, logs = _launch(tmp_path, config, eval_actions=actions, trainer=of_two_sets.again())

    assert set(logs) == {"often", "rare"} == set(final_record(tmp_path)["metrics"])
    assert evaluated_steps(tmp_path) == [10, 20, 20]
    assert set_names == [{"often"}, {"often"}, {"often", "rare"}]

    reported = [
        line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "validation"
    ]
    assert [line["step"] for line in reported] == [10, 20]

    # As if it had been killed before the evaluation of "rare", which was not due at step 20.
    (tmp_path / "final.json").unlink()
    ledger = tmp_path / "evals/validation.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:2]))

    _launch(tmp_path, config, trainer=of_two_sets.again())

    assert set(final_record(tmp_path)["metrics"]) == {"often", "rare"}
    assert final_record(tmp_path)["step"] == 20
    assert evaluated_steps(tmp_path) == [10, 20, 20]


def test_sidecar_of_a_stopped_run_evaluates_its_last_checkpoint(
    stopped_run: tuple[Path, dict[str, Any]], linear: ReadyTrainer, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(stopped_run[0], tmp_path / "run"))
    config = _build_tiny_config().replace(trainer={"continuous_eval_timeout": 0.2})

    _launch(run, config, mode="continuous_eval", trainer=linear.again())

    assert evaluated_steps(run, "continuous_eval") == [10, 20, 30]


def test_a_sidecars_evaluations_end_a_run_that_only_trains(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_tiny_config(eval_name="side", metric="score").replace(
        trainer={"train_steps": 60}
    )
    ledger = Ledger(tmp_path / "evals/side.jsonl", dataset="eval", config_hash="a")
    step = 0

    def evaluate_beside(logs: Any) -> None:
        nonlocal step
        step += 5
        ledger.append(step, {"score": 1.0}, 0.1)

    for _ in range(2):  # the second start has nothing to do
        _, logs = _launch(
            tmp_path, config, mode="train", train_actions=[evaluate_beside], trainer=linear.again()
        )
        assert logs == {}
        assert final_record(tmp_path)["step"] == 15
        assert _find_newest(tmp_path) == 15
        assert step == 15


@pytest.mark.parametrize("mode", ["train", "train_and_post_eval"])
def test_a_mode_without_evaluation_in_training_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ConfigError):
        _launch(tmp_path / "run", _build_tiny_config(), mode=mode)

    assert not (tmp_path / "run").exists()


def test_unknown_metric_is_refused_before_the_first_step(
    scripted_trainer: ReadyTrainer, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"no single number called 'validation_los'; did you mean validation_loss"
    ):
        _launch(tmp_path / "run", _build_tiny_config(metric="validation_los"))

    assert not (tmp_path / "run").exists()

    with pytest.raises(
        UsageError, match=r"evals/validation.jsonl reports .* did you mean group\|score"
    ):
        # Only a run can tell.
        _launch(
            tmp_path, _build_config([0.5], metric="group|scor"), trainer=scripted_trainer.again()
        )

    assert evaluated_steps(tmp_path) == [10]


# ---- actions that stop


def test_a_train_action_ends_the_run_as_if_it_had_no_more_steps(
    linear: ReadyTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _build_experiment(train_steps=60)
    later = []

    with caplog.at_level(logging.INFO, "trainer_kit"):
        _, logs = _launch(
            tmp_path,
            config,
            train_actions=[_stop_at(15, 5), later.append],
            trainer=linear.again(),
        )

    assert "stopped early at step 15: enough at 15" in caplog.text
    assert len(later) == 3  # the loop's other actions are called too

    final = final_record(tmp_path)
    assert final["step"] == 15
    assert final["stopped"] == "enough at 15"
    assert _find_newest(tmp_path) == 15
    assert final["metrics"] == {name: pytest.approx(float(value)) for name, value in logs.items()}
    assert logs
    assert evaluated_steps(tmp_path) == [10, 15]


def test_an_eval_action_ends_the_run_after_its_evaluation(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_experiment(train_steps=50, checkpoint_interval=15)
    _, logs = _launch(tmp_path, config, eval_actions=[_stop_at(20, 10)], trainer=linear.again())

    final = final_record(tmp_path)

    assert final["step"] == 20
    assert final["stopped"] == "enough at 20"
    assert evaluated_steps(tmp_path) == [10, 20]
    assert list(complete_checkpoints(str(tmp_path))) == [15, 20]
    assert logs["validation_loss"] > 0


def test_a_run_without_a_last_step_goes_on_after_it_was_stopped(
    linear: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_experiment(train_steps=-1)
    for step in (15, 30):
        action = _stop_at(15, 5)
        _launch(
            tmp_path,
            config,
            "train_and_post_eval",
            train_actions=[action],
            trainer=linear.again(),
        )
        final = final_record(tmp_path)
        assert final["step"] == step
        assert final["stopped"] == "enough at 15"
        assert _find_newest(tmp_path) == step

    assert evaluated_steps(tmp_path) == [15, 30]


def test_only_actions_and_callbacks_may_raise_stop_training(
    scripted_trainer: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_config([0.5]).replace(trainer={"early_stopping": None})
    _SCORES[10] = _Stopping()  # type: ignore[assignment]

    with pytest.raises(TrainerKitError):
        _launch(tmp_path, config, trainer=scripted_trainer.again())


def test_an_action_of_a_sidecar_ends_the_sidecar(
    straight: tuple[Path, list[np.ndarray]], linear: ReadyTrainer, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(straight[0], tmp_path / "run"))
    config = _build_experiment(train_steps=60)

    _launch(run, config, "continuous_eval", eval_actions=[_stop_at(20, 10)], trainer=linear.again())

    assert evaluated_steps(run, "continuous_eval") == [10, 20]


def test_under_orbits_controller_only_an_action_can_stop(
    orbit: Any, linear: ReadyTrainer, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"controller_cls": orbit.Controller, "trainer": linear.again()}

    with pytest.raises(UsageError):
        _launch(tmp_path, _build_tiny_config(), **own)

    _, logs = _launch(tmp_path, _build_experiment(), train_actions=[_stop_at(15, 5)], **own)
    assert logs == {}

    final = final_record(tmp_path)
    assert final["step"] == 15
    assert final["stopped"] == "enough at 15"
    assert _find_newest(tmp_path) == 15

"""Evaluations with several weights at each step: averages of several decays, trained weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from tests.builders import assert_all_close, json_lines, read_json, replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.testing import compare_runs
from trainer_kit.testing.tiny_task import CLASSES, FEATURES, tiny_arrays
from trainer_kit.training.trainer import Trainer

NAME = "tests_averages"
EMA: dict[str, Any] = {
    "average_decay": 0.95,
    "more_decays": {"fast": 0.5},
    "evaluate": ("average", "weights", "fast"),
}
MOMENTUM = {
    "optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
}


def _build_config(ema: dict[str, Any] | None, **trainer: Any) -> Any:
    return linear_experiment(optimizer_config={**MOMENTUM, "ema": ema}, **trainer).replace(
        task={"dropout": 0.1}
    )


class _Counting(LinearTask):
    """Counts its evaluations in a variable and in its state, and draws a number in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.batches = tf.Variable(0)
        self.evaluations = 0
        self.generator = tf.random.Generator.from_seed(5)

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        self.batches.assign_add(1)
        return {
            **super().validation_step(inputs, model, metrics),
            "drawn": self.generator.normal([]),
        }

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return step_logs["drawn"][0] + (0.0 if state is None else state)

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        self.evaluations += 1
        return {"drawn": float(aggregated_logs), "evaluations": self.evaluations}

    def state(self) -> Any:
        return {"evaluations": self.evaluations}

    def restore(self, state: Any) -> None:
        self.evaluations = state["evaluations"]


def _train(ema: dict[str, Any], task_type: type[LinearTask] = LinearTask) -> Any:
    config = _build_config(ema)
    keras.utils.set_random_seed(3)
    task = task_type(config.task)
    trainer = Trainer(
        config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config)
    )
    trainer.initialize()
    trainer.train(tf.constant(12))

    return trainer


def _read_values(trainer: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in trainer.model.variables]


def _compute_metric(model: Any, metric: str) -> float:
    """Returns the accuracy or the loss over all validation data, computed by hand."""
    points, labels = tiny_arrays(False)
    outputs = model(points)
    if metric == "accuracy":
        return float((outputs.numpy().argmax(1) == labels).mean())

    return float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, outputs))


def test_each_kind_of_weights_has_metrics_of_its_own() -> None:
    with replicas(2).scope():
        trainer = _train(EMA)
        before = _read_values(trainer)
        logs = trainer.evaluate(tf.constant(-1))

    assert _read_values(trainer) == before

    logs_by_weights = {"average": logs, "weights": logs["weights"], "fast": logs["fast"]}
    for name, weights_logs in logs_by_weights.items():
        with trainer.use_weights(name):
            for metric in ("accuracy", "validation_loss"):
                expected = _compute_metric(trainer.model, metric)
                assert weights_logs[metric] == pytest.approx(expected, rel=1e-5)

    losses = {
        logs["validation_loss"],
        logs["weights"]["validation_loss"],
        logs["fast"]["validation_loss"],
    }
    assert len(losses) == 3


def test_further_evaluations_leave_task_and_randomness_alone() -> None:
    average_only = _train({**EMA, "evaluate": ("average",)}, _Counting)
    all_weights = _train(EMA, _Counting)

    for _ in range(2):
        expected = average_only.evaluate(tf.constant(-1))
        logs = all_weights.evaluate(tf.constant(-1))
        assert {name: logs[name] for name in expected} == expected

    assert logs["fast"]["drawn"] == logs["drawn"]
    assert int(all_weights.task.batches) == int(average_only.task.batches)

    for trainer in (average_only, all_weights):
        trainer.train(tf.constant(3))

    assert _read_values(average_only) == _read_values(all_weights)


# ---- runs


def _run_config(steps: int = 40) -> Any:
    config = _build_config(
        EMA,
        train_steps=steps,
        max_to_keep=9,
        best_checkpoint_eval_metric="rare|weights|validation_loss",
        best_checkpoint_metric_comp="lower",
        best_checkpoints={
            "average": {"metric": "dev|accuracy"},
            "fast": {"metric": "dev|fast|validation_loss", "metric_comp": "lower"},
        },
        callbacks=(
            {"name": "ema_checkpoints"},
            {"name": "ema_checkpoints", "args": {"max_to_keep": 2, "average": "fast"}},
        ),
    )
    data = config.task.validation_data
    return config.replace(
        task={"validation_data": {"dev": data, "rare": data.replace(global_batch_size=7)}}
    )


def _launch(config: Any, folder: Path, mode: str = "train_and_eval", **arguments: Any) -> Any:
    keras.utils.clear_session()  # names of layers count up in a process, and checkpoints hold them
    return launch(config, mode, str(folder), experiment=NAME, **arguments)


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    keras.utils.clear_session()
    return ReadyTrainer(_run_config(), LinearTask)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ready: ReadyTrainer) -> Path:
    """A run of 40 steps, which saves and evaluates two validation sets at each tenth."""
    if NAME not in trainer_kit.config.experiment_registry.experiments:
        trainer_kit.register_experiment(NAME)(_run_config)
    folder = tmp_path_factory.mktemp("averages") / "run"
    _launch(_run_config(), folder, trainer=ready.again(folder))

    return folder


def _load_model(path: str) -> Any:
    """A model of plain Keras with the weights of a checkpoint, read by plain TensorFlow."""
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dropout(0.1), keras.layers.Dense(CLASSES)]
    )
    tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched().expect_partial()
    return model


@pytest.mark.parametrize(
    "place", ["best_ckpt", "best_checkpoints/average", "best_checkpoints/fast"]
)
def test_best_checkpoints_hold_the_weights_of_their_metric(run: Path, place: str) -> None:
    info = read_json(run / place / "info.json")
    model = _load_model(str(run / place / info["checkpoint"]))

    assert _compute_metric(model, info["metric"].rpartition("|")[2]) == pytest.approx(
        info["value"], rel=1e-5
    )

    values = {info["metrics"][f"dev|{name}validation_loss"] for name in ("", "weights|", "fast|")}
    assert len(values) == 3


def test_reports_say_which_weights_a_metric_is_of(run: Path) -> None:
    lines = json_lines(run / "metrics.jsonl")
    reported = [line["metrics"] for line in lines if line["kind"] == "validation"][-1]
    flat = {name.replace("/", "|"): value for name, value in reported.items()}
    records = json_lines(run / "evals/validation.jsonl")
    last = {record["dataset"]: record["metrics"] for record in records if record["step"] == 40}
    recorded = flatten_scalars({name: metrics[name] for name, metrics in last.items()}, "|")
    best = {name: value for name, value in flat.items() if "best_" in name}

    assert best == {"rare|weights|best_validation_loss": flat["rare|weights|validation_loss"]}
    assert {**recorded, **best} == flat
    assert {"dev|accuracy", "rare|fast|accuracy"} <= flat.keys()
    assert list((run / "validation/rare/weights").glob("events*"))


def _read_variables(prefix: Path) -> dict[str, bytes]:
    reader = tf.train.load_checkpoint(str(prefix))
    names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
    return {
        name: np.asarray(reader.get_tensor(name)).tobytes()
        for name in names
        if "save_counter" not in name
    }


def test_a_resumed_run_has_the_bits_of_one_never_stopped(
    run: Path, ready: ReadyTrainer, tmp_path: Path
) -> None:
    _launch(_run_config(20), tmp_path, trainer=ready.again(tmp_path))
    _launch(_run_config(40), tmp_path)  # with a trainer of its own, as in a new process

    assert compare_runs(run, tmp_path) == []

    whole = _read_variables(run / "ckpt-40")
    assert any(name.startswith("more_averages/fast/") for name in whole)
    assert whole == _read_variables(tmp_path / "ckpt-40")

    for name in ("ckpt-40", "fast/ckpt-30", "fast/ckpt-40"):
        assert _read_variables(run / "ema_checkpoints" / name) == _read_variables(
            tmp_path / "ema_checkpoints" / name
        )


@pytest.mark.parametrize(
    ("folder", "average", "steps"), [("", "average", {40}), ("fast", "fast", {30, 40})]
)
def test_ema_checkpoints_hold_the_averages(
    run: Path, folder: str, average: str, steps: set[int]
) -> None:
    place = run / "ema_checkpoints" / folder

    assert complete_checkpoints(str(place)).keys() == steps

    model = _load_model(tf.train.latest_checkpoint(str(place)))
    other = _load_model(str(run / "best_ckpt/ckpt-40"))
    trainer_kit.load_weights(other, run / "ckpt-40", averaged=average)

    assert_all_close(model.get_weights(), other.get_weights())


def test_a_model_is_loaded_with_the_weights_asked_for(run: Path) -> None:
    records = json_lines(run / "evals/validation.jsonl")
    (logs,) = (
        record["metrics"]["dev"]
        for record in records
        if (record["step"], record["dataset"]) == (40, "dev")
    )
    for weights, loss in (
        ("", logs),
        ("average", logs),
        ("weights", logs["weights"]),
        ("fast", logs["fast"]),
    ):
        model = trainer_kit.load_model(run, "latest", weights=weights)
        assert _compute_metric(model, "validation_loss") == pytest.approx(
            loss["validation_loss"], rel=1e-5
        )

    with pytest.raises(
        UsageError, match="keeps no average 'fats' of the weights; did you mean fast"
    ):
        trainer_kit.load_model(run, "latest", weights="fats")

    with pytest.raises(UsageError, match="holds one kind of weights, those that were evaluated"):
        trainer_kit.load_model(run, "best", weights="fast")


def test_averages_that_are_lost_or_a_kill_prevented_are_written(
    run: Path, ready: ReadyTrainer, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(again / "ema_checkpoints")
    (again / "final.json").unlink()

    _launch(_run_config(), again, trainer=ready.again(again))

    for name in ("ckpt-40", "fast/ckpt-40"):
        assert _read_variables(run / "ema_checkpoints" / name) == _read_variables(
            again / "ema_checkpoints" / name
        )


def test_a_metric_of_weights_that_are_not_evaluated_is_refused(tmp_path: Path) -> None:
    config = _build_config(
        {**EMA, "evaluate": ("average",)}, best_checkpoint_eval_metric="weights|accuracy"
    )

    with pytest.raises(UsageError, match=r"'weights\|accuracy' is not a validation metric"):
        _launch(config, tmp_path)


@pytest.mark.parametrize(
    ("ema", "average", "message"),
    [
        (None, "average", "set trainer.optimizer_config.ema"),
        (EMA, "fats", "the run keeps no average 'fats'; did you mean fast"),
    ],
)
def test_checkpoints_of_an_unknown_average_are_refused(
    ema: Any, average: str, message: str, tmp_path: Path
) -> None:
    config = _build_config(
        ema, callbacks=({"name": "ema_checkpoints", "args": {"average": average}},)
    )
    with pytest.raises(UsageError, match=message):
        _launch(config, tmp_path)


def test_an_average_that_is_added_begins_at_the_weights(tmp_path: Path) -> None:
    before = {"average_decay": 0.9, "dynamic_decay": False}
    callbacks = ({"name": "ema_checkpoints", "args": {"max_to_keep": 5}},)

    _launch(_build_config(before, train_steps=10, callbacks=callbacks), tmp_path, "train")

    assert not any("more_averages" in name for name in _read_variables(tmp_path / "ckpt-10"))

    config = _build_config(
        {**before, "more_decays": {"fast": 1.0}}, train_steps=20, callbacks=callbacks
    )
    path = "trainer.optimizer_config.ema.more_decays"
    launch(config, "train", str(tmp_path), allow_config_change=[path])
    saved = {step: _read_variables(tmp_path / f"ckpt-{step}") for step in (10, 20)}
    section = "more_averages/fast/"
    begun = {
        name.replace(section, "model/"): value
        for name, value in saved[20].items()
        if name.startswith(section)
    }

    assert begun
    # Averages are saved without evaluations too.
    assert list(complete_checkpoints(str(tmp_path / "ema_checkpoints"))) == [10, 20]

    for name, value in begun.items():
        np.testing.assert_allclose(
            *(np.frombuffer(buffer, np.float32) for buffer in (value, saved[10][name])), atol=1e-6
        )

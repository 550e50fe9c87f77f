"""From a config to a run: the order of its parts, and what is refused before it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import trainer_kit
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.run.launcher import launch, prepare_runtime
from trainer_kit.run.runner import run_experiment
from trainer_kit.testing import TinyConfig

_story: list[Any] = []


@configclass
class _ToldConfig(LinearConfig):
    pass


@register_task(_ToldConfig)
class _ToldTask(LinearTask):
    """Tells when it is made, and goes no further than that."""

    def __init__(
        self, params: Any, logging_dir: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(params, logging_dir, name)
        _story.append(("task", logging_dir, tf.distribute.get_strategy().num_replicas_in_sync))

    def build_model(self) -> keras.Model:
        raise InterruptedError


@configclass
class _OwnOptimizerConfig(LinearConfig):
    pass


@register_task(_OwnOptimizerConfig)
class _OwnOptimizerTask(_ToldTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return keras.optimizers.SGD(0.1)


@configclass
class _SilentConfig(ExperimentConfig):
    """Tells nothing about batches, as when only the machine knows how many replicas there are."""

    def rules(self) -> Iterator[tuple[str, str]]:
        yield from ()


@configclass
class _WithoutTask(TaskConfig):
    pass


@pytest.fixture(scope="module")
def linear() -> ReadyTrainer:
    return ReadyTrainer(linear_experiment(), LinearTask)


def test_the_task_is_made_in_scope_after_before_task(tmp_path: Path) -> None:
    _story.clear()
    config = linear_experiment(train_steps=5).replace(
        task=_ToldConfig(), runtime={"virtual_cpus": 2}
    )

    with pytest.raises(InterruptedError):
        launch(config, "train", str(tmp_path / "run"), before_task=lambda: _story.append("before"))

    assert _story == ["before", ("task", str(tmp_path / "run"), 2)]


def test_an_error_in_before_task_comes_before_any_file(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UsageError("refused")

    with pytest.raises(UsageError, match="refused"):
        launch(linear_experiment(), "train", str(tmp_path / "run"), before_task=refuse)

    assert list(tmp_path.iterdir()) == []


def test_a_run_without_steps_names_train_steps(tmp_path: Path) -> None:
    config = linear_experiment(train_steps=0)

    with pytest.raises(ConfigError, match=r"^trainer\.train_steps: 0 trains nothing; set it to"):
        launch(config, "train_and_eval", str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_an_optimizer_records_adam_and_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer_kit")
    config = linear_experiment().replace(
        trainer={"optimizer_config": {"optimizer": None, "learning_rate": None}}
    )

    for steps in (20, 30):
        longer = config.replace(trainer={"train_steps": steps})
        launch(longer, "train", str(tmp_path / "run"), enable_async_checkpointing=False)

    params = yaml_loader.parse((tmp_path / "run/params.yaml").read_text(), "params.yaml").values
    optimization = params["trainer"]["optimizer_config"]
    assert optimization["optimizer"]["type"] == "adam"
    assert optimization["learning_rate"]["constant"]["learning_rate"] == 0.001
    assert "no optimizer is chosen; the run takes trainer.optimizer_config=" in caplog.text


def test_an_optimizer_of_the_task_needs_none_in_the_config(tmp_path: Path) -> None:
    _story.clear()
    nothing = {"optimizer_config": {"optimizer": {"type": None}, "learning_rate": {"type": None}}}
    config = linear_experiment().replace(task=_OwnOptimizerConfig(), trainer=nothing)

    with pytest.raises(InterruptedError):
        launch(config, "train", str(tmp_path / "run"))


def test_a_config_without_a_task_names_the_decorator(tmp_path: Path) -> None:
    config = linear_experiment().replace(task=_WithoutTask())
    with pytest.raises(UsageError, match=r"no task is registered for _WithoutTask.*register_task"):
        launch(config, "train", str(tmp_path))


def test_prepare_gives_equal_configs_equal_initial_weights() -> None:
    def first_weights(seed: int) -> list[float]:
        prepare_runtime(linear_experiment().replace(runtime={"random_seed": seed}))
        return keras.initializers.GlorotUniform()((2, 2)).numpy().ravel().tolist()

    assert first_weights(3) == first_weights(3) != first_weights(4)


def test_prepare_sets_the_precision() -> None:
    prepare_runtime(linear_experiment().replace(runtime={"mixed_precision_dtype": "bfloat16"}))

    assert keras.mixed_precision.dtype_policy().compute_dtype == "bfloat16"

    prepare_runtime(linear_experiment().replace(runtime={"mixed_precision_dtype": "float32"}))

    assert keras.mixed_precision.dtype_policy().compute_dtype == "float32"


@pytest.mark.parametrize("section", ["train_data", "validation_data"])
def test_prepare_refuses_a_batch_that_the_replicas_cannot_share(section: str) -> None:
    config = _SilentConfig(task=TinyConfig()).replace(
        runtime={"virtual_cpus": 4}, task={section: {"global_batch_size": 10, "is_training": True}}
    )

    with pytest.raises(
        ConfigError, match=rf"task\.{section}\.global_batch_size: batch 10 on 4 replicas.*8 or 12"
    ):
        prepare_runtime(config)


def test_prepare_takes_any_batch_to_evaluate_on() -> None:
    config = _SilentConfig(task=TinyConfig()).replace(
        runtime={"virtual_cpus": 4}, task={"validation_data": {"global_batch_size": 10}}
    )

    assert prepare_runtime(config).num_replicas_in_sync == 4


def test_a_section_without_a_batch_size_is_left_to_the_task() -> None:
    config = linear_experiment().replace(task={"train_data": {"global_batch_size": 0}})
    assert prepare_runtime(config).num_replicas_in_sync == 1


def test_a_run_in_a_second_thread_is_refused(linear: ReadyTrainer, tmp_path: Path) -> None:
    config = linear_experiment(train_steps=5)
    other = str(tmp_path / "other")
    refused = []

    def begin(start: Callable[[], Any]) -> None:
        try:
            start()
        except UsageError as error:
            refused.append(str(error))

    class StartsOthers(trainer_kit.Callback):
        name = "starts others"

        def train_begin(self, run: Any) -> None:
            task = LinearTask(config.task)
            for start in (
                lambda: launch(config, "train", other),
                lambda: run_experiment(None, task, "train", config, other),
            ):
                thread = threading.Thread(target=begin, args=(start,))
                thread.start()
                thread.join()

    folder = str(tmp_path / "run")
    launch(config, "train", folder, callbacks=[StartsOthers()], trainer=linear.again())

    assert [text.partition(";")[0] for text in refused] == [
        "another thread of this process runs an experiment"
    ] * 2
    assert (tmp_path / "run/final.json").exists()
    assert not (tmp_path / "other").exists()

    # Afterwards there is nothing to wait for.
    launch(config, "train", other, trainer=linear.again())


@pytest.mark.parametrize("task_type", ["evaluator", "ps"])
@pytest.mark.parametrize(
    ("mode", "strategy"), [("train_and_eval", "auto"), ("eval", "multi_worker_mirrored")]
)
def test_only_chief_and_workers_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_type: str, mode: str, strategy: str
) -> None:
    cluster = {
        "cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
        "task": {"type": task_type, "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    config = linear_experiment().replace(runtime={"distribution_strategy": strategy})

    with pytest.raises(
        UsageError,
        match=f"TF_CONFIG calls this process {task_type}; start an evaluator with mode co",
    ):
        launch(config, mode, str(tmp_path / "run"))


def test_a_sidecar_with_the_config_of_a_worker_works_alone(
    linear: ReadyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    config = linear_experiment(train_steps=5)
    folder = str(tmp_path)
    launch(config, "train", folder, trainer=linear.again())
    workers = {
        "distribution_strategy": "multi_worker_mirrored",
        "worker_hosts": "a:1,b:1",
        "task_index": 1,
    }

    _, logs = launch(config.replace(runtime=workers), "continuous_eval", folder)

    _, alone = launch(config, "eval", folder, trainer=linear.again())
    assert logs["accuracy"] == alone["accuracy"]

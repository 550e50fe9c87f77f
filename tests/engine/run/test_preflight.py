"""What is told about a run before TensorFlow is imported."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.resolve import ConfigSources
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import write_params
from trainer_kit.errors import ConfigError, ModelDirInUseError, UsageError
from trainer_kit.evals.checkpoint_selection import select_checkpoint
from trainer_kit.process.run_lock import RunLock
from trainer_kit.run.preflight import RunRequest, check_request

_numbers = itertools.count()

CONFIG = ExperimentConfig(trainer={"train_steps": 10})


@pytest.fixture
def name() -> str:
    """The name of an experiment."""
    name = f"asked_{next(_numbers)}"
    register_experiment(name)(lambda: CONFIG)
    return name


def _check(name: str, folder: Path, mode: str = "train", **values: Any) -> ExperimentConfig:
    return check_request(RunRequest(name, mode, str(folder / "run"), **values)).config


def test_mistakes_of_every_kind_are_in_one_report(name: str, tmp_path: Path) -> None:
    sources = ConfigSources(
        config_files=(f"{tmp_path}/none.yaml",),
        params_overrides=("trainer.train_step=5", "runtime.num_gpus=x"),
    )

    with pytest.raises(ConfigError) as error:
        check_request(RunRequest(name, "trian", None, sources, eval_name="a/b"))

    assert len(error.value.mistakes) == 6

    for text in (
        "--model_dir: is needed",
        "did you mean train",
        "trainer.train_step",
        "none.yaml",
        "runtime.num_gpus",
        "--eval_name: 'a/b' is not a plain",
    ):
        assert text in str(error.value)

    assert isinstance(error.value.__cause__, ConfigError)


def test_a_run_without_steps_is_refused_in_modes_that_train(name: str, tmp_path: Path) -> None:
    sources = ConfigSources(params_overrides=("trainer.train_steps=0",))

    with pytest.raises(ConfigError, match=r"^trainer\.train_steps: 0 trains nothing; set it to"):
        _check(name, tmp_path, sources=sources)
    assert _check(name, tmp_path, "continuous_eval", sources=sources).trainer.train_steps == 0


def test_early_stopping_needs_evaluations_during_training(name: str, tmp_path: Path) -> None:
    overrides = "trainer.early_stopping.metric=accuracy,trainer.early_stopping.patience=3"
    sources = ConfigSources(params_overrides=(overrides,))

    for mode in ("train", "train_and_post_eval"):
        with pytest.raises(
            ConfigError, match=f"trainer.early_stopping: the mode {mode} does not evaluate"
        ):
            _check(name, tmp_path, mode, sources=sources)

    for mode in ("train_and_eval", "continuous_eval"):
        assert _check(name, tmp_path, mode, sources=sources).trainer.early_stopping is not None

    beside = ConfigSources(params_overrides=(overrides, "trainer.early_stopping.eval_name=side"))
    assert _check(name, tmp_path, "train", sources=beside).trainer.early_stopping is not None

    with pytest.raises(ConfigError, match=r"trainer.early_stopping.metric.*: is needed"):
        _check(
            name,
            tmp_path,
            sources=ConfigSources(params_overrides=("trainer.early_stopping.patience=3",)),
        )


@pytest.mark.parametrize(
    ("mode", "profile", "told"),
    [
        (
            "train",
            "10",
            (
                "--profile: '10' is not a window of steps; write the first and the last step, as "
                "in 10:20"
            ),
        ),
        ("train_and_eval", "5:1", "--profile: '5:1' ends before it begins"),
        (
            "eval",
            "1:5",
            "--profile: it traces training steps, but the mode eval does not train; leave it out",
        ),
    ],
)
def test_steps_to_profile_are_a_window_in_a_mode_that_trains(
    name: str, tmp_path: Path, mode: str, profile: str, told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _check(name, tmp_path, mode, profile=profile)

    assert told in str(error.value)
    assert _check(name, tmp_path, "train_and_eval", profile="1:5")


@pytest.mark.parametrize("eval_name", ["", ".", "..", "a/b", "/a", "validation", "eval"])
def test_the_name_of_a_sidecar_is_plain_and_its_own(
    name: str, tmp_path: Path, eval_name: str
) -> None:
    with pytest.raises(ConfigError, match=f"--eval_name: '{eval_name}' is "):
        _check(name, tmp_path, "continuous_eval", eval_name=eval_name)


def test_eval_without_a_checkpoint_gets_the_message_of_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ckpt-5.data-00000-of-00001").touch()
    messages = []

    for look in (
        lambda: _check(name, tmp_path, "eval"),
        lambda: select_checkpoint(str(tmp_path / "run"), "latest", str(tmp_path / "run/best_ckpt")),
    ):
        with pytest.raises(UsageError, match="holds no checkpoint") as error:
            look()
        messages.append(str(error.value))

    assert messages[0] == messages[1]


def test_a_foreign_index_file_does_not_count_as_a_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for file in ("ckpt-best.index", "ckpt-5.iterator.index"):
        (tmp_path / "run" / file).touch()

    with pytest.raises(UsageError, match="holds no checkpoint"):
        _check(name, tmp_path, "eval")

    with pytest.raises(
        UsageError, match=r"no checkpoint of step 5; model_dir holds no checkpoint; give 0 to start"
    ):
        _check(name, tmp_path, from_step=5)


def test_a_step_to_go_on_from_has_to_be_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (100, 20):
        (tmp_path / "run" / f"ckpt-{step}.index").touch()
    for step in (20, 0):
        _check(name, tmp_path, from_step=step)

    with pytest.raises(
        UsageError, match=r"no checkpoint of step 5; there are: 20, 100; give 0 to start again"
    ):
        _check(name, tmp_path, from_step=5)


@pytest.mark.parametrize(
    ("mode", "step", "advice"),
    [
        ("eval", 5, "--checkpoint=5 evaluates"),
        ("eval", 0, "--checkpoint=0"),
        ("continuous_eval", 5, "leave it out"),
    ],
)
def test_from_step_is_refused_in_modes_that_do_not_train(
    name: str, tmp_path: Path, mode: str, step: int, advice: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^--from_step: .* the mode {mode} does not train; {advice}"
    ):
        _check(name, tmp_path, mode, from_step=step)


def test_fine_tunings_refuse_from_step_and_need_a_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _check(name, tmp_path, "continuous_train_and_eval", from_step=5)

    assert (
        "--from_step: it belongs to a single run, but continuous_train_and_eval starts one"
        in str(error.value)
    )
    assert "task.init_checkpoint: mode continuous_train_and_eval needs one folder here" in str(
        error.value
    )


@pytest.mark.parametrize("file", ["run[1]/ckpt-5.index", "run[1]/checkpoint"])
def test_a_checkpoint_or_a_pointer_to_one_is_left_to_the_run(
    name: str, tmp_path: Path, file: str
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()

    checked = check_request(RunRequest(name, "eval", str(tmp_path / "run[1]")))

    assert checked.config == CONFIG


def test_a_remote_model_dir_is_refused_without_tensorflow(name: str) -> None:
    with pytest.raises(ConfigError, match="model_dir: 'gs://bucket/run' is a remote folder"):
        check_request(RunRequest(name, "eval", "gs://bucket/run"))


def test_a_change_of_what_is_not_there_names_the_nearest(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--allow_config_change: the config has no .*train_dat'.*task\.train_data",
    ):
        _check(name, tmp_path, allow_config_change=("trainer", "task.train_dat"))


def test_a_change_of_what_only_the_run_before_had_can_be_allowed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the config has no 'task\.gone'"):
        _check(name, tmp_path, allow_config_change=("task.gone",))

    (tmp_path / "run").mkdir()
    (tmp_path / "run/ckpt-1.index").touch()
    write_params(tmp_path / "run/params.yaml", CONFIG)
    text = (tmp_path / "run/params.yaml").read_text()
    (tmp_path / "run/params.yaml").write_text(text.replace("task:", "task:\n  gone: 1", 1))

    with pytest.raises(ConfigError, match=r"task\.gone: was 1 when this run began"):
        _check(name, tmp_path)

    _check(name, tmp_path, allow_config_change=("task.gone",))


_WORKERS = "runtime.worker_hosts='a:1,b:1'"
_CLUSTER = {"chief": ["a:1"], "worker": ["b:1"]}
_TWO_WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("override", "tf_config", "writes"),
    [
        (f"{_WORKERS},runtime.task_index=0", None, True),
        (f"{_WORKERS},runtime.task_index=1", None, False),
        ("runtime.random_seed=1", None, True),
        (
            "runtime.random_seed=1",
            {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}},
            True,
        ),
        (
            "runtime.random_seed=1",
            {"cluster": _CLUSTER, "task": {"type": "worker", "index": 0}},
            False,
        ),
        (
            "runtime.random_seed=1",
            {"cluster": _TWO_WORKERS, "task": {"type": "worker", "index": 0}},
            True,
        ),
        (
            "runtime.random_seed=1",
            {"cluster": _TWO_WORKERS, "task": {"type": "worker", "index": 1}},
            False,
        ),
    ],
)
def test_a_model_dir_in_use_is_refused_only_to_a_writer(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    tf_config: Any,
    writes: bool,
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config) if tf_config else "")
    refused = pytest.raises(ModelDirInUseError) if writes else contextlib.nullcontext()
    with RunLock(tmp_path / "run"), refused:
        _check(name, tmp_path, sources=ConfigSources(params_overrides=(override,)))

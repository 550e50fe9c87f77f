"""What a sweep refuses before a trial starts, and what it leaves in Optuna's storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.sweeps.sweep_config import SearchRange, SweepConfig

pytest.importorskip("optuna")
from trainer_kit.sweeps.sweep import Sweep

FLAGS = ["--experiment=digits"]
GRID = SweepConfig(sampler="grid", space={"trainer.train_steps": SearchRange(choices=(2, 3))})
LONGER = ExperimentConfig().replace(trainer={"train_steps": 9})
RANGE = SweepConfig(trials=3, space={"trainer.train_steps": SearchRange(low=2, high=30)})


@pytest.mark.parametrize(
    ("flags", "sweep_config", "config", "message"),
    [
        (FLAGS, GRID, LONGER, "trainer.train_steps: 0 -> 9"),
        (
            FLAGS,
            RANGE,
            ExperimentConfig(),
            "contains another sweep: space.trainer.train_steps.choices: [2, 3] -> ",
        ),
        (
            ["--experiment=other"],
            GRID,
            ExperimentConfig(),
            "another sweep: it tries --experiment=digits; give another --sweep_dir",
        ),
    ],
)
def test_another_sweep_in_the_folder_is_refused(
    flags: list[str],
    sweep_config: SweepConfig,
    config: ExperimentConfig,
    message: str,
    tmp_path: Path,
) -> None:
    Sweep(str(tmp_path), FLAGS, GRID, ExperimentConfig())

    with pytest.raises(UsageError) as caught:
        Sweep(str(tmp_path), flags, sweep_config, config)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_trial_takes_no_folder_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "trial_0000").mkdir()
    sweep = Sweep(str(tmp_path), FLAGS, GRID, ExperimentConfig())

    with pytest.raises(UsageError, match=r"trial_0000 is not of this sweep; move it, or give"):
        sweep.run(jobs=1)


@pytest.mark.parametrize(("sweep_config", "count"), [(GRID, 2), (RANGE, 3)])
def test_each_trial_waits_once(sweep_config: SweepConfig, count: int, tmp_path: Path) -> None:
    for _ in range(2):
        sweep = Sweep(str(tmp_path), FLAGS, sweep_config, ExperimentConfig())

        states = [trial.state.name for trial in sweep.study.trials]
        assert states == ["WAITING"] * count


def test_an_interrupted_trial_waits_with_its_values(tmp_path: Path) -> None:
    sweep = Sweep(str(tmp_path), FLAGS, RANGE, ExperimentConfig())
    values = RANGE.space["trainer.train_steps"]
    trials = [sweep.study.ask(), sweep.study.ask()]
    steps = [values.suggest(trial, "trainer.train_steps") for trial in trials]
    sweep.study.tell(trials[0], 1.0)

    next_sweep = Sweep(str(tmp_path), FLAGS, RANGE, ExperimentConfig())

    trial = next_sweep.study.ask()
    assert trial.number == 1
    assert values.suggest(trial, "trainer.train_steps") == steps[1]

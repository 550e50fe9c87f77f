"""The experiment `digits_tasks`: its labels, its shared net, and a short run."""

from __future__ import annotations

from pathlib import Path

import trainer_kit
from experiments.digits_tasks import digits_tasks
from experiments.digits_tasks.task import DigitsTasks, split_digits
from trainer_kit.run.launcher import launch


def test_the_parity_of_a_digit_is_its_last_bit() -> None:
    task = DigitsTasks(digits_tasks().task)
    (_, digits), _ = split_digits()
    for name, labels in {"digit": digits, "parity": digits % 2}.items():
        one = task.tasks[name]
        data = one.build_inputs(one.task_config.train_data.replace(is_training=True))
        _, batch = next(iter(data.at(0)))
        assert batch.shape == (32,) and int(batch.numpy().max()) <= labels.max()


def test_the_tasks_share_the_hidden_layer() -> None:
    model = DigitsTasks(digits_tasks().task).build_model()
    assert model.count_params() == (64 * 64 + 64) + (64 * 10 + 10) + (64 * 2 + 2)


def test_a_short_run_learns_both_tasks(tmp_path: Path) -> None:
    short = {"train_steps": 100, "steps_per_loop": 100, "summary_interval": 100}
    config = trainer_kit.get_experiment("digits_tasks").replace(trainer=short)
    _, logs = launch(config, "train_and_eval", str(tmp_path))
    assert logs["digit"]["accuracy"] > 0.7 and logs["parity"]["accuracy"] > 0.7  # by chance: 0.1 and 0.5
    assert (tmp_path / "best_checkpoints" / "parity" / "info.json").is_file()

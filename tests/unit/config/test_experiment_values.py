"""Which values of a config an experiment has set."""

from __future__ import annotations

from trainer_kit.config.resolve import non_default_paths
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig

RATE = {"type": "constant", "constant": {"learning_rate": 0.5}}


@configclass
class _Inner(Config):
    """A section with a field that has to be given."""

    depth: int
    size: int = 3


@configclass
class _Own(TaskConfig):
    """A task whose class has its own data, and a section that needs a value."""

    train_data: DataConfig = DataConfig(global_batch_size=16)
    model: _Inner = _Inner(depth=5)


def test_the_default_of_the_class_around_a_section_counts() -> None:
    assert set(non_default_paths(ExperimentConfig(task=_Own()))) == set()

    changed = ExperimentConfig(task=_Own()).replace(
        task={"train_data": {"global_batch_size": 1}, "model": {"size": 4}}
    )
    assert set(non_default_paths(changed)) == {
        "task.train_data.global_batch_size",
        "task.model.size",
    }


def test_a_field_that_has_to_be_given_is_set() -> None:
    assert list(non_default_paths(_Inner(depth=5))) == ["depth"]


def test_chosen_branches_and_named_sections_have_own_defaults() -> None:
    config = ExperimentConfig(task=_Own()).replace(
        task={"validation_data": {"one": DataConfig(), "two": DataConfig(global_batch_size=7)}},
        trainer={
            "optimizer_config": {
                "optimizer": {"type": "adam", "adam": {"beta_1": 0.5}},
                "learning_rate": RATE,
            }
        },
    )

    assert set(non_default_paths(config)) == {
        "task.validation_data.two.global_batch_size",
        "trainer.optimizer_config.optimizer.type",
        "trainer.optimizer_config.optimizer.adam.beta_1",
        "trainer.optimizer_config.learning_rate.type",
        "trainer.optimizer_config.learning_rate.constant.learning_rate",
    }

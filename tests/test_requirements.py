"""What is refused when a trainer is made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.requirements import check_model, check_sections
from trainer_kit.testing import tiny_experiment


@pytest.mark.parametrize("name", ["trainer", "task", "runtime"])
def test_a_config_without_a_section_is_refused(name: str) -> None:
    sections = {"trainer": 1, "task": 1, "runtime": 1}
    del sections[name]
    with pytest.raises(AttributeError, match=f"a section '{name}'"):
        check_sections(SimpleNamespace(**sections), False, False)


@pytest.mark.parametrize("name", ["train_data", "validation_data"])
def test_data_is_needed_unless_a_dataset_was_given(name: str) -> None:
    config = SimpleNamespace(trainer=1, runtime=1, task=SimpleNamespace())
    with pytest.raises(AttributeError, match=rf"'task\.{name}', or a ready-made dataset"):
        check_sections(config, name == "train_data", name == "validation_data")
    check_sections(config, False, False)
    check_sections(tiny_experiment(), True, True)


def test_a_model_without_variables_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"Module has no variables yet; build it in build_model"):
        check_model(tf.Module(), False, tf.distribute.get_strategy())


def test_xla_is_refused_on_several_replicas() -> None:
    model, replicas = tf.Module(), SimpleNamespace(num_replicas_in_sync=2)
    model.weight = tf.Variable(1.0)
    with pytest.raises(UsageError, match="enable_xla needs one replica, and there are 2"):
        check_model(model, True, replicas)
    check_model(model, False, replicas)
    check_model(model, True, tf.distribute.get_strategy())

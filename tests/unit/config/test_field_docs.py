"""The sentences about config fields: each field has one, read from the docstring as written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer_kit.config.field_docs import read_class_summary, read_docs_by_path, read_field_docs
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig
from trainer_kit.experiments.char_lm.config import CharLmConfig
from trainer_kit.experiments.digits.config import DigitsConfig
from trainer_kit.experiments.digits_mlp.config import DigitsMlpConfig


@configclass
class Outer(Config):
    """What surrounds it.

    Attributes:
      count: How many there are; 0 means
        none of them. A second sentence. `code` begins a third one.
      data: What it is made of.

    Not an entry: this text comes after the attributes.
    """

    count: int = 3
    data: DataConfig = DataConfig()
    unknown: str


@configclass
class Inner(Outer):
    """Inherits all but one sentence.

    Attributes:
      count: Another sentence.
    """


def _iterate_classes(config_class: type[Config]) -> Iterator[type[Config]]:
    yield config_class
    for doc in read_field_docs(config_class).values():
        if doc.section is not None and doc.section is not Config:
            yield from _iterate_classes(doc.section)


@pytest.mark.parametrize(
    "config_class", [ExperimentConfig, CharLmConfig, DigitsConfig, DigitsMlpConfig]
)
def test_every_config_field_has_a_sentence(config_class: type[Config]) -> None:
    wrong = [
        f"{cls.__name__}.{name}: {doc.first_sentence!r}; write a sentence for it under"
        " Attributes: of the class"
        for cls in dict.fromkeys(_iterate_classes(config_class))
        for name, doc in read_field_docs(cls).items()
        if not (
            doc.first_sentence.endswith(".")
            and doc.first_sentence[0].isupper()
            and len(doc.first_sentence) > 15
        )
    ]

    assert wrong == []


def test_an_entry_is_read_with_the_lines_that_continue_it() -> None:
    count, data, unknown = read_field_docs(Outer).values()

    assert (
        count.text
        == "How many there are; 0 means none of them. A second sentence. `code` begins a third one."
    )
    assert count.first_sentence == "How many there are; 0 means none of them."
    assert count.allowed_values == "a whole number"
    assert count.default == "3"
    assert count.section is None
    assert data.text == "What it is made of."
    assert data.default == ""
    assert data.section == DataConfig
    assert unknown.text == ""
    assert unknown.first_sentence == ""
    assert unknown.default == ""
    assert read_class_summary(Outer) == "What surrounds it."


def test_a_subclass_inherits_sentences_and_replaces_them() -> None:
    docs = read_field_docs(Inner)
    assert docs["count"].text == "Another sentence."
    assert docs["data"].text == "What it is made of."


def test_sections_that_hold_several_are_known_by_their_class() -> None:
    trainer = read_field_docs(type(ExperimentConfig().trainer))
    sections = {
        name: doc.section.__name__ for name, doc in trainer.items() if doc.section is not None
    }

    assert sections["callbacks"] == "CallbackConfig"
    assert sections["best_checkpoints"] == "BestCheckpointConfig"


def test_docs_by_path_include_branches_not_chosen() -> None:
    docs = read_docs_by_path(ExperimentConfig())

    assert docs["trainer.train_steps"].first_sentence.startswith(
        "The global step at which training ends"
    )
    assert "trainer.optimizer_config.optimizer.adam.beta_1" in docs

"""BERT with a classifier, cut to one layer of 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.compat.model_garden.tiny.records import example, generator, integers, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, trainer

WORDS = 40
LENGTH = 12
BATCH = 8


def write(folder: Path) -> None:
    """Sentences of word numbers; the label is whether the first word is one of the upper half."""
    for part, count in (("train", 48), ("validation", 20)):
        random = generator(part)
        write_shards(folder, part, [_sentence(random) for _ in range(count)])


def _sentence(random: Any) -> Any:
    words = random.integers(1, WORDS, size=LENGTH)
    length = random.integers(LENGTH // 2, LENGTH + 1)
    mask = [1] * length + [0] * (LENGTH - length)
    return example(
        input_ids=integers(words * mask),
        input_mask=integers(mask),
        segment_ids=integers([0] * LENGTH),
        label_ids=integers([words[0] > WORDS // 2]),
    )


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """No dropout in the encoder; the 0.1 before the classifier is the default of a class, which no
    config reaches.
    """
    # Not above: the import takes seconds, and each worker of pytest imports this module.
    import official.nlp.configs.finetuning_experiments  # noqa: F401 -- registers it

    bert = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "num_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": LENGTH,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
    }
    task = {
        "model": {"num_classes": 2, "encoder": {"type": "bert", "bert": bert}},
        "train_data": data(folder, "train", BATCH, seq_length=LENGTH),
        "validation_data": data(folder, "validation", BATCH, seq_length=LENGTH),
    }
    optimizer_config = {
        "learning_rate": {"polynomial": {"initial_learning_rate": 3e-3, "decay_steps": 50}},
        "warmup": {"polynomial": {"warmup_steps": 5}},
    }
    return cut(
        "bert/sentence_prediction", task, trainer(steps_per_loop, optimizer_config=optimizer_config)
    )

"""The transformer for WMT, cut to one layer of 16, with a SentencePiece model trained on a few sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import official.nlp.configs.wmt_transformer_experiments  # noqa: F401 -- registers "wmt_transformer/large"
import sentencepiece

from tests.engine.compat.model_garden.tiny.records import example, generator, strings, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, cut, data, optimizer, trainer

LENGTH, BATCH = 12, 8
WORDS = ("ab", "bc", "cd", "de", "ea", "abc", "bcd")


def write(folder: Path) -> None:
    """Sentences and the same words in reverse order; and the SentencePiece model of both."""
    lines: list[str] = []
    for part, count in (("train", 48), ("validation", 12)):
        random = generator(part)
        sentences = [[str(word) for word in random.choice(WORDS, size=random.integers(2, 5))] for _ in range(count)]
        lines += [" ".join(sentence) for sentence in sentences]
        write_shards(folder, part, [_pair(sentence) for sentence in sentences])
    _train_sentencepiece(folder, lines)


def _pair(sentence: list[str]) -> Any:
    source, target = " ".join(sentence), " ".join(reversed(sentence))
    return example(en=strings([source.encode()]), reverse_en=strings([target.encode()]))


def _train_sentencepiece(folder: Path, lines: list[str]) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=16,
        bos_id=-1,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        num_threads=1,
        minloglevel=2,
    )


def config(folder: Path, steps_per_loop: int = STEPS_PER_LOOP) -> Any:
    """No dropout. A batch of training data is as many tokens as are told; one of validation data, sentences."""
    one_side = {
        "num_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "intermediate_dropout": 0.0,
    }
    model = {
        "encoder": one_side,
        "decoder": one_side,
        "embedding_width": 16,
        "dropout_rate": 0.0,
        "decode_max_length": LENGTH,
        "beam_size": 2,
    }
    languages = {"tfds_name": "", "tfds_split": "", "src_lang": "en", "tgt_lang": "reverse_en"}
    reading = {**languages, "max_seq_length": LENGTH}
    task = {
        "model": model,
        "train_data": data(folder, "train", BATCH * LENGTH, **reading),
        "validation_data": data(folder, "validation", BATCH, **reading),
        "sentencepiece_model_path": str(folder / "pieces.model"),
    }
    optimizer_config = optimizer("adam", 3e-3, beta_2=0.997, epsilon=1e-9)
    return cut("wmt_transformer/large", task, trainer(steps_per_loop, optimizer_config=optimizer_config))

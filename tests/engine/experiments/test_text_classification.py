"""The experiment `text_classification`: a short run on a folder of texts, and its export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.experiments.text_classification import TextTask, read_docstrings, split_texts

WORDS = {"cold": ["snow", "ice", "winter", "frost"], "hot": ["sun", "summer", "desert", "fire"]}


def write_texts(folder: Path) -> str:
    """Writes 30 texts of each class, which end with a word of their own; returns the folder."""
    random = np.random.default_rng(0)
    for name, words in WORDS.items():
        (folder / name).mkdir(parents=True)
        for number in range(30):
            text = " ".join([*random.choice(words, 5), f"{name}{number}"])
            (folder / name / f"{number}.txt").write_text(text)
    return str(folder)


def test_a_short_run_learns_and_exports_a_model_of_texts(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    short = {"train_steps": 40, "steps_per_loop": 40, "validation_interval": 40}
    name = "text_classification"
    config = tk.get_experiment(name).replace(task={"folder": folder}, trainer=short)

    _, logs = tk.launch(config, "train_and_eval", str(tmp_path / "run"), experiment=name)
    exported = tk.export(tmp_path / "run", tmp_path / "exported")

    assert np.isfinite(logs["validation_loss"])
    assert logs["accuracy"] > 0.9  # by chance: 0.5
    model = tf.saved_model.load(exported.path)
    texts = tf.constant(["Snow, and ice!", "fire in the desert"])
    logits = model.signatures["serving_default"](text=texts)["outputs"].numpy()
    assert logits.argmax(axis=1).tolist() == [0, 1]

    (training, _), (held_out, _) = split_texts(folder)
    vocabulary = set(TextTask(config.task).vectorizer.get_vocabulary())
    assert (len(training), len(held_out)) == (48, 12)
    assert {text.split()[-1].decode() for text in training} < vocabulary
    assert not {text.split()[-1].decode() for text in held_out} & vocabulary


def test_docstrings_are_those_of_the_package() -> None:
    assert any("coroutine" in docstring for docstring in read_docstrings("asyncio"))
    assert not any("coroutine" in docstring for docstring in read_docstrings("xml"))

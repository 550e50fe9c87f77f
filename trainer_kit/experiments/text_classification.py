r"""Text classification: which package of Python's library is a docstring from?

Data: the docstrings of seven packages of the standard library of the Python that runs this, about
1,800 different ones. Every fifth one is held out. For your own texts, make a folder with a
subfolder of .txt files for each class, and give it as `task.folder`.

Run:
  python -m trainer_kit.train --experiment=text_classification --mode=train_and_eval \
    --model_dir=runs/text
  trainer-kit export runs/text --format=saved_model

The export takes texts: the vocabulary and the splitting into words are part of it.

Expected: accuracy 0.91 with Python 3.11, within 0.02; other versions have other docstrings. The
most frequent package for every docstring: 0.20.

Cost: a quarter of a minute on two CPU cores.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from pathlib import Path
from typing import Any

import keras
import numpy as np

import trainer_kit as tk

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "unittest", "xml")


@tk.configclass
class TextConfig(tk.TaskConfig):
    """The settings of the task; `--params_override=task.words=2000` changes one.

    Attributes:
      folder: The folder of your texts, CLASS/NAME.txt; empty means docstrings of Python's library.
      words: The size of the vocabulary: the most frequent words of the training part.
      length: The number of words that the model reads; the rest of a text is cut off.
      width: The number of features of a word.
    """

    folder: str = ""
    words: int = 5000
    length: int = 100
    width: int = 64


@tk.register_task(TextConfig)
class TextTask(tk.Task):
    """Tells classes of texts apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.task_config
        self.vectorizer = keras.layers.TextVectorization(
            config.words, output_sequence_length=config.length
        )
        # Words that only held-out texts have are unknown, as they will be in use.
        (texts, _), _ = split_texts(self.task_config.folder)
        self.vectorizer.adapt(texts)

    def build_model(self) -> keras.Model:
        """Returns the model: word numbers, int64 [batch, length], to logits [batch, classes]."""
        config = self.task_config
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((config.length,), dtype="int64"),
                # Number 0 fills short texts up; the mask keeps it out of the mean.
                layers.Embedding(config.words, config.width, mask_zero=True),
                layers.GlobalAveragePooling1D(),
                layers.Dropout(0.5),
                layers.Dense(len(read_texts(config.folder))),
            ]
        )

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns word numbers [batch, length] and labels [batch], numbered in the pipeline."""
        training, held_out = split_texts(self.task_config.folder)
        part = training if params.is_training else held_out
        return tk.ArraySource(part, params, transform=lambda b: (self.vectorizer(b[0]), b[1]))

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean cross entropy of the batch."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the share of texts that get their class."""
        return [keras.metrics.SparseCategoricalAccuracy("accuracy")]

    def preprocess(self, inputs: dict[str, Any]) -> Any:
        """Returns word numbers for texts [batch]: what an export does before it calls the model."""
        return self.vectorizer(inputs["text"])

    def serving_examples(self) -> dict[str, np.ndarray]:
        """Returns texts [batch], which show an export what it takes."""
        _, (texts, _) = split_texts(self.task_config.folder)
        return {"text": texts[:8]}


Part = tuple[np.ndarray, np.ndarray]  # texts in UTF-8 [n], labels int64 [n]


@functools.cache
def split_texts(folder: str) -> tuple[Part, Part]:
    """Returns the training part and the held-out part, which is every fifth text."""
    classes = [sorted(set(texts)) for texts in read_texts(folder).values()]  # no text twice
    texts = np.array([text.encode() for one_class in classes for text in one_class], object)
    labels = np.repeat(np.arange(len(classes)), [len(one_class) for one_class in classes])
    held_out = np.arange(len(texts)) % 5 == 0
    return (texts[~held_out], labels[~held_out]), (texts[held_out], labels[held_out])


@functools.cache
def read_texts(folder: str) -> dict[str, list[str]]:
    """Returns the texts of each class, by its name."""
    if not folder:
        return {package: read_docstrings(package) for package in PACKAGES}
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    return {path.name: [text.read_text("utf-8") for text in path.glob("*.txt")] for path in classes}


def read_docstrings(package: str) -> list[str]:
    """Returns the docstrings of the modules, classes and functions of a package."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = []
    for path in Path(sysconfig.get_path("stdlib"), package).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        docstrings += [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
    return [docstring for docstring in docstrings if docstring]


@tk.register_experiment("text_classification")
def text_classification() -> tk.ExperimentConfig:
    """Returns the config: 800 steps of Adam."""
    train = {"is_training": True, "seed": 1, "global_batch_size": 32}
    held_out = {"is_training": False, "global_batch_size": 32}
    steps = {"train_steps": 800, "steps_per_loop": 100, "validation_interval": 200}
    adam = {"optimizer": "adam", "learning_rate": 0.003}
    trainer = {**steps, "optimizer_config": adam, "best_checkpoint_eval_metric": "accuracy"}
    data = {"train_data": train, "validation_data": held_out}
    config = tk.ExperimentConfig(task=TextConfig())
    return config.replace(task=data, trainer=trainer, runtime={"random_seed": 1})

"""Finds values that Model Garden's experiments leave unset but cannot be built without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig
from official.modeling.hyperparams.oneof import OneOfConfig as TheirOneOfConfig
from official.modeling.optimization.optimizer_factory import LEGACY_OPTIMIZERS_CLS

from trainer_kit.config.schema.base import OneOfConfig
from trainer_kit.errors import Mistake

# Path in a task's section -> advice. Paths that a task does not have are ignored.
_NEEDED = {
    "class_names": "give the names of the classes, as a list",
    "sentencepiece_model_path": "give the file of the SentencePiece model",
    "model.input_size": "give height, width and channels of an image, as [224, 224, 3]",
    "model.num_classes": "give the number of classes",
    "train_data.num_classes": "give the number of classes",
    "train_data.vocab_file": "give the file of the vocabulary",
    "validation_data.vocab_file": "give the file of the vocabulary",
}
_MAY_BE_NONE = ("staircase",)
_NO_DATA = "give input_path, the pattern of its files, or tfds_name and tfds_split"


def unset_optimization(options: Any) -> list[Mistake]:
    """Returns the mistakes in either framework's optimizer section: unset values, and an unpublished optimizer."""
    chosen_parts, optimizer = ("optimizer", "learning_rate"), getattr(options, "optimizer", None)
    found = [one for part in chosen_parts for one in _unset_type(options, part, f"trainer.optimizer_config.{part}")]
    if optimizer is not None and not _is_published(optimizer.type):
        problem = f"the release of Model Garden has no {optimizer.type}"
        advice = f"choose one of: {_choices(optimizer)}"
        found.append(Mistake("trainer.optimizer_config.optimizer.type", problem, advice))
    for part in ("learning_rate", "warmup"):
        section: Any = getattr(options, part, None)
        chosen = section.get() if section is not None and section.type else None
        for name, value in chosen.as_dict().items() if chosen is not None else ():
            if value is None and name not in _MAY_BE_NONE:
                path = f"trainer.optimizer_config.{part}.{section.type}.{name}"
                found.append(Mistake(path, "has no value, and is needed", "give it one"))
    return found


def unset_values(section: Any, part: str, path: str = "task") -> list[Mistake]:
    """Returns a mistake for each unset value in a Model Garden task's section that a part of the task requires.

    Args:
      section: The task's section.
      part: The part that is created: "" (the task itself), "model", or a data section such as "train_data".
      path: The path of the section in the experiment.
    """
    found = []
    for needed, advice in _NEEDED.items():
        outer, _, name = needed.rpartition(".")
        holder = getattr(section, outer, None) if outer else section
        value = getattr(holder, name, _SET)
        needless = name == "vocab_file" and not _needs_vocabulary(holder, outer)
        if _belongs(needed, part) and not needless and _is_unset(value):
            found.append(Mistake(f"{path}.{needed}", f"has no value ({value!r}), and is needed", advice))
    return [*found, *_no_data(section, part, path)]


def unset_choices(section: Any, path: str) -> list[Mistake]:
    """Returns a mistake for each OneOfConfig without a `type`, in a section and the sections inside it."""
    found: list[Mistake] = []
    for name, inner in vars(section).items():
        if isinstance(inner, TheirConfig) and name not in section.RESERVED_ATTR:
            where = f"{path}.{name}"
            found += _unset_type(section, name, where) if isinstance(inner, TheirOneOfConfig) else []
            found += unset_choices(inner, where)
    return found


_SET = object()


def _belongs(path: str, part: str) -> bool:
    """Whether a part requires the value at `path`. The model needs no vocabulary, the task itself no training data."""
    if part == "model":
        return not path.endswith("vocab_file")
    return not path.startswith("train_data") if part == "" else path.startswith(f"{part}.")


def _needs_vocabulary(data: Any, name: str) -> bool:
    """Whether data needs a vocabulary: text without a TensorFlow Hub module does, and question answering validation."""
    if hasattr(data, "preprocessing_hub_module_url"):
        return not data.preprocessing_hub_module_url
    return name == "validation_data" and bool(getattr(data, "input_path", ""))


def _is_unset(value: Any) -> bool:
    negative = isinstance(value, int) and value <= 0
    return value is None or negative or (isinstance(value, (str, list, tuple)) and not value)


def _no_data(section: Any, part: str, path: str) -> Iterator[Mistake]:
    data: Any = getattr(section, part, None) if part else None
    if hasattr(data, "input_path") and hasattr(data, "tfds_name") and not data.input_path and not data.tfds_name:
        yield Mistake(f"{path}.{part}", "names no data", _NO_DATA)


def _unset_type(around: Any, name: str, path: str) -> Iterator[Mistake]:
    section = getattr(around, name, None)
    if section is not None and not section.type:
        yield Mistake(f"{path}.type", "has no value, and is needed", f"choose one of: {_choices(section)}")


def _choices(section: Any) -> str:
    if isinstance(section, OneOfConfig):
        names = list(section.branches())
    else:
        names = [one for one, value in vars(section).items() if isinstance(value, TheirConfig)]
    return ", ".join(filter(_is_published, names))


def _is_published(kind: str | None) -> bool:
    """Whether Model Garden's release has the optimizer's class; for an unpublished one it has only a name."""
    return not isinstance(LEGACY_OPTIMIZERS_CLS.get(kind), str)

"""What a tf.data.Dataset is made of, as its Python objects tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any


def transformations(dataset: Any) -> Iterator[Any]:
    """Yields the dataset and all datasets that it is made from, each once; not those inside its functions."""
    waiting, seen = [dataset], set()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += part._inputs()


def kind_of(dataset: Any) -> str:
    """Returns "ParallelMap" for a _ParallelMapDataset."""
    return kind_named(type(dataset).__name__)


def kind_named(name: str) -> str:
    """Returns "ParallelMap" for the class _ParallelMapDataset and for the op ParallelMapDatasetV2."""
    return re.sub(r"Dataset(V\d)?$", "", name.lstrip("_"))

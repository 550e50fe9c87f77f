"""`tensorpack.predict`."""

from __future__ import annotations

import importlib
from typing import Any

from trainer_kit.compat.tensorpack.installed_package import export_names, extend_path
from trainer_kit.errors import UsageError

__path__ = extend_path(__path__, "predict")

__all__ = export_names(
    globals(), ["base", "concurrency", "config", "dataset", "feedfree", "multigpu"]
)


class MultiProcessDatasetPredictor:
    """Refused: TensorFlow 2 has started in this process, and does not run in forked ones."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise UsageError(
            "MultiProcessDatasetPredictor forks this process, in which TensorFlow 2 runs already;"
            " use SimpleDatasetPredictor, which uses all cores"
        )


_dataset: Any = importlib.import_module(f"{__name__}.dataset")
_dataset.MultiProcessDatasetPredictor = MultiProcessDatasetPredictor

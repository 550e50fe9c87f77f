"""Importing TensorFlow and Keras imports nothing for wrappers and plots, which are there when they are used."""

from __future__ import annotations

import sys

from trainer_kit.deferred_imports import defer_imports
from trainer_kit.testing import ForkServer


def use_wrappers_and_plots() -> None:
    """In a process that has imported TensorFlow and Keras as a command does."""
    defer_imports()
    assert sum(type(finder).__name__ == "_DeferringFinder" for finder in sys.meta_path) == 1
    import keras
    import tensorflow as tf

    assert tf.keras.layers.Dense and "keras.wrappers" in sys.modules
    for heavy in ("sklearn", "matplotlib"):
        assert heavy not in sys.modules, heavy
    from keras.wrappers import SKLearnClassifier

    assert SKLearnClassifier is tf.keras.wrappers.SKLearnClassifier
    assert any(base.__module__ == "sklearn.base" for base in SKLearnClassifier.__mro__)
    assert "matplotlib" not in sys.modules
    assert callable(keras.visualization.plot_image_gallery)
    assert "matplotlib" in sys.modules
    try:
        import keras.wrappers.nothing  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        assert "keras.wrappers.nothing" in str(error)
    else:
        raise AssertionError("a module that does not exist was found")


def test_wrappers_and_plots_are_imported_when_they_are_used_and_not_before() -> None:
    with ForkServer() as server:
        ended = server.run(use_wrappers_and_plots)
    assert ended.code == 0, ended.text

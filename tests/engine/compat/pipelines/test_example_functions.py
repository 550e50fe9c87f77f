"""How users' functions of one example are called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.compat.pipelines.example_functions import apply_augmentation, apply_preprocessing
from trainer_kit.errors import UsageError


def pairs() -> tf.data.Dataset:
    """Returns images, float32 [4, 4, 3], of ones, with labels, int64 []."""
    return tf.data.Dataset.range(6).map(lambda number: (tf.ones([4, 4, 3]), number))


def read_first(dataset: tf.data.Dataset) -> Any:
    return next(iter(dataset))


class Reader:
    """A callable object, with a method that is a function of an example, too."""

    def __call__(self, example: Any) -> Any:
        return example, 2 * example

    method = __call__


READERS: dict[str, Callable[[], Any]] = {
    "an object": Reader,
    "a tf.function of a method": lambda: tf.function(Reader().method),
    "a partial": lambda: functools.partial(
        lambda example, factor: (example, factor * example), factor=2
    ),
    "any keywords": lambda: lambda **named: (named["example"], 2 * named["example"]),
}


@pytest.mark.parametrize("name", READERS)
def test_preprocessing_is_called_by_keyword(name: str) -> None:
    dataset = apply_preprocessing(tf.data.Dataset.range(3, 5), READERS[name]())
    assert [int(part) for part in read_first(dataset)] == [3, 6]


def unconditional(example: Any, size: int) -> Any:
    return example


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda record: record, "missing a required argument: 'record'"),
        (unconditional, "missing a required argument: 'size'"),
        (functools.partial(unconditional, input_size=3), "incorrect arguments"),
        ("decode", "'decode' is not a callable object"),
    ],
)
def test_preprocessing_that_cannot_be_called_is_told(function: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=rf"{problem}.*called as preprocessing\(example=record\)"):
        apply_preprocessing(tf.data.Dataset.range(2), function)


def test_conditions_over_tensors_are_converted() -> None:
    def double_large(example: Any) -> Any:
        if example > 3:
            example = 2 * example
        return example

    dataset = apply_preprocessing(tf.data.Dataset.range(3, 5), double_large)
    assert [int(number) for number in dataset] == [3, 8]


class Flipped(keras.layers.Layer):
    """A layer of an image."""

    def call(self, image: Any, training: bool = False) -> Any:
        return -image


AUGMENTATIONS: dict[str, Callable[[], Any]] = {
    "all parts": lambda: lambda image, label: (-image, label),
    "any parts": lambda: lambda *parts: (-parts[0], *parts[1:]),
    "one part": lambda: lambda image: -image,
    "one part and a setting": lambda: lambda image, strength=1.0: -image * strength,
    "a layer": Flipped,
    "a model": lambda: keras.Sequential([Flipped()]),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_gets_all_parts_or_the_first(name: str) -> None:
    image, label = read_first(apply_augmentation(pairs(), AUGMENTATIONS[name]()))
    assert (float(image[0, 0, 0]), int(label)) == (-1, 0)


def test_augmentation_of_three_arguments_for_two_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs 3 arguments, but preprocessing returns 2 parts"):
        apply_augmentation(pairs(), lambda image, label, weight: (image, label, weight))
    with pytest.raises(UsageError, match="data_augmentation: 'flip' is not a callable"):
        apply_augmentation(pairs(), "flip")


def test_random_ops_draw_the_same_numbers_in_two_runs() -> None:
    def draw_numbers() -> list[float]:
        tf.random.set_seed(1)
        noisy = apply_augmentation(
            tf.data.Dataset.range(400), lambda number: tf.random.uniform([], seed=2)
        )
        return [float(number) for number in noisy]

    assert draw_numbers() == draw_numbers()

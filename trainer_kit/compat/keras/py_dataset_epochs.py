"""PyDatasetEpochs: the batches of a keras.utils.PyDataset, from any position on."""

from __future__ import annotations

import collections
import functools
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.compat.keras.keras_types import ClassWeight
from trainer_kit.inputs.dataset_resume import Resumption
from trainer_kit.runtime.keras_internals import get_data_adapter

_MOVES_RANDOM_STATE = (
    "x: resume is not exact: a batch of the PyDataset draws from the global state of random or"
    " np.random, which is in no checkpoint; draw from np.random.default_rng((seed, index)) in"
    " __getitem__"
)


class Keras2Sequence(keras.utils.PyDataset):
    """The batches of a tf_keras.utils.Sequence, read by one thread, as tf_keras does by default."""

    def __init__(self, sequence: Any) -> None:
        super().__init__()
        self._sequence = sequence
        self._has_begun = False

    def __len__(self) -> int:
        return len(self._sequence)

    def __getitem__(self, index: int) -> Any:
        return self._sequence[index]

    def on_epoch_begin(self) -> None:
        self._has_begun = True

    def on_epoch_end(self) -> None:
        # Keras 3 also calls it before the first epoch, and twice between evaluations.
        if self._has_begun:
            self._sequence.on_epoch_end()
        self._has_begun = False


class PyDatasetEpochs:
    """A Source of global batches, of one pass after the other.

    The `workers` of the PyDataset are threads here, also with use_multiprocessing. Its
    `on_epoch_begin` and `on_epoch_end` are called for each epoch, including those before a restart,
    so that a state that depends on these calls is the same. The order of the batches in a pass is a
    pure function of `seed` and the number of the pass.

    Args:
      dataset: The PyDataset, or a Sequence of tf_keras.
      seed: The seed of the orders. None: passes are not shuffled.
      class_weight: The argument of `Model.fit`.

    Attributes:
      batches_per_epoch: The number of batches in a pass. None if there is no end.
      steps_per_pass: The number of batches in an epoch. At first those of a pass over the
        PyDataset.
      element_spec: The spec of a batch.
      ends_with_pass: Whether an iterator ends with its epoch: no batch is then read before
        callbacks have begun its epoch. False at first.
      evaluation_number: The number of the evaluation that reads the next pass, counted from 0.
        None: the data is for training.
    """

    def __init__(
        self, dataset: Any, seed: int | None = None, class_weight: ClassWeight | None = None
    ) -> None:
        if not isinstance(dataset, keras.utils.PyDataset):
            dataset = Keras2Sequence(dataset)
        self._dataset = dataset
        self._seed = seed
        self._class_weight = class_weight

        # The adapter reads the first batches for the spec. They show whether batches draw from a
        # global state.
        adapter = get_data_adapter(dataset, shuffle=False)
        self.batches_per_epoch: int | None = adapter.num_batches
        state_before = _format_random_state()
        self.element_spec = adapter.get_tf_dataset().element_spec
        state_after = _format_random_state()
        self._moves_random_state = state_before != state_after

        self.steps_per_pass = self.batches_per_epoch or sys.maxsize
        self.evaluation_number: int | None = None
        self.ends_with_pass = False
        # The number of epochs that have begun, and the number of the epoch that is read.
        self._begun_epochs = 0
        self._epoch_number = -1

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the batches from `position` on. See Source.

        They end with the epoch if `ends_with_pass`.
        """
        del input_context
        batches = tf.data.Dataset.from_generator(
            lambda: self._generate_batches(position), output_signature=self.element_spec
        )
        if self._class_weight is not None:
            # Keras turns the weights of classes into those of examples.
            adapter = get_data_adapter(batches, class_weight=self._class_weight)
            batches = adapter.get_tf_dataset()
        return batches.prefetch(1)

    def resumption(self, *, deterministic_ops: bool) -> Resumption | None:
        """Returns why a resumed run reads other batches, if the first ones showed it."""
        if not self._moves_random_state:
            return None
        return Resumption("inexact", (_MOVES_RANDOM_STATE,))

    def prepare_pass(self, position: int, *, has_iterator: bool) -> bool:
        """Returns whether the batch of this position needs a new iterator. See DatasetPasses."""
        number_before = self._epoch_number
        self._epoch_number = position // self.steps_per_pass
        return self._epoch_number != number_before or not has_iterator

    def begin_passes(self, count: int) -> None:
        """Calls the methods of the PyDataset that begin the first `count` epochs.

        Those that this run has called before are not called again.
        """
        while self._begun_epochs < count:
            if self._begun_epochs and self.evaluation_number is not None:
                # Keras calls it after an evaluation and before the next one.
                self._dataset.on_epoch_end()
            # Keras calls it before the first epoch, too.
            self._dataset.on_epoch_end()
            self._dataset.on_epoch_begin()
            self._begun_epochs += 1

    def _generate_batches(self, position: int) -> Iterator[Any]:
        """Yields the batches from `position` on, and begins their epochs before it reads them."""
        epoch = position // self.steps_per_pass
        while True:
            pass_number = epoch if self.evaluation_number is None else self.evaluation_number
            self.begin_passes(1 + pass_number)
            epoch += 1
            end = epoch * self.steps_per_pass
            numbers = map(self._get_batch_number, range(position, end))
            yield from self._read_batches(numbers)
            if self.ends_with_pass or self.evaluation_number is not None:
                return
            position = end

    def _get_batch_number(self, position: int) -> int:
        """Returns the number of the batch at a position, counted over all passes."""
        if self.batches_per_epoch is None:
            return position
        pass_number, index = divmod(position, self.batches_per_epoch)
        if self._seed is None:
            return index
        order = _compute_batch_order(self._seed, pass_number, self.batches_per_epoch)
        return order[index]

    def _read_batches(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yields the batches of these numbers in order.

        As many threads read ahead as the PyDataset has workers.
        """
        workers = max(1, self._dataset.workers)
        # With one worker no batch is read ahead.
        max_pending = 1
        if workers > 1:
            max_pending = max(workers, self._dataset.max_queue_size)
        with ThreadPoolExecutor(workers) as executor:
            pending = collections.deque[Future[Any]]()
            for number in numbers:
                pending.append(executor.submit(self._dataset.__getitem__, number))
                if len(pending) == max_pending:
                    yield self._match_element_spec(pending.popleft().result())
            while pending:
                yield self._match_element_spec(pending.popleft().result())

    def _match_element_spec(self, batch: Any) -> Any:
        """Returns a batch in the structure that Keras gives it."""
        parts = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        if isinstance(self.element_spec, tuple):
            return copy_batch(parts)
        return copy_batch(parts[0])


def _format_random_state() -> str:
    return repr((random.getstate(), np.random.get_state()))


@functools.lru_cache(maxsize=2)
def _compute_batch_order(seed: int, pass_number: int, batches: int) -> list[int]:
    """Returns the order of the batches in a shuffled pass. Cached: each batch of a pass asks."""
    order = list(range(batches))
    random.Random(f"{seed} {pass_number}").shuffle(order)
    return order


def copy_batch(batch: Any) -> Any:
    """Returns a batch with copies of its arrays and tensors, for Dataset.from_generator.

    Runs eagerly, on the host. TensorFlow does not copy what a generator yields if its memory is
    aligned. When it then splits the batch over the replicas, an operation such as dropout may write
    its result into a part. Without the copies this would be a part of the user's arrays, or of
    batches that are kept for later evaluations.
    """

    def copy_part(part: object) -> object:
        if isinstance(part, np.ndarray):
            return part.copy()
        if isinstance(part, tf.Tensor):
            with tf.device("CPU:0"):
                return tf.constant(part.numpy(), part.dtype)
        return part

    return tf.nest.map_structure(copy_part, batch, expand_composites=True)

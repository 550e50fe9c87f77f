"""DatasetPasses: a tf.data.Dataset whose passes a trainer begins, each with a new iterator."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import tensorflow as tf

from trainer_kit.inputs.autotune_off import disable_idle_autotune
from trainer_kit.inputs.dataset_resume import Resumption, choose_resume_method, examine_dataset
from trainer_kit.inputs.dataset_structure import get_transformation_kind, iterate_transformations
from trainer_kit.inputs.sources.source_protocol import get_data_identity
from trainer_kit.inputs.stateful_ops import iterate_nodes
from trainer_kit.runtime.tensorflow_internals import get_dataset_functions

_LOG = logging.getLogger(__name__)
_NEW_ITERATORS = "each pass has an iterator of its own, as in Keras"
_READ_AGAIN = (
    "x: a dataset that was read in this process before is read again from the middle, so that its"
    " shuffles draw other orders than in the first process; make a new dataset for each fit"
)

# The iterator of such a transformation creates that of its input when it is created itself. Only
# the iterator of a shuffle creates it when it is first read.
_EAGER_TRANSFORMATIONS = {
    "AssertCardinality",
    "Batch",
    "Filter",
    "FlatMap",
    "IgnoreErrors",
    "Interleave",
    "Map",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Random",
    "Range",
    "Rebatch",
    "Restructured",
    "Shard",
    "Shuffle",
    "Skip",
    "TFRecord",
    "Take",
    "Tensor",
    "TensorSlice",
    "TextLine",
    "Unbatch",
    "Zip",
}

# The passes that fits of this process have begun over a dataset. Its shuffles continue from there.
_BEGUN_PASSES: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()


class DatasetPasses:
    """A Source of the passes over one dataset.

    A new iterator draws the next orders of the shuffles of its dataset, and begins random ops
    again. Within one iterator of a repeated dataset they would continue instead, and a shuffle
    would fill its buffer for orders that Keras draws and does not use.

    Args:
      dataset: The dataset of global batches.
      batches_per_epoch: The number of batches in a pass.
      original_dataset: The dataset that `dataset` is made of: the argument of fit, whose shuffles
        are used.
      unread_iterators: How many iterators are created and not read: before the first pass, and
        after each pass.

    Attributes:
      batches_per_epoch, steps_per_pass: The number of batches in a pass.
      element_spec: The spec of a batch.
      ends_with_pass: Whether an iterator ends with its pass, so that the trainer has to begin the
        next one.
      earlier_passes: The number of passes over `original_dataset` before the first one of this run.
        None until that is known.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        batches_per_epoch: int,
        *,
        original_dataset: tf.data.Dataset,
        unread_iterators: tuple[int, int] = (0, 0),
    ) -> None:
        self.ends_with_pass = True
        self._dataset = dataset
        self._original_dataset = original_dataset
        self._unread_iterators = unread_iterators
        self.batches_per_epoch = batches_per_epoch
        self.steps_per_pass = batches_per_epoch
        self.earlier_passes: int | None = None
        self.element_spec = dataset.element_spec
        # Iterators that are dropped at once need no tuner.
        self._untuned_dataset = disable_idle_autotune(dataset)
        # The number of the pass that is read.
        self._pass_number = -1

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the batches from `position` on. See Source.

        They end with the pass if `ends_with_pass`.
        """
        del input_context
        remainder = self._dataset.skip(position % self.batches_per_epoch)
        if self.ends_with_pass:
            return remainder
        next_passes = self._dataset.repeat()
        return remainder.concatenate(next_passes)

    def prepare_pass(self, position: int, *, has_iterator: bool) -> bool:
        """Prepares the shuffles for the pass of a batch. Runs eagerly, in scope, on the host.

        After a restart this draws the orders of the passes before, and reads these passes only as
        far as that needs.

        Args:
          position: The position of the next batch, counted over all passes.
          has_iterator: Whether there is an iterator at that position, of the last pass that was
            begun.

        Returns:
          Whether a new iterator has to be made.
        """
        number = position // self.batches_per_epoch
        if number == self._pass_number and has_iterator:
            return False

        begun_passes = _BEGUN_PASSES.get(self._original_dataset, 0)
        # The run begins, or its checkpoint is of an earlier version.
        if self.earlier_passes is None:
            self.earlier_passes = 0 if position else begun_passes
        if begun_passes > self.earlier_passes + number:
            _LOG.warning(_READ_AGAIN)
            self.earlier_passes = begun_passes - number

        self.begin_passes(number)
        self._create_unread_iterators(self.earlier_passes + number)
        self._pass_number = number
        _BEGUN_PASSES[self._original_dataset] = self.earlier_passes + number + 1
        return True

    def identity(self) -> dict[str, Any]:
        """Returns what describes the original dataset. See Source."""
        return get_data_identity(self._original_dataset)

    def begin_passes(self, count: int) -> None:
        """Draws what the first `count` passes of the run and all before them draw.

        What this process has drawn before is not drawn again. Runs eagerly, in scope, on the host.
        """
        begun_passes = _BEGUN_PASSES.get(self._original_dataset, 0)
        for number in range(begun_passes, (self.earlier_passes or 0) + count):
            self._create_unread_iterators(number)
            self._draw_orders()
            _BEGUN_PASSES[self._original_dataset] = number + 1

    def state(self) -> int | None:
        """Returns the number of passes before the run. None if that is not known."""
        return self.earlier_passes

    def restore(self, state: object) -> None:
        """Takes the number of passes before the run from a checkpoint, unless it is known.

        It is known if the run goes back to an earlier step in this process.
        """
        # A PyDataset of an earlier start has another state.
        if self.earlier_passes is None and isinstance(state, int):
            self.earlier_passes = state

    def resumption(self, *, deterministic_ops: bool) -> Resumption:
        """Returns how a resumed run gets back to its position, for the engine's report."""
        return choose_resume_method(
            examine_dataset(self._dataset),
            iterator_obstacle=_NEW_ITERATORS,
            deterministic_ops=deterministic_ops,
            section="x",
        )

    def _draw_orders(self) -> None:
        """Draws what a pass draws."""
        batches = _count_batches_to_draw_orders(self._dataset)
        if batches is None:
            # A reduce reads the whole pass.
            zero = tf.constant(0, tf.int64)
            self._untuned_dataset.reduce(zero, lambda count, _: count + 1)
            return

        # The iterator and its buffers end with this call.
        iterator = iter(self._untuned_dataset)
        for _ in range(batches):
            next(iterator, None)

    def _create_unread_iterators(self, pass_number: int) -> None:
        """Creates the unread iterators that precede that of a pass.

        Args:
          pass_number: The number of the pass, counted over all fits.
        """
        at_begin, after_a_pass = self._unread_iterators
        follows_a_pass = pass_number > 0 or self._original_dataset in _BEGUN_PASSES
        count = 0
        if follows_a_pass:
            count += after_a_pass
        if pass_number == self.earlier_passes:
            count += at_begin
        for _ in range(count):
            iter(self._untuned_dataset)


def needs_new_iterators(dataset: tf.data.Dataset) -> bool:
    """Whether passes of new iterators differ from those of one that repeats the dataset."""
    structure = examine_dataset(dataset)
    return bool(structure.reshuffled_each_iteration or structure.random_ops)


def _count_batches_to_draw_orders(dataset: tf.data.Dataset) -> int | None:
    """Returns how many batches of a pass are read until its shuffles have drawn their orders.

    None: all of them. A shuffle draws its order when its iterator is created, and random ops begin
    again then. Python and variables may depend on everything that was read, and below a `repeat`
    further iterators are created while the pass is read.
    """
    structure = examine_dataset(dataset)
    transformations = list(iterate_transformations(dataset))
    operations: list[str] = []
    for transformation in transformations:
        for graph in get_dataset_functions(transformation):
            nodes = iterate_nodes(graph.as_graph_def())
            operations += [node.op for node in nodes]
    has_inner_shuffle = any(operation.startswith("Shuffle") for operation in operations)
    if structure.python_functions or structure.stateful_ops or has_inner_shuffle:
        return None

    kinds = [get_transformation_kind(transformation) for transformation in transformations]
    if not _EAGER_TRANSFORMATIONS.issuperset({*kinds} - {"Shuffle"}):
        return None
    # The first read of a shuffle creates the iterator of the shuffle before it.
    return 0 if kinds.count("Shuffle") == 1 else 1

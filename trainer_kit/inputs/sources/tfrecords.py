"""TFRecord files as a Source, shuffled over all files.

Any position in the order costs the same to reach.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError
from trainer_kit.errors.user_frames import parse_user_frames
from trainer_kit.inputs.dataset_structure import find_failed_op_line
from trainer_kit.inputs.sources.batch_function import BatchFunction
from trainer_kit.inputs.sources.example_order import Order
from trainer_kit.inputs.sources.source_pipeline import (
    build_options,
    finish_pipeline,
    warn_of_unread_fields,
)
from trainer_kit.inputs.sources.tfrecord_index import RecordFiles, find_matching_files

_DAMAGE = re.compile(r"\bDataError: (.+)")
# TensorFlow names the op that failed in double braces and then, line by line, the ops that it
# failed in. For a function of a dataset, that is the op that asked for a batch. A last line may
# name any other op, which only waited for something from another device, such as
# [[IteratorGetNext/_4]]. Eagerly the message contains only the name of the op that was called.
_GET_NEXT = re.compile(
    r"\[\[(\{\{node )?([^\s\[\]]*/)?(MultiDevice)?IteratorGetNext\w*(\}\})?\]\]"
    r"|\[Op:(MultiDevice)?IteratorGetNext\w*\]"
)
# The text before it contains the reason of an error.
_PLACE = re.compile(r"\n\s*\[\[| \[Op:")
_PREFIX = re.compile(r"\{\{function_node [^}]*\}\} |^\s*\(0\) [A-Z_]+:\s+")


class TFRecordSource:
    """Batches from TFRecord files, in the order that ArraySource has.

    The order is a pure function of (seed, epoch, index). Index i is the i-th record of the files in
    sorted order. Each epoch of training is a permutation over all of them, not within a buffer.
    Validation is one pass in order. Replicas and workers share every global batch as with
    ArraySource, so all workers need all files.

    The constructor reads the headers of all records: 0.6 s for a million, with the files in the
    page cache. Records are read at random, from a local SSD or the page cache. For slower disks
    `params.block_length` keeps that many successive records together in the shuffled order. It
    reads 1,200 to 1,600 batches of 32 small records a second on 2 CPU cores. tf.data's own reader
    with a shuffle buffer reads 5,300, since it runs no Python.

    Of `params` it also uses prefetch_buffer_size, deterministic and autotune_algorithm. A warning
    names the fields that are set and not used.

    Args:
      file_pattern: A path or glob, several separated by commas, or a list of those, such as
        `params.input_path`.
      params: The data's section of the config.
      parse: A function that turns serialized examples (string tensor, [batch]) into a nested
        structure with a first dimension of the batch, in graph on the host, as `lambda examples:
        tf.io.parse_example(examples, features)`. Like `batch_transform` it has to be a pure
        function, or a resumed run differs.
      batch_transform: A function that changes the result of `parse`, and gets it as one argument
        (so a tuple if `parse` returned one). Both get a seed for each example if they have a second
        parameter named `seed`, as ArraySource's `transform` does: int32 [batch, 2], the same for
        both, and the same as ArraySource gives.

    Attributes:
      num_examples: The number of records in all files.

    Raises:
      UsageError: when the batch size is 0, the pattern is not one, autotune_algorithm is unknown,
        or a function cannot be called with one argument, or with one and `seed`.
      DataError: when no file matches, a file is empty, compressed, cut or damaged, or the files
        have too few examples.
    """

    def __init__(
        self,
        file_pattern: str | Sequence[str],
        params: DataConfig,
        *,
        parse: Callable[..., object],
        batch_transform: Callable[..., object] | None = None,
    ) -> None:
        self._params = params
        self._functions = [BatchFunction(parse, "parse")]
        if batch_transform is not None:
            self._functions.append(BatchFunction(batch_transform, "batch_transform"))
        self._uses_seeds = any(function.takes_seed for function in self._functions)
        paths = find_matching_files(file_pattern)
        self._files = RecordFiles(paths)
        self.num_examples = len(self._files)
        self._order = Order(self.num_examples, params, block=params.block_length)
        self._options = build_options(params)
        warn_of_unread_fields("TFRecordSource", params, {"input_path", "block_length"})

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the dataset from global batch `position` on, in batches for one replica.

        Runs on the host. Reading the dataset raises a tf.errors.OpError for a damaged record.
        `find_data_error` finds the file and the offset in it.

        Args:
          position: How many global batches have been used already, from the start of the first
            epoch.
          input_context: The worker's place among the others. None for a single replica.

        Raises:
          UsageError: when the replicas cannot share a global batch to train on equally.
        """
        stages = self.stages(position, input_context)
        *_, batches = stages.values()
        return finish_pipeline(batches, self._params, self._options)

    def stages(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> dict[str, tf.data.Dataset]:
        """Returns the datasets that make the batches of `at`, one after another. See Source.

        The stages are "read" and the functions. The arguments are those of `at`.
        """
        indices = self._order.at(position, input_context, with_seeds=self._uses_seeds)
        batches = indices.map(self._read_batch, num_parallel_calls=tf.data.AUTOTUNE)
        stages = {"read": batches}
        for function in self._functions:
            # The last function of the chain drops the seeds.
            is_last = function is self._functions[-1]
            keeps_seeds = self._uses_seeds and not is_last
            batches = function.apply_to(batches, has_seeds=self._uses_seeds, keep_seeds=keeps_seeds)
            stages[function.label] = batches
        return stages

    def identity(self) -> dict[str, Any]:
        """Returns the identity of files and records. See Source and RecordFiles."""
        return self._files.identity()

    @tf.autograph.experimental.do_not_convert
    def _read_batch(self, indices: tf.Tensor, seeds: tf.Tensor | None = None) -> Any:
        # Without a state, TensorFlow may run several calls in parallel, in order, also with op
        # determinism.
        records = tf.numpy_function(self._files.read_records, [indices], tf.string, stateful=False)
        records = tf.ensure_shape(records, indices.shape)
        if seeds is None:
            return records
        return records, seeds


def find_data_error(error: BaseException, *datasets: Any) -> DataError | None:
    """Returns a DataError if the error of a loop comes from inside tf.data, or None.

    TensorFlow keeps only the text of an exception in a numpy_function, by which that of a
    TFRecordSource is recognised.

    Args:
      error: The error of the loop.
      *datasets: The datasets that were read, to find the user's line. Objects that are no
        tf.data.Dataset are ignored.
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    # TensorFlow has kept only the text of an error of RecordFiles.
    damage = _DAMAGE.search(error.message)
    if damage:
        return DataError(damage[1])
    if not is_read_error(error):
        return None

    # The user's line that failed, as far as it is known. The text before the traceback may name the
    # line that takes a batch.
    traceback = error.message.partition("Traceback (most recent call last)")[2]
    python_frames = parse_user_frames(traceback)
    frame = python_frames[-1] if python_frames else None
    for dataset in datasets:
        frame = frame or find_failed_op_line(error.message, dataset)
    user_line = f"\n  {frame}: {frame.code}" if frame else ""

    reason = _reason(error.message)
    return DataError(f"the data cannot be read: {reason}{user_line}")


def is_read_error(error: tf.errors.OpError) -> bool:
    """Whether the op that failed is the one that takes a batch out of the data."""
    return _GET_NEXT.search(error.message) is not None


@contextlib.contextmanager
def explain_read_errors(
    datasets: Callable[[], Sequence[object]], on_failure: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Turns the error of a loop into a DataError if data cannot be read.

    The end of the data is not such an error.

    Args:
      datasets: A function that returns the datasets that are read. See `find_data_error`.
      on_failure: A function that is called after any error of the loop.

    Raises:
      DataError: instead of the error of the loop that asked for a batch.
    """
    try:
        yield
    except tf.errors.OutOfRangeError:
        raise
    except tf.errors.OpError as error:
        # on_failure may drop the datasets.
        read_datasets = datasets()
        on_failure()
        data_error = find_data_error(error, *read_datasets)
        if data_error:
            raise data_error from error
        raise


def _reason(message: str) -> str:
    """Returns the last line of TensorFlow's message that contains a reason."""
    text = _PLACE.split(message, maxsplit=1)[0]
    for line in reversed(text.splitlines()):
        reason = _PREFIX.sub("", line).strip()
        if reason:
            return reason
    return "no reason is known"

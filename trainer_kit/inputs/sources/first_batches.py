"""FirstBatches: a Source of the first batches of other data, in passes that are all the same."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.inputs.sources.example_order import count_local_replicas
from trainer_kit.inputs.sources.source_protocol import Source


class FirstBatches:
    """The first global batches of a Source or a tf.data.Dataset.

    Each pass has the same batches in the same order. A Source is asked for them again in each pass.
    Another dataset may shuffle in a new order then, so its batches are kept in memory.

    Args:
      data: The Source or dataset, in batches for one replica.
      batches: The number of global batches.
      repeats: Whether one pass follows another without end.
    """

    def __init__(self, data: tf.data.Dataset | Source, batches: int, repeats: bool) -> None:
        self._data = data
        self._batches = batches
        self._repeats = repeats

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the batches for one replica from global batch `position` on.

        The position is counted over all passes.

        Args:
          position: The index of the first global batch.
          input_context: The worker's place among the others. None for a single replica.

        Raises:
          DataError: when passes are repeated, and the data is known to have fewer batches.
        """
        data = self._data
        batches = self._batches
        # The number of elements that make this worker's part of a global batch.
        local_replicas = count_local_replicas(input_context)

        all_batches = data.at(0, input_context) if isinstance(data, Source) else data
        first_pass = all_batches.take(batches * local_replicas)

        # Without repetition fewer batches are no error. A negative cardinality is not known.
        cardinality = -1
        if self._repeats:
            cardinality = int(first_pass.cardinality())
        if 0 <= cardinality < batches * local_replicas:
            available_batches = cardinality // local_replicas
            raise DataError(
                f"the training data has {available_batches} batches, but {batches} are"
                " to be repeated (trainer.overfit_batches); set it to at most"
                f" {available_batches}"
            )

        begin = position % batches if self._repeats else min(position, batches)
        if isinstance(data, Source):
            remaining_batches = batches - begin
            later_batches = data.at(begin, input_context)
            rest = later_batches.take(remaining_batches * local_replicas)
        else:
            first_pass = first_pass.cache()
            rest = first_pass.skip(begin * local_replicas)
        if not self._repeats:
            return rest
        later_passes = first_pass.repeat()
        return rest.concatenate(later_passes)

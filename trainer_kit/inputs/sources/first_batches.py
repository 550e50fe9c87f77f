"""FirstBatches: a Source of the first batches of other data, in passes that are all the same."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.errors import DataError
from trainer_kit.inputs.sources.example_order import count_local_replicas
from trainer_kit.inputs.sources.source_protocol import Source


class FirstBatches:
    """The first global batches of a Source or a tf.data.Dataset. Each pass has the same batches in the same order.

    A Source is asked for them again in each pass. Another dataset may shuffle in a new order then,
    so its batches are kept in memory.

    Args:
      data: The Source or dataset, in batches for one replica.
      batches: The number of global batches.
      repeats: Whether one pass follows another without end.
    """

    def __init__(self, data: Any, batches: int, repeats: bool) -> None:
        self._data, self._batches, self._repeats = data, batches, repeats

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        """Returns the batches for one replica from global batch `position` on, counted over all passes.

        Raises:
          DataError: when a pass is to be repeated, and the data is known to have fewer batches.
        """
        made, here, batches, repeats = (
            self._data,
            count_local_replicas(input_context),
            self._batches,
            self._repeats,
        )
        whole = made.at(0, input_context) if isinstance(made, Source) else made
        first = whole.take(batches * here)
        if repeats and 0 <= (found := int(first.cardinality())) < batches * here:
            raise DataError(
                f"the training data has {found // here} batches, but {batches} are to be repeated "
                f"(trainer.overfit_batches); set it to at most {found // here}"
            )
        begin = position % batches if repeats else min(position, batches)
        if isinstance(made, Source):
            rest = made.at(begin, input_context).take((batches - begin) * here)
        else:
            first = first.cache()
            rest = first.skip(begin * here)
        return rest.concatenate(first.repeat()) if repeats else rest

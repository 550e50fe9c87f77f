"""The training data of a run, from the position on at which the run stands; also after restarts and rollbacks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.feed import Feed
from trainer_kit.inputs.position import Position
from trainer_kit.inputs.resumability import examine, resume_method
from trainer_kit.inputs.source import Source, made_inputs, positioned

_LOG = logging.getLogger(__name__)


class TrainData:
    """Knows the position of the next batch and hands out the iterator that begins there.

    Args:
      make: returns the dataset, distributed; it is given a function (build_inputs, params, input_context) that opens
        the data of one worker at the position.
      step: returns the global step.
      given: a ready-made dataset in place of all this; it has no position, and each start begins it anew.
      one_iterator: whether the dataset is a plain one for one replica, whose iterator can be saved.
      deterministic_ops: whether TensorFlow's op determinism is on.
      require_exact: whether data that cannot be resumed exactly is refused.

    Attributes:
      feed: what hands out the dataset.
    """

    def __init__(
        self,
        make: Callable[[Callable[..., Any]], Any],
        step: Callable[[], int],
        given: Any = None,
        *,
        one_iterator: bool = False,
        deterministic_ops: bool = False,
        require_exact: bool = False,
    ) -> None:
        self.feed = Feed("train_data", lambda: make(self._open), given)
        self._step, self._require_exact = step, require_exact
        self._one_iterator, self._deterministic_ops = one_iterator, deterministic_ops
        self._since, self._start = 0, Position()  # the position that the run had at a step
        self._saves_iterator, self._saved_iterator = False, ""
        self._told: tuple[str, ...] = ()

    @property
    def position(self) -> Position:
        """Where the next batch is, in the stream of all batches."""
        return self._start.after(self._step() - self._since)

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that step number `step`, counted from 1, uses or has used."""
        return self._start.nth(step - 1 - self._since)

    def iterator(self) -> Any:
        """Returns the iterator, at the position."""
        iterator = self.feed.iterator()
        if self._saved_iterator and self._saves_iterator:
            try:
                tf.train.Checkpoint(iterator=iterator).read(self._saved_iterator).assert_consumed()
            except (tf.errors.OpError, AssertionError) as error:
                raise StorageError(
                    f"{self._saved_iterator} does not hold the state of this data's iterator: {error}; if build_inputs "
                    "has changed, remove the files of that name: the data is then read again from its start"
                ) from error
        self._saved_iterator = ""
        return iterator

    def leave_out(self, batch: int) -> None:
        """Leaves out the batch of this index from now on."""
        self._since, self._start = self._step(), self.position.without(batch)
        self._saved_iterator = ""
        self.feed.forget()

    def state(self) -> dict[str, Any]:
        """Returns the position, for the checkpoint."""
        return {"batch": self.position.batch, "left_out": list(self.position.left_out)}

    def put_state(self, state: dict[str, Any] | None) -> None:
        """Goes to the position of a checkpoint; without one, to the batch of the global step."""
        self._since = self._step()
        batch, left_out = (state["batch"], state["left_out"]) if state else (self._since, ())
        self._start = Position(batch, tuple(left_out))
        self.feed.forget()

    def restored(self, path: str | None) -> None:
        """Notes where, beside the checkpoint that was restored, the state of the iterator may be; None: nowhere."""
        self._saved_iterator = path if path and os.path.exists(f"{path}.index") else ""

    def save_iterator(self, prefix: str) -> None:
        """Saves the state of the iterator to files that begin with `prefix`, for data that needs it; on this thread."""
        if self._saves_iterator and self.feed.started:
            tf.train.Checkpoint(iterator=self.feed.iterator()).write(prefix)

    def _open(self, build_inputs: Callable[..., Any], params: Any, input_context: Any) -> tf.data.Dataset:
        made = made_inputs(build_inputs, params, input_context)
        if not isinstance(made, Source):
            self._choose_method(made)
            if self._saves_iterator and self._saved_iterator:
                return made
            # The state of an iterator that began elsewhere would not fit the dataset as it is made.
            self._saves_iterator = self._saves_iterator and self.position.batch == 0
        return positioned(lambda _: made, params, self.position, input_context)

    def _choose_method(self, dataset: tf.data.Dataset) -> None:
        """Decides how a plain dataset gets back to its place, and tells what that costs or that it cannot be exact.

        Raises:
          UsageError: when it cannot be exact and has to be.
        """
        found = resume_method(
            examine(dataset),
            iterator_can_be_saved=self._one_iterator and not self._start.left_out,
            deterministic_ops=self._deterministic_ops,
        )
        self._saves_iterator = found.method == "iterator"
        if found.method == "inexact" and self._require_exact:
            raise UsageError("\n  ".join(("trainer.require_exact_resume:", *found.reasons)))
        if found.reasons != self._told:
            self._told = found.reasons
            for reason in found.reasons:
                _LOG.warning("%s", reason)


def open_whole(build_inputs: Callable[..., Any], params: Any, input_context: Any) -> tf.data.Dataset:
    """Opens the data of one worker at its beginning; for validation."""
    return positioned(build_inputs, params, Position(), input_context)

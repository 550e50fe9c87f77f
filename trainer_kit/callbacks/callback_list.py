"""CallbackList: calls the callbacks of a run in their order, and keeps their time, their errors and their state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.base import Callback, Requests, Run
from trainer_kit.distribution.workers import broadcast_from_chief, worker_count
from trainer_kit.errors import DivergedError, StopTraining
from trainer_kit.telemetry.time_ledger import NAMES, TimeLedger
from trainer_kit.training.loops.intervals import next_multiple

_LOG = logging.getLogger(__name__)


class CallbackList:
    """The callbacks of a run. Eager, on the host, on every worker.

    Args:
      run: that they are handed.
      members: in the order in which they are called.
      times: counts what each of them takes, under its name.
      strategy: of the run; None: the current one.

    Attributes:
      run, members: as given.
      errors: how often each optional callback has failed, by name.
      shares_requests: whether there are several workers, which all carry out what the chief's callbacks ask for.
    """

    def __init__(
        self,
        run: Run,
        members: Sequence[Callback] = (),
        times: TimeLedger | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        self.run, self.members, self._times = run, list(members), times or TimeLedger()
        self.errors: dict[str, int] = {}
        self._restored: dict[str, Any] = {}  # states of a checkpoint, until train_begin was called
        self._has_begun = False
        self._strategy = strategy or tf.distribute.get_strategy()
        self.shares_requests = worker_count(self._strategy) > 1

    def keep_states(self) -> None:
        """Has the states of the callbacks be in every checkpoint; before the restore."""
        for name, member in self._named():
            if _overrides(member, "state"):
                self.run.trainer.keep_state(f"callback {name}", member.state, self._taking(name, member))

    def call(self, event: str, *arguments: Any) -> None:
        """Calls one event of all members that have it.

        Raises:
          Exception: the first error of a required member; those behind it are not called.
        """
        for member in self.members:
            if self._is_called(member, event):
                self._call(member, event, *arguments)

    def call_after_error(self, event: str, *arguments: Any) -> None:
        """Calls one event of all members where an error is on its way; errors of their own are logged.

        Raises:
          DivergedError: of a member, which says more than the error before.
        """
        for member in self.members:
            if self._is_called(member, event):
                try:
                    self._call(member, event, *arguments)
                except DivergedError:
                    raise
                except Exception:
                    _LOG.exception("%s.%s failed, after another error", member.name, event)

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Calls `<what>_begin`, and in any case `<what>_end`; what is "run" or "train"."""
        try:
            self.call(f"{what}_begin")
            if what == "train":
                self._give_states_back()
            yield
        except BaseException:
            self.call_after_error(f"{what}_end")
            raise
        self.call(f"{what}_end")

    def next_cut(self, step: int) -> int | None:
        """Returns the step after `step` at which a loop has to end for some callback; None if any will do."""
        return min((next_multiple(step, member.every) for member in self.members if member.every), default=None)

    def log_cuts(self, steps_per_loop: int | Callable[[int], int]) -> None:
        """Says once which callbacks make loops shorter than the config has them, and what that costs."""
        for member in self.members:
            if member.every and not callable(steps_per_loop) and member.every % steps_per_loop:
                _LOG.info(
                    "the callback %s is called every %d steps: loops end there, in place of every %d steps only "
                    "(trainer.steps_per_loop); a loop takes the host about half a millisecond beside its steps",
                    *(member.name, member.every, steps_per_loop),
                )

    def take_requests(self) -> Requests:
        """Returns what was asked for since the last call; of several workers, what the chief's callbacks asked for."""
        run = self.run
        asked, run.requests = run.requests, Requests()
        return self._agree(asked) if self.shares_requests else asked

    def _agree(self, asked: Requests) -> Requests:
        """One number tells the other workers: bits of stop, save and each validation set, and above them the step."""
        run, sets = self.run, list(getattr(self.run.trainer, "validation_sets", ("",)))
        bits = [bool(run.stop_reason), asked.save, *(name in asked.evaluate for name in sets)]
        number = (0 if asked.rewind is None else asked.rewind + 1) << len(bits)
        number = broadcast_from_chief(self._strategy, number + sum(bit << place for place, bit in enumerate(bits)))
        stop, save, *chosen = (bool(number >> place & 1) for place in range(len(bits)))
        if stop:
            run.stop("the first worker asked for it")
        else:
            run.stop_reason = ""
        rewind = (number >> len(bits)) - 1
        evaluate = {name for name, is_chosen in zip(sets, chosen, strict=True) if is_chosen}
        return Requests(save, evaluate, rewind if rewind >= 0 else None)

    def _is_called(self, member: Callback, event: str) -> bool:
        if not _overrides(member, event) or (member.chief_only and not self.run.chief):
            return False
        return event != "loop_end" or not member.every or self.run.step % member.every == 0

    def _call(self, member: Callback, event: str, *arguments: Any) -> None:
        row = member.name if member.name in NAMES else f"callbacks/{member.name}"
        with self._times.during(row):
            try:
                getattr(member, event)(self.run, *arguments)
            except StopTraining as stop:
                self.run.stop(str(stop))
            except Exception as error:
                if member.required:
                    raise
                self.errors[member.name] = count = self.errors.get(member.name, 0) + 1
                tell = _LOG.exception if count == 1 else _LOG.warning
                tell("the callback %s failed at step %d, and the run goes on: %s", member.name, self.run.step, error)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Yields each member with a name of its own: the second of a name is called "name 2"."""
        seen: dict[str, int] = {}
        for member in self.members:
            seen[member.name] = number = seen.get(member.name, 0) + 1
            yield member.name if number == 1 else f"{member.name} {number}", member

    def _taking(self, name: str, member: Callback) -> Callable[[Any], None]:
        def take(state: Any) -> None:
            if state is None:
                return
            if self._has_begun:
                member.restore(state)
            else:
                self._restored[name] = state

        return take

    def _give_states_back(self) -> None:
        """Restores what a checkpoint held; after train_begin, in which callbacks set themselves to their beginning."""
        self._has_begun = True
        states, self._restored = self._restored, {}
        for name, member in self._named():
            if name in states:
                member.restore(states[name])


def _overrides(member: Callback, event: str) -> bool:
    return getattr(type(member), event) is not getattr(Callback, event)

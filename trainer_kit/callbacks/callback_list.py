"""CallbackList: calls the callbacks of a run in order, and records their time, errors and states.

EpochEvents decides when epoch_begin and epoch_end are called.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Requests, Run
from trainer_kit.checkpoints.state.python_state import check_state
from trainer_kit.errors import DivergedError, StopTraining, UsageError
from trainer_kit.runtime.collectives import broadcast_int, worker_count
from trainer_kit.telemetry.time_ledger import TIME_CATEGORIES, TimeLedger
from trainer_kit.training.checks.failed_step import is_user_defined
from trainer_kit.training.loops.intervals import next_multiple
from trainer_kit.training.metric_set import to_numpy

_LOG = logging.getLogger(__name__)
EPOCH_EVENTS = ("epoch_begin", "epoch_end")
_EVENTS = [
    name
    for name in vars(Callback)
    if name.endswith(("_begin", "_end")) or name in ("rewound", "exception", "run_finished")
]


class EpochEvents:
    """Decides when epoch_begin and epoch_end are called.

    epoch_begin comes before the first loop of an epoch, and epoch_end after its last loop. What
    happens between two loops, such as evaluations and checkpoints, is done by the time of
    epoch_end.

    Args:
      run: The run. Its `epochs` are set before training begins.
      has_listeners: Whether a callback has one of these events.

    Attributes:
      has_listeners: The argument of this name.
      is_training: Whether the run trains at present. An evaluation without training has no epochs.
    """

    def __init__(self, run: Run, has_listeners: bool) -> None:
        self._run = run
        self.has_listeners = has_listeners
        self.is_training = False
        # The logs of the last loop, and of the evaluations after it as "validation".
        self._logs: dict[str, Any] = {}
        # The step of the last epoch_end while no loop has followed, else -1.
        self._last_end_step = -1

    def find_next_epoch_end(self, step: int) -> int | None:
        """Returns the step after `step` that ends an epoch, or None.

        None means that the run has no epochs, or that no callback has an event of epochs.
        """
        epochs = self._run.epochs
        if not self.has_listeners or not epochs:
            return None
        return next_multiple(step, epochs.steps)

    def record_event(self, event: str, arguments: tuple[object, ...]) -> int | None:
        """Remembers the logs of an event, and returns the epoch that begins before it, or None."""
        epochs = self._run.epochs
        step = self._run.step
        if not self.has_listeners or epochs is None or not self.is_training:
            return None

        if event == "loop_end" and isinstance(arguments[0], Mapping):
            self._logs |= arguments[0]
        elif event == "evaluation_end" and isinstance(arguments[0], Mapping):
            # Validation sets of one step may be evaluated one after another.
            earlier_logs = self._logs.get("validation", {})
            self._logs["validation"] = {**earlier_logs, **arguments[0]}
        elif event == "rewound":
            self._last_end_step = -1
        elif event == "loop_begin":
            self._logs = {}
            self._last_end_step = -1
            if step == 0 or epochs.is_end(step):
                return epochs.count_completed(step) + 1
        return None

    def pop_ended_epoch(self) -> tuple[int, dict[str, Any]] | None:
        """Returns the epoch that ends with this step and its logs, once. None if no epoch ends."""
        epochs = self._run.epochs
        step = self._run.step
        if not self.has_listeners or epochs is None or not self.is_training:
            return None
        if not epochs.is_end(step) or self._last_end_step == step:
            return None

        self._last_end_step = step
        return epochs.count_completed(step), self._logs

    def state(self) -> dict[str, float] | None:
        """Returns the numbers of the last loop at the end of an epoch, for the checkpoint.

        epoch_end comes after that checkpoint, so a resumed run needs them. Evaluations of this step
        are repeated after a resume.
        """
        epochs = self._run.epochs
        if epochs is None or not epochs.is_end(self._run.step):
            return None

        # Only single numbers are stored, so the logs of evaluations are not.
        numbers: dict[str, float] = {}
        for name, value in self._logs.items():
            array = np.asarray(to_numpy(value))
            if array.ndim == 0 and array.dtype.kind in "biuf":
                numbers[name] = float(array)
        return numbers

    def restore(self, state: dict[str, float] | None) -> None:
        """Takes the numbers of a checkpoint."""
        self._logs = dict(state or {})
        self._last_end_step = -1


class CallbackList:
    """The callbacks of a run. Runs eagerly, on the host, on every worker.

    Args:
      run: The run that each callback receives.
      members: The callbacks, in the order in which they are called.
      times: The time ledger. It counts the seconds of each callback under its name.
      strategy: The run's strategy. None for the current one.

    Attributes:
      run, members, times: The arguments.
      errors: The number of errors of each optional callback, by name.
      epochs: The EpochEvents of the run.
      shares_requests: Whether there are several workers, which all carry out the requests of the
        chief's callbacks.

    Raises:
      UsageError: when a callback's `every` is not a positive number of steps, or one of its methods
        does not accept the arguments that it is called with.
    """

    def __init__(
        self,
        run: Run,
        members: Sequence[Callback] = (),
        times: TimeLedger | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        self.run = run
        self.members = list(members)
        self.times = times or TimeLedger()
        self.errors: dict[str, int] = {}
        self._has_begun = False
        # States of a checkpoint, until train_begin was called.
        self._pending_states: dict[str, Any] = {}
        # The logs of the loop or the evaluation that has just ended.
        self._logs: Mapping[str, Any] = {}
        # The member that has reported a name last.
        self._reporters: dict[str, Callback] = {}
        self._strategy = strategy or tf.distribute.get_strategy()
        self.shares_requests = worker_count(self._strategy) > 1

        for member in self.members:
            _check_callback(member)

        wants_epochs = any(
            _overrides(member, name) for member in self.members for name in EPOCH_EVENTS
        )
        self.epochs = EpochEvents(run, wants_epochs)

        # The events that callbacks of the user see.
        classes = [type(member) for member in self.members]
        self._users_events: set[str] = set()
        for name in _EVENTS:
            if any(is_user_defined(cls, name) for cls in classes):
                self._users_events.add(name)

    def register_states(self) -> None:
        """Adds the states of the callbacks to every checkpoint. Call it before the restore."""
        trainer = self.run.trainer
        if self.epochs.has_listeners:
            trainer.register_state("epoch", self.epochs.state, self.epochs.restore)
        for name, member in self._iter_stateful_members():
            read_state = functools.partial(self._read_state, member)
            restore = self._create_restore_function(name, member)
            trainer.register_state(f"callback {name}", read_state, restore)

    def call(self, event: str, *arguments: Any) -> None:
        """Calls an event on all members that override it.

        A user's callback may restore a checkpoint, so `run.step` is read after an event that users'
        callbacks see.

        Raises:
          Exception: the first error of a required member. The members after it are not called.
        """
        epoch = self.epochs.record_event(event, arguments)
        if epoch is not None:
            self.run.is_in_epoch_begin = True
            self.call("epoch_begin", epoch)
            self.run.is_in_epoch_begin = False

        if event.startswith(("loop", "evaluation")):
            logs = arguments[0] if event.endswith("_end") else {}
            self._logs = logs if isinstance(logs, Mapping) else {}

        for member in self.members:
            if self._is_called(member, event):
                self._call(member, event, *arguments)
        if event in self._users_events:
            self.run.read_step()

    def end_epoch_if_complete(self) -> None:
        """Calls epoch_end if an epoch ends with this step, once."""
        arguments = self.epochs.pop_ended_epoch()
        if arguments is not None:
            self.call("epoch_end", *arguments)

    def call_after_error(self, event: str, *arguments: Any) -> None:
        """Calls an event on all members while another error is handled, and logs their errors.

        Raises:
          DivergedError: when a member raises one, since it explains the first error.
        """
        for member in self.members:
            if not self._is_called(member, event):
                continue
            try:
                self._call(member, event, *arguments)
            except DivergedError:
                raise
            except Exception:
                _LOG.exception("%s.%s failed, after another error", member.name, event)

    @contextlib.contextmanager
    def call_begin_and_end(self, phase: str) -> Iterator[None]:
        """Calls `<phase>_begin`, and always `<phase>_end` on the members that have begun.

        Args:
          phase: "run" or "train".

        Raises:
          Exception: the first error of a member or of the body. `<phase>_end` is still called on
            all members.
        """
        begin_event = f"{phase}_begin"
        end_event = f"{phase}_end"
        begun: list[Callback] = []
        with contextlib.ExitStack() as ends:
            ends.push(lambda kind, error, trace: self._call_end(begun, end_event, error))

            # A second train_begin may reset the callbacks, so their states are restored after it.
            previous_states: dict[str, Any] = {}
            if self._has_begun:
                for name, member in self._iter_stateful_members():
                    previous_states[name] = self._read_state(member)

            for member in self.members:
                begun.append(member)
                if self._is_called(member, begin_event):
                    self._call(member, begin_event)
            if begin_event in self._users_events:
                self.run.read_step()
            if phase == "train":
                self._restore_states(previous_states)

            self.epochs.is_training = phase == "train"
            yield
            self.epochs.is_training = False

    def _call_end(
        self, members: Sequence[Callback], event: str, error: BaseException | None
    ) -> None:
        first_error: Exception | None = None
        self.run.error = error
        for member in members:
            if not self._is_called(member, event):
                continue
            try:
                self._call(member, event)
            except Exception as member_error:
                if error is not None or first_error is not None:
                    _LOG.exception("%s.%s failed, after another error", member.name, event)
                first_error = first_error or member_error

        if error is None and first_error is not None:
            raise first_error

    def find_next_boundary(self, step: int) -> int | None:
        """Returns the next step after `step` at which a loop has to end for a callback, or None."""
        boundaries: list[int | None] = []
        for member in self.members:
            if _overrides(member, "next_boundary"):
                boundaries.append(member.next_boundary(step))
        for member in self.members:
            if member.every and _overrides(member, "loop_end"):
                boundaries.append(next_multiple(step, member.every))
        boundaries.append(self.epochs.find_next_epoch_end(step))

        later_steps = [boundary for boundary in boundaries if boundary is not None]
        return min(later_steps, default=None)

    def log_shortened_loops(self, steps_per_loop: int | Callable[[int], int]) -> None:
        """Logs which callbacks make loops shorter than the config says, and what that costs."""
        if callable(steps_per_loop):
            return
        for member in self.members:
            if member.every and member.every % steps_per_loop:
                _LOG.info(
                    "the callback %s is called every %d steps: training loops are shortened to end"
                    " at these steps (trainer.steps_per_loop is %d); each loop costs about half a"
                    " millisecond on top of its steps",
                    member.name,
                    member.every,
                    steps_per_loop,
                )

    def take_requests(self) -> Requests:
        """Returns the requests since the last call, and decides whether the run stops.

        With several workers, all get the requests of the chief's callbacks, so all have to call
        this method.
        """
        run = self.run
        requests = run.requests
        run.requests = Requests()
        if self.shares_requests:
            requests = self._broadcast_requests(requests)

        if requests.stop_reason and not run.stop_reason:
            run.stop_reason = requests.stop_reason
            _LOG.info("the run ends at step %d: %s", run.step, run.stop_reason)
        return requests

    def _broadcast_requests(self, requests: Requests) -> Requests:
        """Sends the chief's requests to all workers as one number.

        Its lowest bits are the stop, the two kinds of saves and each validation set. The bits above
        them are the step of a rewind plus 1, or 0 without a rewind.
        """
        sets = list(self.run.trainer.validation_set_names)
        bits = [bool(requests.stop_reason), requests.save, requests.overwrite_checkpoint]
        for name in sets:
            bits.append(name in requests.sets_to_evaluate)
        number = 0
        if requests.rewind_step is not None:
            number = requests.rewind_step + 1
        for bit in reversed(bits):
            number = 2 * number + bit
        number = broadcast_int(self._strategy, number)

        # The lowest bit is the first one.
        received_bits: list[bool] = []
        for _ in bits:
            received_bits.append(number % 2 == 1)
            number //= 2
        stop, save, overwrite, *set_bits = received_bits
        sets_to_evaluate = set()
        for name, is_chosen in zip(sets, set_bits, strict=True):
            if is_chosen:
                sets_to_evaluate.add(name)
        rewind_step = number - 1 if number > 0 else None

        # The texts of the chief's requests are not sent.
        default_reason = "the first worker asked for it"
        stop_reason = ""
        if stop:
            stop_reason = requests.stop_reason or default_reason
        return Requests(
            stop_reason=stop_reason,
            save=save,
            overwrite_checkpoint=overwrite,
            sets_to_evaluate=sets_to_evaluate,
            rewind_step=rewind_step,
            rewind_reason=requests.rewind_reason or default_reason,
        )

    def _is_called(self, member: Callback, event: str) -> bool:
        if not _overrides(member, event) or not self._runs_on_this_worker(member):
            return False
        # Only loop_end has an interval.
        if event != "loop_end" or not member.every:
            return True
        return self.run.step % member.every == 0

    def _runs_on_this_worker(self, member: Callback) -> bool:
        return self.run.is_chief or not member.chief_only

    def _call(self, member: Callback, method: str, *arguments: Any) -> Any:
        """Calls a method with the run and `arguments`, and counts its time.

        Returns the result of the method, or None if an optional callback failed.
        """
        row = member.name
        if row not in TIME_CATEGORIES:
            row = f"callbacks/{member.name}"
        if method not in ("state", "restore"):
            arguments = (self.run, *arguments)

        result: Any = None
        previous_names = set(self.run.reported_metrics)
        with self.times.during(row):
            try:
                result = getattr(member, method)(*arguments)
            except StopTraining as stop:
                self.run.stop(str(stop))
            except Exception as error:
                self._handle_error(member, error)
        new_names = self.run.reported_metrics.keys() - previous_names
        self._reporters |= dict.fromkeys(new_names, member)

        # A reported number must not have the name of a metric of this loop or evaluation.
        common_names = self.run.reported_metrics.keys() & self._logs.keys()
        for name in sorted(common_names):
            del self.run.reported_metrics[name]
            problem = (
                f"run.report: the run already has a metric called {name}; report the number under"
                " another name"
            )
            self._handle_error(self._reporters[name], UsageError(problem))
        return result

    def _handle_error(self, member: Callback, error: Exception) -> None:
        """Raises the error of a required member. Counts and logs the error of an optional one."""
        if member.required:
            if type(error) is UsageError:
                raise UsageError(f"callback {member.name}: {error}") from error
            raise error

        count = self.errors.get(member.name, 0) + 1
        self.errors[member.name] = count
        _LOG.warning(
            "the callback %s failed at step %d, and the run continues: %s",
            member.name,
            self.run.step,
            error,
            # Only the first error of a callback is logged with its traceback.
            exc_info=error if count == 1 else None,
        )

    def _iter_stateful_members(self) -> Iterator[tuple[str, Callback]]:
        """Yields the members that have a state, with unique names.

        The second member called "name" is "name 2".
        """
        counts: dict[str, int] = {}
        for member in self.members:
            if not _overrides(member, "state"):
                continue
            number = counts.get(member.name, 0) + 1
            counts[member.name] = number
            name = member.name if number == 1 else f"{member.name} {number}"
            yield name, member

    def _read_state(self, member: Callback) -> Any:
        return self._call(member, "state")

    def _create_restore_function(self, name: str, member: Callback) -> Callable[[Any], None]:
        def restore(state: Any) -> None:
            self._pending_states.pop(name, None)
            if state is None or not self._runs_on_this_worker(member):
                return
            if self._has_begun:
                self._call(member, "restore", state)
            else:
                self._pending_states[name] = state
                member.saved_state = state

        return restore

    def _restore_states(self, previous_states: Mapping[str, object]) -> None:
        """Restores the states of a checkpoint, else those from before a second train_begin.

        This runs after train_begin, in which callbacks may reset themselves.

        Args:
          previous_states: The states before a second train_begin, by name.
        """
        states = {**previous_states, **self._pending_states}
        self._pending_states = {}
        self._has_begun = True
        for name, member in self._iter_stateful_members():
            state = states.get(name)
            if state is not None and self._runs_on_this_worker(member):
                self._call(member, "restore", state)
            new_state = self._read_state(member)
            check_state(f"callback {name}", new_state)


def _overrides(member: Callback, event: str) -> bool:
    return getattr(type(member), event) is not getattr(Callback, event)


def _check_callback(member: Callback) -> None:
    every: Any = member.every
    if every is not None and (not isinstance(every, int) or every < 1):
        raise UsageError(
            f"callback {member.name}: every is {every!r}; give a positive whole number of steps, or"
            " None"
        )

    # The run calls each public method with the arguments of the base class, without self.
    for name, event in vars(Callback).items():
        is_public = inspect.isfunction(event) and not name.startswith("_")
        if is_public and _overrides(member, name):
            _, *parameters = inspect.signature(event).parameters
            _check_parameters(member, name, parameters)

    # A method with a name like that of an event is probably misspelled, or has Keras's name.
    all_names = set(dir(type(member)))
    own_names = all_names - set(dir(Callback))
    for name in sorted(own_names):
        short_name = name.removeprefix("on_")
        suggestions = difflib.get_close_matches(short_name, _EVENTS, 1, 0.9)
        if suggestions:
            _LOG.warning(
                "callback %s: the method %s is never called; did you mean %s?",
                member.name,
                name,
                suggestions[0],
            )


def _check_parameters(member: Callback, name: str, called_with: Sequence[str]) -> None:
    """Raises UsageError when a callback's method does not accept the arguments of its call."""
    method: Any = getattr(member, name)
    if not callable(method):
        raise UsageError(
            f"callback {member.name}: {name} is {method!r}; make it a method, or leave it out"
        )

    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        # Some callables, such as builtins, have no signature to check.
        return

    try:
        signature.bind(*called_with)
    except TypeError as problem:
        place = ""
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code:
            place = f" ({code.co_filename}:{code.co_firstlineno})"
        arguments = ", ".join(called_with)
        parameters = ", ".join(("self", *called_with))
        raise UsageError(
            f"callback {member.name}: {name} is called with ({arguments}): {problem};"
            f" declare it as {name}({parameters}){place}"
        ) from None

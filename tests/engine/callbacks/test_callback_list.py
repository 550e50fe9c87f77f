"""How callbacks are called: their order, time, errors, state and requests."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.callbacks import callback_list
from trainer_kit.callbacks.callback import Callback, Requests, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.errors import DivergedError, StopTraining, UsageError
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import CustomParts


class _Noting(Callback):
    def __init__(
        self, called: list[str], name: str = "Noting", error: Exception | None = None, **kind: bool
    ) -> None:
        self._called = called
        self._name = name
        self._error = error
        for attribute, value in kind.items():
            setattr(self, attribute, value)

    @property
    def name(self) -> str:
        return self._name

    def train_begin(self, run: Run) -> None:
        self._called.append(f"{self._name}.train_begin")

    def loop_end(self, run: Run, logs: Any) -> None:
        self._called.append(f"{self._name}.loop_end")
        if self._error is not None:
            raise self._error

    def train_end(self, run: Run) -> None:
        self._called.append(f"{self._name}.train_end")


class _Counting(Callback):
    """Counts loops, from zero at train_begin."""

    def __init__(self) -> None:
        self.count = 0

    def train_begin(self, run: Run) -> None:
        self.count = 0

    def loop_end(self, run: Run, logs: Any) -> None:
        self.count += 1

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


def _build_list(*members: Callback, chief: bool = True, **trainer: Any) -> CallbackList:
    step = tf.Variable(7, dtype=tf.int64)
    parts = SimpleNamespace(
        custom_parts=CustomParts(replaces_steps=True),
        validation_set_names=("",),
        global_step=step,
        **trainer,
    )
    run = Run(parts, "", chief)
    run.step = 7
    return CallbackList(run, members)


def test_callbacks_are_called_in_their_order_and_end_in_any_case() -> None:
    called: list[str] = []
    listed = _build_list(_Noting(called, "a"), _Noting(called, "b"))

    with pytest.raises(KeyError), listed.call_begin_and_end("train"):
        listed.call("loop_end", {})
        raise KeyError

    events = ["train_begin", "loop_end", "train_end"]
    assert called == [f"{name}.{event}" for event in events for name in ("a", "b")]


def test_required_errors_are_raised_and_optional_ones_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[str] = []
    listed = _build_list(
        _Noting(called, "samples", OSError("no space"), required=False), _Noting(called, "b")
    )

    for _ in range(2):
        listed.call("loop_end", {})

    assert called == ["samples.loop_end", "b.loop_end"] * 2
    assert listed.errors == {"samples": 2}
    assert (
        caplog.text.count("the callback samples failed at step 7, and the run continues: no space")
        == 2
    )

    with pytest.raises(OSError):
        _build_list(_Noting(called, "b", OSError())).call("loop_end", {})


def test_a_callback_that_fails_after_an_error_does_not_hide_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bad(Callback):
        def exception(self, run: Run, error: Exception) -> None:
            raise ValueError("of the callback")

        def train_end(self, run: Run) -> None:
            raise ValueError("at the end")

    listed = _build_list(Bad())

    with pytest.raises(KeyError), listed.call_begin_and_end("train"):
        listed.call_after_error("exception", KeyError())
        raise KeyError

    assert "Bad.exception failed, after another error" in caplog.text
    assert "Bad.train_end failed, after another error" in caplog.text


def test_an_explained_divergence_replaces_the_first_error() -> None:
    class Explains(Callback):
        def exception(self, run: Run, error: Exception) -> None:
            raise DivergedError("more is known")

    with pytest.raises(DivergedError, match="more is known"):
        _build_list(Explains()).call_after_error("exception", DivergedError("nan"))


def test_only_the_chief_calls_what_does_not_say_otherwise() -> None:
    called: list[str] = []

    _build_list(_Noting(called, "a"), _Noting(called, "b", chief_only=False), chief=False).call(
        "loop_end", {}
    )

    assert called == ["b.loop_end"]


def test_stop_training_is_a_request_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    listed = _build_list(
        _Noting([], "a", StopTraining("enough")), _Noting([], "b", StopTraining("later"))
    )

    with caplog.at_level(logging.INFO, "trainer_kit"):
        listed.call("loop_end", {})
        assert listed.run.stop_reason == ""
        listed.take_requests()

    assert listed.run.stop_reason == "enough"
    assert "the run ends at step 7: enough" in caplog.text


def test_requests_are_taken_once() -> None:
    listed = _build_list()

    listed.run.save()
    listed.run.evaluate()
    asked = listed.take_requests()

    assert (asked.save, asked.sets_to_evaluate, asked.rewind_step) == (True, {""}, None)
    assert listed.take_requests() == Requests()


def test_requests_of_the_chief_reach_all_workers_whole() -> None:
    listed = _build_list()
    listed.shares_requests = True

    listed.run.rewind(0, "the loss is not finite")
    requests = listed.take_requests()

    assert (requests.rewind_step, requests.save, requests.stop_reason) == (0, False, "")


def test_states_are_restored_after_train_begin_or_at_once() -> None:
    kept: dict[str, tuple[Any, Any]] = {}
    first = _Counting()
    second = _Counting()
    listed = _build_list(
        first, second, register_state=lambda name, get, put: kept.update({name: (get, put)})
    )

    listed.register_states()

    assert list(kept) == ["callback _Counting", "callback _Counting 2"]

    kept["callback _Counting"][1](5)
    kept["callback _Counting 2"][1](None)

    assert first.count == 0

    with listed.call_begin_and_end("train"):
        assert first.count == 5
        assert second.count == 0
        listed.call("loop_end", {})
        assert kept["callback _Counting"][0]() == 6
        kept["callback _Counting"][1](2)
        assert first.count == 2


class _Choosing(Callback):
    def next_boundary(self, step: int) -> int | None:
        return next((boundary for boundary in (3, 11) if boundary > step), None)


@pytest.mark.parametrize(
    ("every", "step", "cut"),
    [
        ((None, None), 7, None),
        ((3, None), 7, 9),
        ((5, 4), 7, 8),
        (("choosing",), 7, 11),
        (("choosing",), 11, None),
        (("choosing", 4), 7, 8),
    ],
)
def test_loops_end_where_a_callback_wants_them_to(
    every: tuple[Any, ...], step: int, cut: int | None
) -> None:
    members: list[Callback] = []

    for steps in every:
        members.append(_Choosing() if steps == "choosing" else _Counting())
        members[-1].every = None if steps == "choosing" else steps

    assert _build_list(*members).find_next_boundary(step) == cut


class _WithoutLogs(Callback):
    def loop_end(self, run: Run) -> None:  # type: ignore[override]
        """Forgets a parameter."""


class _NoMethod(Callback):
    loop_end = None  # type: ignore[assignment]


class _Unsavable(Callback):
    def state(self) -> Any:
        return {"seen": {1, 2}}


@pytest.mark.parametrize(
    "member", [_WithoutLogs(), _NoMethod(), _Unsavable()], ids=lambda member: member.name
)
def test_an_unusable_callback_is_refused_before_training(member: Callback) -> None:
    with pytest.raises(UsageError), _build_list(member).call_begin_and_end("train"):
        raise AssertionError


@pytest.mark.parametrize("every", [0, -5, 2.5, "50"])
def test_every_is_a_positive_number_of_steps(every: Any) -> None:
    member = _Counting()
    member.every = every

    with pytest.raises(UsageError):
        _build_list(member)


def test_a_request_for_an_unknown_validation_set_is_refused() -> None:
    with pytest.raises(UsageError):
        _build_list().run.evaluate(["hard"])


def test_what_each_callback_takes_is_counted_under_its_name() -> None:
    ticks = iter(range(100))
    times = TimeLedger(lambda: float(next(ticks)))

    CallbackList(_build_list().run, [_Noting([], "a"), _Noting([], "report")], times).call(
        "loop_end", {}
    )
    seconds = times.build_account().seconds

    assert seconds["callbacks/a"] == 1
    assert seconds["report"] == 1


def test_a_method_with_almost_the_name_of_an_event_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Keras(Callback):
        def on_loop_end(self, run: Run, logs: Any) -> None: ...

    _build_list(Keras())

    assert "the method on_loop_end is never called; did you mean loop_end?" in caplog.text


def test_the_state_of_an_optional_callback_that_fails_is_none() -> None:
    class Bad(Callback):
        required = False

        def state(self) -> Any:
            raise OSError

    kept: dict[str, Any] = {}
    listed = _build_list(Bad(), register_state=lambda name, get, put: kept.update({name: get}))

    listed.register_states()

    assert kept["callback Bad"]() is None
    assert listed.errors == {"Bad": 1}


def test_all_members_end_although_one_of_them_fails_at_the_end() -> None:
    class Bad(Callback):
        def train_end(self, run: Run) -> None:
            raise OSError("at the end")

    called: list[str] = []

    with (
        pytest.raises(OSError, match="at the end"),
        _build_list(Bad(), _Noting(called, "a")).call_begin_and_end("train"),
    ):
        pass

    assert called == ["a.train_begin", "a.train_end"]


def test_a_second_training_goes_on_with_the_state_of_the_first() -> None:
    counting = _Counting()
    listed = _build_list(counting)

    with listed.call_begin_and_end("train"):
        listed.call("loop_end", {})

    with listed.call_begin_and_end("train"):
        assert counting.count == 1


def test_other_workers_do_what_the_chiefs_callbacks_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        callback_list,
        "broadcast_int",
        lambda strategy, number: told.append(number) or told[0],
    )
    monkeypatch.setattr(callback_list, "worker_count", lambda strategy: 2)
    chief = _build_list()
    other = _build_list(chief=False)

    chief.run.stop("enough")
    chief.run.evaluate()
    chief.run.rewind(40, "again")
    other.run.save()  # the chief has not
    asked = [callback_list.take_requests() for callback_list in (chief, other)]

    assert [
        (requests.save, requests.sets_to_evaluate, requests.rewind_step) for requests in asked
    ] == [(False, {""}, 40)] * 2
    assert chief.run.stop_reason == "enough"
    assert other.run.stop_reason


class _Reporting(Callback):
    """Reports under a name that the run has."""

    required = False

    def loop_end(self, run: Run, logs: Any) -> None:
        """MetricsReporter."""
        run.report("accuracy", 7.0)


def test_who_reports_under_the_name_of_a_metric_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run = _build_list().run

    CallbackList(run, [_Reporting()]).call("loop_end", {"accuracy": 0.5})

    assert "the callback _Reporting failed" in caplog.text
    assert run.reported_metrics == {}
    assert "the run already has a metric called accuracy" in caplog.text


class _Early(Callback):
    """Reports before the loop whose metric has that name."""

    def loop_begin(self, run: Run, steps: int) -> None:
        """MetricsReporter."""
        run.report("accuracy", 7.0)


def test_a_report_before_the_loop_is_blamed_on_who_made_it() -> None:
    run = _build_list().run
    called = list[str]()
    listed = CallbackList(run, [_Early(), _Noting(called)])
    listed.call("loop_begin", 10)

    with pytest.raises(
        UsageError,
        match=r"callback _Early: run\.report: the run already has a metric called accuracy",
    ):
        listed.call("loop_end", {"accuracy": 0.5})


def test_a_loop_may_use_a_metric_name_of_the_next_evaluation() -> None:
    run = _build_list().run
    listed = CallbackList(run, [_Early()])

    listed.call("evaluation_end", {"accuracy": 0.5})
    listed.call("loop_begin", 10)
    listed.call("loop_end", {"training_loss": 0.5})

    assert run.reported_metrics == {"accuracy": 7.0}


class _Moving(Callback):
    """Moves the global step at the end of a loop, as a restore does."""

    def loop_end(self, run: Run, logs: Any) -> None:
        run.trainer.global_step.assign(3)


def test_run_step_is_read_after_an_event_that_a_user_sees() -> None:
    called = _build_list(_Moving())

    called.call("loop_begin", 1)

    assert called.run.step == 7

    called.call("loop_end", {})

    assert called.run.step == 3

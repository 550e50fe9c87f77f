"""The outer loop: its intervals, reports, saves and stops; a counter stands for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.finite_check import FiniteCheck
from trainer_kit.callbacks.metrics_reporter import MetricsReporter
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import DivergedError, StopTraining, StorageError, UsageError
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.run.controller import BoundarySchedule, Controller
from trainer_kit.run.orbit_adapters import Actions
from trainer_kit.telemetry.report import Report, Writer
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.loops.intervals import Epochs

# The loops of each test end at the multiples of this number, and where else something is due.
STEPS_PER_LOOP = 4


class _Counter(BaseTrainer):
    """Counts steps. Its data ends after `examples`, and `losses` has the losses that are not 1."""

    def __init__(self, examples: int = 10**9, losses: dict[int, float] | None = None) -> None:
        self.global_step = tf.Variable(0, dtype=tf.int64)
        self.loop_steps = 0
        self.has_data_ended = False
        self._examples = examples
        self.losses = losses or {}
        self.evaluated: list[int] = []

    def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
        step = int(self.global_step)
        self.loop_steps = min(int(num_steps), self._examples - step)
        self.has_data_ended = self.loop_steps < int(num_steps)
        self.global_step.assign_add(self.loop_steps)
        return {"training_loss": tf.constant(self.losses.get(int(self.global_step), 1.0))}

    def evaluate(self, num_steps: tf.Tensor) -> dict[str, Any]:
        self.evaluated.append(int(self.global_step))
        return {"accuracy": tf.constant(0.5)}


class _StopsAtEvaluation(Callback):
    """Stops the run at its first evaluation."""

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        run.stop("enough")


class _KeptReports(Writer):
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def write(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None: ...


def _create_controller(
    folder: Path,
    counter: _Counter,
    interval: int = 10,
    callbacks: Sequence[Callback] = (),
    train_actions: Sequence[Any] = (),
    eval_actions: Sequence[Any] = (),
    batch_size: int = 0,
    **arguments: Any,
) -> tuple[Controller, _KeptReports]:
    kept = _KeptReports()
    times = arguments.pop("times", None)
    trainer = SavedTrainer(
        tf.train.Checkpoint(global_step=counter.global_step), counter.global_step
    )
    manager = manager_of(trainer, folder, max_to_keep=99, interval=interval, asynchronous=False)
    reporters = [Actions(train_actions, eval_actions), MetricsReporter(kept, batch_size)]
    members = [*callbacks, *reporters]
    controller = Controller(
        callbacks=CallbackList(Run(counter, str(folder)), members, times),
        trainer=counter,
        evaluator=counter,
        global_step=counter.global_step,
        steps_per_loop=STEPS_PER_LOOP,
        checkpoint_manager=manager,
        **arguments,
    )
    controller.restore_checkpoint()
    return controller, kept


def _list_steps(kept: _KeptReports, kind: str = "train") -> list[int]:
    return [report.step for report in kept.reports if report.kind == kind]


def test_loops_end_at_the_last_step_and_cross_intervals(tmp_path: Path) -> None:
    controller, kept = _create_controller(tmp_path, _Counter())

    controller.train(26)

    assert _list_steps(kept) == [4, 8, 12, 16, 20, 24, 26]
    assert list(complete_checkpoints(str(tmp_path))) == [12, 20, 26]
    assert {report.total_steps for report in kept.reports} == {26}


class _LoopEnds(Callback):
    """Notes the steps at which loops end."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def loop_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        self.steps.append(run.step)


def test_a_loop_without_a_step_has_no_loop_end(tmp_path: Path) -> None:
    # The data ends where a loop ends, so that the next loop finds nothing.
    examples = 2 * STEPS_PER_LOOP
    callback = _LoopEnds()
    controller, _ = _create_controller(tmp_path, _Counter(examples), callbacks=[callback])

    controller.train(-1)

    assert callback.steps == [STEPS_PER_LOOP, examples]


def test_the_time_account_splits_steps_input_and_evaluations(tmp_path: Path) -> None:
    class Timed(_Counter):
        """A step takes a second (a quarter is waiting), an evaluation ten, an action half one."""

        now = 0.0
        input_seconds = 0.0

        def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
            self.now += int(num_steps)
            self.input_seconds = int(num_steps) / 4
            return super().train(num_steps)

        def evaluate(self, num_steps: tf.Tensor) -> dict[str, Any]:
            self.now += 10
            return super().evaluate(num_steps)

        def act(self, logs: Any) -> None:
            self.now += 0.5

    counter = Timed()
    times = TimeLedger(lambda: counter.now)
    counter.now += 3
    actions = {"train_actions": [counter.act], "eval_actions": [counter.act]}
    controller, _ = _create_controller(tmp_path, counter, times=times, **actions)
    controller.train_and_evaluate(train_steps=12, eval_interval=6)
    account = controller.times.build_account()
    spent = {name: seconds for name, seconds in account.seconds.items() if seconds}

    assert spent == {"start": 3, "input": 3, "step": 9, "callbacks/actions": 3, "evaluation": 20}
    assert account.steps == 12
    assert account.evaluations == 2
    # The start takes 3 seconds. The loops end at 4, 6, 8 and 12, so there are 4 of them.
    actions_seconds = (4 + 2) * 0.5
    assert account.wall == 3 + 12 + 2 * 10 + actions_seconds
    assert account.unaccounted_seconds == 0


def test_a_failed_save_is_not_announced_to_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_steps: list[int] = []

    class SavedSteps(Callback):
        def checkpoint_saved(self, run: Run, path: str, step: int) -> None:
            saved_steps.append(step)

    def fail(*_: object) -> None:
        raise OSError("of the disk")

    controller, _ = _create_controller(tmp_path, _Counter(), callbacks=[SavedSteps()])
    controller.train(4)
    monkeypatch.setattr(controller.checkpoint_manager.checkpoint, "write", fail)
    with pytest.raises(StorageError, match="ckpt-8 was not written: of the disk"):
        controller.train(8)
    controller.sync()
    assert saved_steps == [4]


def test_a_controller_without_an_evaluator_says_so(tmp_path: Path) -> None:
    controller, _ = _create_controller(tmp_path, _Counter())
    controller.evaluator = None
    with pytest.raises(UsageError, match="has no evaluator; create it with evaluator="):
        controller.train_and_evaluate(train_steps=4)
    controller.train(4)
    assert controller.run.step == 4


def test_no_checkpoint_at_the_end_when_it_is_not_wanted(tmp_path: Path) -> None:
    controller, _ = _create_controller(tmp_path, _Counter())

    controller.train(14, checkpoint_at_completion=False)

    assert list(complete_checkpoints(str(tmp_path))) == [12]


def test_a_trainer_that_takes_extra_steps_is_still_evaluated(tmp_path: Path) -> None:
    class Eager(_Counter):
        def train(self, num_steps: tf.Tensor) -> dict[str, Any]:
            return super().train(num_steps + 1)

    counter = Eager()
    controller, _ = _create_controller(tmp_path, counter)

    controller.train_and_evaluate(train_steps=30, eval_interval=9)

    assert counter.evaluated == [10, 19, 28, 31]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 6.0])
def test_a_diverged_loss_ends_the_run_without_a_save(tmp_path: Path, loss: float) -> None:
    controller, kept = _create_controller(
        tmp_path, _Counter(losses={12: loss}), callbacks=[FiniteCheck(5.0)]
    )

    with pytest.raises(DivergedError, match=r"at step 12 .*loss_upper_bound is 5\)"):
        controller.train(20)

    assert _list_steps(kept) == [4, 8, 12]  # the last one is reported too
    assert not complete_checkpoints(str(tmp_path))


def test_a_high_loss_counts_from_the_first_step_of_its_bound(tmp_path: Path) -> None:
    controller, _ = _create_controller(
        tmp_path, _Counter(losses={4: 6.0, 12: 6.0}), callbacks=[FiniteCheck(5.0, 8)]
    )

    with pytest.raises(DivergedError, match="at step 12"):
        controller.train(20)


def test_a_diverged_loss_is_reported_without_a_finite_check(tmp_path: Path) -> None:
    controller, kept = _create_controller(tmp_path, _Counter(losses={4: float("nan")}))

    controller.train(8)

    assert _list_steps(kept) == [4, 8]


def _raise_stop(logs: Any) -> None:
    raise StopTraining("enough")


def test_an_action_that_stops_gets_a_save_and_an_evaluation(tmp_path: Path) -> None:
    counter = _Counter()
    steps = []
    actions = [
        lambda logs: _raise_stop(logs) if int(counter.global_step) == 8 else None,
        steps.append,
    ]

    controller, kept = _create_controller(tmp_path, counter, train_actions=actions)

    assert controller.train_and_evaluate(train_steps=40, eval_interval=20) == {"accuracy": 0.5}
    assert controller.run.stop_reason == "enough"
    assert len(steps) == 2
    assert counter.evaluated == [8]
    assert _list_steps(kept) == [4, 8]
    assert list(complete_checkpoints(str(tmp_path))) == [8]


def test_a_diverged_loop_is_not_saved_when_an_action_stops(tmp_path: Path) -> None:
    counter = _Counter(losses={8: float("nan")})
    controller, _ = _create_controller(
        tmp_path, counter, callbacks=[FiniteCheck(5.0)], train_actions=[_raise_stop]
    )
    counter.global_step.assign(4)

    with pytest.raises(DivergedError):
        controller.train(20)

    assert not complete_checkpoints(str(tmp_path))


class _BackOnce(Callback):
    """Takes the run back once: after an error, or at the end of a loop."""

    def __init__(self, step: int, at: int = -1) -> None:
        self._step = step
        self._at = at
        self.rewound_to: list[tuple[int, int]] = []

    def exception(self, run: Run, error: Exception) -> None:
        run.trainer.losses.clear()
        run.rewind(self._step, str(error))

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step == self._at and not self.rewound_to:
            run.rewind(self._step, "to try again")

    def rewound(self, run: Run, step: int) -> None:
        self.rewound_to.append((run.step, step))


def test_a_rewind_cancels_the_stop_of_an_action(tmp_path: Path) -> None:
    counter = _Counter(losses={12: float("nan")})
    once = iter([True])

    def stop_once(logs: Any) -> None:
        if int(counter.global_step) == 12 and next(once, False):
            _raise_stop(logs)

    back = _BackOnce(8)
    controller, _ = _create_controller(
        tmp_path, counter, interval=8, callbacks=[FiniteCheck(5.0), back], train_actions=[stop_once]
    )

    controller.train(20)

    assert int(counter.global_step) == 20
    assert controller.run.stop_reason == ""
    assert back.rewound_to == [(8, 8)]


class _RestoresOnce(Callback):
    """Sets the global step back from 12 to 8 in one event, as a restore does, the first time."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._has_restored = False

    def _restore_in(self, event: str, run: Run) -> None:
        if event == self._event and run.step == 12 and not self._has_restored:
            self._has_restored = True
            run.trainer.global_step.assign(8)

    def loop_end(self, run: Run, logs: Any) -> None:
        self._restore_in("loop_end", run)

    def evaluation_end(self, run: Run, logs: Any) -> None:
        self._restore_in("evaluation_end", run)


@pytest.mark.parametrize("event", ["loop_end", "evaluation_end"])
def test_a_run_follows_a_callback_that_restores(tmp_path: Path, event: str) -> None:
    counter = _Counter()
    controller, _ = _create_controller(
        tmp_path, counter, interval=8, callbacks=[_RestoresOnce(event)]
    )

    controller.train_and_evaluate(train_steps=16, eval_interval=12)

    assert int(counter.global_step) == 16
    assert controller.run.step == 16


def test_a_step_that_an_action_moves_forward_counts(tmp_path: Path) -> None:
    counter = _Counter()
    forward = [lambda _: counter.global_step.assign(12) if int(counter.global_step) == 8 else None]
    controller, _ = _create_controller(tmp_path, counter, train_actions=forward)

    controller.train_and_evaluate(train_steps=20, eval_interval=10)

    assert counter.evaluated == [12, 20]
    assert list(complete_checkpoints(str(tmp_path))) == [12, 20]


class _OftenAndRare(_Counter):
    """Has two validation sets: "often", evaluated every 4 steps, and "rare", every 40."""

    validation_set_names = ("often", "rare")

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[Any, ...]] = []

    def validation_intervals(self, default: int | None) -> dict[str, int | None]:
        return {"often": 4, "rare": 40}

    def evaluate(
        self, num_steps: tf.Tensor, sets: Sequence[str] = ("often", "rare")
    ) -> dict[str, Any]:
        self.taken.append((int(self.global_step), *sets))
        return {name: {"accuracy": tf.constant(0.5)} for name in sets}


def test_evaluations_are_repeated_after_a_rewind(tmp_path: Path) -> None:
    counter = _OftenAndRare()
    controller, _ = _create_controller(
        tmp_path, counter, interval=4, callbacks=[_BackOnce(4, at=12)]
    )

    assert set(controller.train_and_evaluate(train_steps=16)) == {"often", "rare"}

    steps = [
        (4, "often"),
        (8, "often"),
        (4, "often"),
        (8, "often"),
        (12, "often"),
        (16, "often", "rare"),
    ]
    assert counter.taken == steps


def test_all_sets_are_evaluated_when_a_callback_ends_the_run(tmp_path: Path) -> None:
    counter = _OftenAndRare()
    controller, kept = _create_controller(
        tmp_path, counter, interval=4, callbacks=[_StopsAtEvaluation()]
    )

    assert set(controller.train_and_evaluate(train_steps=40)) == {"often", "rare"}
    assert counter.taken == [(4, "often"), (4, "rare")]
    assert _list_steps(kept, "validation") == [4]


class _StopsAtBoundaryEnd(Callback):
    """Stops the run at the first boundary_end after a step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def boundary_end(self, run: Run) -> None:
        self.steps.append(run.step)
        if run.step > 0:
            run.stop("enough")


def test_boundary_end_comes_again_after_evaluations_of_its_stop(tmp_path: Path) -> None:
    counter = _OftenAndRare()
    callback = _StopsAtBoundaryEnd()
    controller, _ = _create_controller(tmp_path, counter, interval=4, callbacks=[callback])

    assert set(controller.train_and_evaluate(train_steps=40)) == {"often", "rare"}
    assert counter.taken == [(4, "often"), (4, "rare")]
    # The first one is of the start.
    assert callback.steps == [0, 4, 4]


class _AsksIn(Callback):
    """Asks for something in one event of step 8, once; notes what happens."""

    def __init__(self, event: str, request: str, order: list[str]) -> None:
        self._event = event
        self._request = request
        self._order = order
        self._asked = False

    def _ask(self, event: str, run: Run) -> None:
        if event == self._event and run.step == 8 and not self._asked:
            self._asked = True
            if self._request == "save":
                run.save()
            elif self._request == "evaluate":
                run.evaluate()
            else:
                run.stop("enough")

    def loop_end(self, run: Run, logs: Any) -> None:
        self._ask("loop_end", run)

    def checkpoint_begin(self, run: Run) -> None:
        self._order.append(f"save {run.step}")
        self._ask("checkpoint_begin", run)

    def evaluation_end(self, run: Run, logs: Any) -> None:
        self._order.append(f"evaluate {run.step}")
        self._ask("evaluation_end", run)

    def boundary_end(self, run: Run) -> None:
        self._ask("boundary_end", run)


# What a run of 16 steps does that saves and evaluates every 8 steps, by event and request.
PLANNED = ["save 8", "evaluate 8", "save 16", "evaluate 16"]
ASKED = {
    ("loop_end", "evaluate"): PLANNED,
    ("checkpoint_begin", "save"): PLANNED,
    ("evaluation_end", "save"): PLANNED,
    # The evaluations of step 8 are done, so the request waits for the end of the next loop.
    ("boundary_end", "evaluate"): ["save 8", "evaluate 8", "evaluate 12", "save 16", "evaluate 16"],
    **{
        (event, "stop"): PLANNED[:2]
        for event in ("loop_end", "checkpoint_begin", "evaluation_end", "boundary_end")
    },
}


@pytest.mark.parametrize(("event", "request_"), ASKED)
def test_a_request_is_carried_out_whenever_it_is_made(
    tmp_path: Path, event: str, request_: str
) -> None:
    order: list[str] = []
    controller, kept = _create_controller(
        tmp_path, _Counter(), interval=8, callbacks=[_AsksIn(event, request_, order)]
    )

    controller.train_and_evaluate(train_steps=16, eval_interval=8)

    assert order == ASKED[event, request_]

    evaluated = [int(event.split()[1]) for event in order if event.startswith("evaluate")]
    assert _list_steps(kept, "validation") == evaluated


def test_a_rewind_request_does_not_hide_another_callbacks_error(tmp_path: Path) -> None:
    class Fails(Callback):
        def loop_end(self, run: Run, logs: Any) -> None:
            if run.step == 8:
                raise KeyError("a bug")

    class Back(Callback):
        def loop_end(self, run: Run, logs: Any) -> None:
            if run.step == 8:
                run.rewind(4, "to try again")

    controller, _ = _create_controller(
        tmp_path, _Counter(), interval=4, callbacks=[Back(), Fails()]
    )

    with pytest.raises(KeyError, match="a bug"):
        controller.train(20)


class _EveryThird(Callback):
    every = 3

    def __init__(self) -> None:
        self.steps: list[int] = []

    def loop_end(self, run: Run, logs: Any) -> None:
        self.steps.append(run.step)


def test_loops_are_cut_where_a_callback_wants_to_be_called(tmp_path: Path) -> None:
    third = _EveryThird()
    controller, kept = _create_controller(tmp_path, _Counter(), callbacks=[third])

    controller.train(10)

    assert third.steps == [3, 6, 9]
    assert _list_steps(kept) == [3, 6, 9, 10]


def test_a_rewind_to_a_step_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    controller, _ = _create_controller(tmp_path, _Counter(), callbacks=[_BackOnce(5, at=8)])

    with pytest.raises(
        UsageError, match=r"go back to step 5 \(to try again\): .* holds no checkpoint"
    ):
        controller.train(20)


def test_checkpoints_are_evaluated_in_order_without_damaged_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _create_controller(tmp_path, _Counter(), interval=4)[0].train(12)
    counter = _Counter()
    controller, _ = _create_controller(tmp_path, counter)

    (tmp_path / "ckpt-8.index").write_bytes(b"broken")

    directory = RunDirectory(str(tmp_path), TrainerConfig(), "side")
    ledger = Ledger(directory.ledger_path, dataset="eval", config_hash="")
    with Lease(directory.evals_dir, "side", lambda: ("wait", 0)) as lease:
        sidecar = Sidecar(directory, ledger, None, None, lease, 12, counter.global_step)
        logs = controller.evaluate_continuously(timeout=0, sidecar=sidecar)

    assert logs == {"accuracy": 0.5}
    assert counter.evaluated == [4, 12]
    assert "a checkpoint is skipped: " in caplog.text
    assert "ckpt-8 is damaged" in caplog.text


class _SavesAgain(Callback):
    """Asks for a new checkpoint after each evaluation."""

    def __init__(self) -> None:
        self.saved_steps: list[int] = []

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        run.save(overwrite=True)

    def checkpoint_begin(self, run: Run) -> None:
        self.saved_steps.append(run.step)


class _AddsToLogs(Callback):
    """Adds a number to the logs of evaluations, and notes the evaluation's own logs."""

    def __init__(self) -> None:
        self.own_logs: list[dict[str, Any]] = []

    def evaluation_end(self, run: Run, logs: dict[str, Any]) -> None:
        logs["added"] = 1.0
        assert run.evaluation is not None
        self.own_logs.append(dict(run.evaluation.logs))


def test_what_callbacks_add_is_not_in_an_evaluations_own_logs(tmp_path: Path) -> None:
    callback = _AddsToLogs()
    controller, _ = _create_controller(tmp_path, _Counter(), callbacks=[callback])

    logs = controller.evaluate()

    assert logs == {"accuracy": 0.5, "added": 1.0}
    assert callback.own_logs == [{"accuracy": 0.5}]


def test_an_evaluation_alone_saves_a_step_again_if_asked_to(tmp_path: Path) -> None:
    callback = _SavesAgain()
    controller, _ = _create_controller(tmp_path, _Counter(), callbacks=[callback])
    controller.train(4)
    assert callback.saved_steps == [4]

    controller.evaluate()

    assert callback.saved_steps == [4, 4]


SCHEDULE = BoundarySchedule(
    eval_steps=-1, eval_intervals={"far": None, "dev": 4, "test": 6}, saves_last=True
)


@pytest.mark.parametrize(
    ("begin", "step", "is_last", "requested", "sets"),
    [
        (0, 3, False, [], []),
        (3, 5, False, [], ["dev"]),
        (5, 11, False, [], ["dev", "test"]),
        (4, 5, True, [], ["far", "dev", "test"]),
        (3, 5, False, ["test", "far"], ["far", "dev", "test"]),
    ],
    ids=["before", "at a multiple", "two multiples", "the last step", "asked for"],
)
def test_sets_are_due_at_their_intervals_the_end_or_when_asked(
    begin: int, step: int, is_last: bool, requested: list[str], sets: list[str]
) -> None:
    assert SCHEDULE.due_sets(begin, step, is_last=is_last, requested=requested) == sets


def test_without_intervals_nothing_is_due_even_if_asked_for() -> None:
    schedule = BoundarySchedule(eval_steps=-1, eval_intervals={}, saves_last=False)
    assert schedule.due_sets(16, 20, is_last=True, requested=["dev"]) == []


BOUNDARY = [
    "loop_end",
    "boundary_begin",
    "checkpoint_begin",
    "evaluation_begin",
    "checkpoint_saved",
    "evaluation_end",
    "epoch_end",
    "boundary_end",
]


def test_a_boundary_has_its_events_in_the_order_of_the_contract(tmp_path: Path) -> None:
    events: list[str] = []
    methods = {event: lambda *arguments, event=event: events.append(event) for event in BOUNDARY}
    callback = type("Notes", (Callback,), methods)()
    controller, _ = _create_controller(tmp_path, _Counter(), interval=4, callbacks=[callback])
    controller.run.epochs = Epochs(Fraction(4))

    controller.train_and_evaluate(train_steps=4, eval_interval=4)

    assert events == ["boundary_end", *BOUNDARY]  # the first one is of the start

"""A loop that runs in parts is the loop that runs in one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.training.loops.train_loop import SegmentedLoop


class _Loop:
    """Sums numbers of an iterator until it has come to `stop`, and waits 1 s for each."""

    def __init__(self, stop: int = 10**9) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.global_step = tf.Variable(0, dtype=tf.int64)
        self.total = 0
        self.stop = stop
        self.wait_seconds = 0.0
        self.fuse_steps = 1

    @property
    def step(self) -> int:
        return int(self.global_step.numpy())

    def __call__(self, iterator: Any, num_steps: Any, fresh: bool) -> tuple[int, int]:
        self.calls.append((int(num_steps), fresh))
        self.total = 0 if fresh else self.total
        done = min(int(num_steps), self.stop - self.step)
        self.total += sum(next(iterator) for _ in range(done))
        self.global_step.assign_add(done)
        self.wait_seconds = float(done)
        return done, self.total


class _Hooks:
    """Hooks that note each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, step: int) -> None:
        self.calls.append(step)

    def end(self, step: int, results: Any) -> bool:
        self.calls.append((step, results))
        return True


def test_only_the_first_step_of_a_new_loop_is_a_separate_call() -> None:
    loop = _Loop()
    numbers = iter(range(100))

    parts = SegmentedLoop(loop.global_step)

    assert parts.first_step_at == 0.0
    assert parts.run(loop, numbers, 5, True) == 5
    assert parts.results == sum(range(5))

    ready_at = parts.first_step_at
    assert parts.run(loop, numbers, 5, True) == 5
    assert parts.results == sum(range(5, 10))
    assert loop.calls == [(1, True), (4, False), (5, True)]
    assert ready_at == parts.first_step_at > 0

    other = _Loop()
    other.global_step.assign(loop.global_step)

    parts.run(other, numbers, 1, False)

    assert other.calls == [(1, False)]
    assert parts.first_step_at > ready_at


def test_the_first_call_of_a_fused_loop_is_a_program() -> None:
    loop = _Loop()
    loop.fuse_steps = 4

    parts = SegmentedLoop(loop.global_step)

    assert parts.run(loop, iter(range(100)), 10, True) == 10
    assert parts.results == sum(range(10))
    assert loop.calls == [(4, True), (6, False)]


def test_a_loop_that_stops_before_a_step_gets_no_further_call() -> None:
    loop = _Loop(stop=4)
    parts = SegmentedLoop(loop.global_step)
    parts.hooks = hooks = _Hooks()

    assert parts.run(loop, iter(range(100)), 10, True) == 4
    assert parts.results == sum(range(4))
    assert loop.calls == [(1, True), *[(1, False)] * 4]
    assert hooks.calls == [0, (1, 0), 1, (2, 1), 2, (3, 3), 3, (4, 6), 4]


def test_waits_of_all_parts_but_the_first_step_are_added() -> None:
    loop = _Loop()
    numbers = iter(range(100))
    parts = SegmentedLoop(loop.global_step)
    parts.hooks = _Hooks()
    waited = []

    for _ in range(2):
        parts.run(loop, numbers, 6, True)
        waited.append(parts.wait_seconds)

    assert waited == [5.0, 6.0]

    parts.hooks = None

    parts.run(lambda *_: (1, None), numbers, 1, True)

    assert parts.wait_seconds is None

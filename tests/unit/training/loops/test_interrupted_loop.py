"""What a resume does with a loop that a stop has cut."""

from __future__ import annotations

from trainer_kit.training.loops.intervals import InterruptedLoop, LoopRange


def test_interrupted_loop_runs_to_its_end_after_a_resume() -> None:
    loop = InterruptedLoop()

    assert loop.state() is None
    assert loop.next(6, 100, 10) == (6, 16)

    loop.steps = LoopRange(0, 10)
    resumed = InterruptedLoop()

    resumed.restore(loop.state())

    assert resumed.next(6, 100, 50) == (0, 10)
    assert resumed.next(6, 8, 50) == (0, 8)
    assert resumed.next(6, None, 50) == (0, 10)

    resumed.restore(None)

    assert resumed.next(10, None, 50) == (10, 60)

from __future__ import annotations

import threading
import time

import pytest

from tests.builders import report, wait_until
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.report import Report


class Keeper:
    """Keeps what it is told, and in which thread; fails on the steps it is given."""

    def __init__(self, fails_on: tuple[int, ...] = (), fails_to_close: bool = False) -> None:
        self.steps: list[int] = []
        self.events: list[str] = []
        self.threads: set[str] = set()
        self._fails_on = fails_on
        self._fails_to_close = fails_to_close

    def write(self, report: Report) -> None:
        self.threads.add(threading.current_thread().name)
        if report.step in self._fails_on:
            raise OSError(f"no space for {report.step}")
        self.steps.append(report.step)
        self.events.append(f"write {report.step}")

    def flush(self) -> None:
        self.events.append("flush")

    def close(self) -> None:
        self.events.append("close")
        if self._fails_to_close:
            raise OSError("no space to close")


def test_reports_arrive_in_order_in_one_other_thread() -> None:
    first = Keeper()
    second = Keeper()
    writer = BackgroundWriter([first, second], capacity=4)
    for step in range(500):
        writer.write(report(step))

    writer.close()

    assert first.steps == second.steps == list(range(500))
    assert len(first.threads) == 1
    assert threading.current_thread().name not in first.threads


def test_flush_waits_for_everything_written_before() -> None:
    keeper = Keeper()
    writer = BackgroundWriter([keeper])
    for step in range(50):
        writer.write(report(step))

    writer.flush()

    assert keeper.events == [*(f"write {step}" for step in range(50)), "flush"]

    writer.close()


def test_write_waits_only_when_the_queue_is_full() -> None:
    go_on = threading.Event()

    class Slow(Keeper):
        def write(self, report: Report) -> None:
            go_on.wait()
            super().write(report)

    slow = Slow()
    writer = BackgroundWriter([slow], capacity=3)

    for step in range(3):
        writer.write(report(step))

    assert slow.steps == []

    others = threading.Thread(target=lambda: [writer.write(report(step)) for step in range(3, 20)])

    others.start()
    others.join(0.2)

    assert others.is_alive()

    go_on.set()
    others.join()
    writer.close()

    assert slow.steps == list(range(20))


def test_an_error_is_raised_once_and_other_writers_continue() -> None:
    failing = Keeper(fails_on=(1,))
    sound = Keeper()
    writer = BackgroundWriter([failing, sound])
    writer.write(report(0))

    with pytest.raises(OSError, match=r"^no space for 1$") as caught:
        writer.write(report(1))
        writer.flush()

    assert type(caught.value) is OSError

    writer.write(report(2))

    writer.flush()
    writer.close()

    assert failing.steps == [0, 2]
    assert sound.steps == [0, 1, 2]


def test_an_error_in_close_is_raised_after_closing_the_others() -> None:
    failing = Keeper(fails_to_close=True)
    sound = Keeper()
    writer = BackgroundWriter([failing, sound])

    with pytest.raises(OSError, match="no space to close"):
        writer.close()

    assert sound.events == ["close"]


def test_a_second_error_before_the_first_is_raised_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = BackgroundWriter([Keeper(fails_on=(1,)), Keeper(fails_on=(1,), fails_to_close=True)])

    with pytest.raises(OSError, match="no space for 1"):
        writer.write(report(1))
        writer.close()

    (record,) = caplog.records
    assert "no space to close" in record.getMessage()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_the_thread_survives_what_would_end_it(error: type[BaseException]) -> None:
    class Ending(Keeper):
        def write(self, report: Report) -> None:
            super().write(report)
            if report.step == 0:
                raise error

    ending = Ending()
    writer = BackgroundWriter([ending])

    with pytest.raises(error):
        writer.write(report(0))
        writer.flush()

    writer.write(report(1))

    writer.close()

    assert ending.steps == [0, 1]


def test_closing_twice_is_fine_but_writing_later_is_an_error() -> None:
    keeper = Keeper()
    writer = BackgroundWriter([keeper])
    writer.write(report(0))

    writer.close()
    writer.close()

    assert keeper.events == ["write 0", "close"]

    with pytest.raises(RuntimeError, match="closed"):
        writer.write(report(1))


def test_a_writer_can_ask_to_run_in_the_callers_thread() -> None:
    class Here(Keeper):
        needs_caller_thread = True

    here = Here(fails_on=(1,))
    there = Keeper()
    writer = BackgroundWriter([here, there])

    writer.write(report(0))

    assert here.steps == [0]

    with pytest.raises(OSError, match="no space for 1"):
        writer.write(report(1))

    writer.flush()
    writer.close()

    assert here.events == ["write 0", "flush", "close"]
    assert here.threads == {threading.current_thread().name}
    assert there.steps == [0, 1]


def test_reports_of_short_loops_wait_together_but_not_on_flush() -> None:
    keeper = Keeper()
    writer = BackgroundWriter([keeper], batching_seconds=60.0)
    for _ in range(2):  # the second time, nothing is in a hurry any more
        written = len(keeper.steps)
        for step in range(3):
            writer.write(report(written + step))
            time.sleep(0.05)
        assert len(keeper.steps) == written
        begin = time.monotonic()
        writer.flush()
        assert keeper.steps == list(range(written + 3))
        assert time.monotonic() - begin < 30.0

    writer.close()


def test_settle_waits_in_any_thread_and_raises_no_error() -> None:
    keeper = Keeper()
    failing = Keeper(fails_on=(0,))
    writer = BackgroundWriter([keeper, failing], batching_seconds=60.0)
    writer.write(report(0))
    thread = threading.Thread(target=writer.flush_threaded_writers)

    thread.start()
    thread.join(30.0)

    assert not thread.is_alive()
    assert keeper.events == ["write 0", "flush"]

    with pytest.raises(OSError, match="no space for 0"):
        writer.write(report(1))

    writer.close()
    writer.flush_threaded_writers()


def test_a_report_that_no_other_follows_is_written_before_long() -> None:
    keeper = Keeper()
    writer = BackgroundWriter([keeper], batching_seconds=0.01)
    writer.write(report(0))

    wait_until(lambda: keeper.steps)

    assert keeper.steps == [0]

    writer.close()


def test_reports_do_not_wait_when_the_queue_is_half_full() -> None:
    keeper = Keeper()
    writer = BackgroundWriter([keeper], capacity=4, batching_seconds=60.0)

    for step in range(3):  # one is in the thread's hands
        writer.write(report(step))
    wait_until(lambda: len(keeper.steps) == 3)

    assert keeper.steps == [0, 1, 2]

    writer.close()

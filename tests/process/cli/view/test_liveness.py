"""Who is alive: by beats that change and one's own clock, whatever the clocks of others say."""

from __future__ import annotations

import os
import subprocess
import sys

from trainer_kit.cli.view.liveness import SILENT_AFTER, Pulse, Pulses, pulse_text
from trainer_kit.cli.view.run_status import Process


class _Clocks:
    def __init__(self) -> None:
        self.now, self.wall = 100.0, 1_000_000.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    def pulses(self) -> Pulses:
        return Pulses(lambda: self.now, lambda: self.wall, host="here")


def _process(
    beat: object = 1, written: float = 1_000_000.0, ended: str = "", host: str = "there", pid: int = 1
) -> Process:
    return Process(host, pid, "train", 5, str(beat), ended, written)


def test_a_file_that_was_just_written_is_of_somebody_alive() -> None:
    assert _Clocks().pulses().feel("a", _process(written=1_000_000.0 - 3)) == Pulse("alive", 3.0)


def test_an_old_file_counts_as_silent_until_its_beat_changes() -> None:
    clocks = _Clocks()
    pulses = clocks.pulses()
    assert pulses.feel("a", _process(written=1_000_000.0 - 3600)) == Pulse("silent", 3600.0)
    clocks.pass_by(2)
    assert pulses.feel("a", _process(beat=2, written=1_000_000.0 - 3598)) == Pulse("alive", 0.0)  # its clock is behind


def test_a_file_from_the_future_counts_as_alive_while_it_changes() -> None:
    clocks = _Clocks()
    pulses = clocks.pulses()
    ahead = _process(written=1_000_000.0 + 3600)
    assert pulses.feel("a", ahead) == Pulse("alive", 0.0)
    clocks.pass_by(SILENT_AFTER)
    assert pulses.feel("a", ahead) == Pulse("silent", SILENT_AFTER)
    assert pulses.feel("b", ahead).state == "alive"  # each has its own


def test_who_goes_on_beating_stays_alive_for_ever() -> None:
    clocks = _Clocks()
    pulses = clocks.pulses()
    for beat in range(20):
        assert pulses.feel("a", _process(beat)).state == "alive"
        clocks.pass_by(SILENT_AFTER - 1)


def test_an_end_that_is_told_is_an_end_however_fresh_the_file() -> None:
    process = _process(ended="stopped")
    pulse = _Clocks().pulses().feel("a", process)
    assert pulse.state == "ended" and pulse_text(process, pulse) == "ended: stopped"


def test_a_process_of_this_machine_is_asked_for() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    feel = _Clocks().pulses().feel
    assert feel("dead", _process(host="here", pid=done.pid)).state == "gone"
    assert feel("alive", _process(host="here", pid=os.getpid())).state == "alive"
    assert feel("elsewhere", _process(host="there", pid=done.pid)).state == "alive"
    assert feel("no number", _process(host="here", pid=10**30)).state == "alive"


def test_each_state_has_its_words() -> None:
    texts = [pulse_text(_process(), Pulse(state, 23.9)) for state in ("alive", "silent", "gone")]
    assert texts == ["alive", "silent for 23 s", "gone, no end recorded"]

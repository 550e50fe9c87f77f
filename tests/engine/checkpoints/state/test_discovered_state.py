"""What a training step changes in addition to weights and optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import tensorflow as tf

from trainer_kit.checkpoints.state.discovered_state import DiscoveredState


def test_it_says_whether_there_is_anything_new_to_save() -> None:
    task = SimpleNamespace(counter=tf.Variable(1.0))
    state = DiscoveredState({"task": task})
    assert state.add_reachable(set()) is True
    assert state.add_reachable(set()) is False
    task.other = tf.Variable(2.0)
    assert state.add_reachable(set()) is True
    assert list(state.items) == ["task/counter", "task/other"]

"""The message in which TensorFlow writes the objects of a checkpoint. The rest is in test_restore.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state import object_graph as module
from trainer_kit.errors import TrainerKitError


def test_the_objects_of_a_checkpoint_have_children_and_keys(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(one=tf.Variable(1.0)).write(str(tmp_path / "ckpt"))
    serialized = tf.train.load_checkpoint(path).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    graph = module.object_graph(serialized)
    (child,) = [child for child in graph.nodes[0].children if child.local_name == "one"]
    (attribute,) = graph.nodes[child.node_id].attributes
    assert attribute.checkpoint_key == "one/.ATTRIBUTES/VARIABLE_VALUE"


def test_without_the_message_the_error_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MESSAGE", "tensorflow.NoSuchMessage")
    with pytest.raises(TrainerKitError, match="install the TensorFlow of requirements"):
        module.object_graph(b"")

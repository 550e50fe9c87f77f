"""The message in which TensorFlow writes the objects of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph


def test_a_value_with_several_paths_has_all_of_them(tmp_path: Path) -> None:
    weight = tf.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(
        model={"a": weight}, average={"b/c": weight}, step=tf.Variable(3)
    )

    graph = CheckpointGraph(checkpoint.save(str(tmp_path / "ckpt")))

    assert graph.shapes_by_name(depth=2) == {"model/a": (2,), "average/b/c": (2,), "step": ()}
    assert len(graph.shapes_by_name()) == 2

"""Reads the names of the variables in a SavedModel, which its checkpoint knows by lists and numbers only."""

from __future__ import annotations

import os
from collections import deque

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import ROOT, CheckpointGraph, parse_message

_FILE = "saved_model.pb"


def is_in_saved_model(prefix: str) -> bool:
    """Whether a checkpoint is the part of a SavedModel that holds the variables."""
    return bool(tf.io.gfile.exists(_definition(prefix)))


def read_variable_keys(graph: CheckpointGraph) -> dict[str, str]:
    """Returns, by name, the keys of the variables of a SavedModel in its checkpoint, without copies of the same name.

    Args:
      graph: The graph of the SavedModel's checkpoint.

    Raises:
      TrainerKitError: when this TensorFlow does not register the format.
    """
    with tf.io.gfile.GFile(_definition(graph.prefix), "rb") as stream:
        saved = parse_message("tensorflow.SavedModel", stream.read())
    nodes = saved.meta_graphs[0].object_graph_def.nodes
    found: dict[str, str] = {}
    waiting, seen = deque([(ROOT, ROOT)]), {ROOT}
    while waiting:  # the two graphs have the same edges, not the same numbers
        at, key_at = waiting.popleft()
        if (key := graph.key(key_at)) is not None and nodes[at].HasField("variable"):
            found.setdefault(nodes[at].variable.name, key)
        edges = graph.children(key_at)
        for child in nodes[at].children:
            if child.local_name in edges and child.node_id not in seen:
                seen.add(child.node_id)
                waiting.append((child.node_id, edges[child.local_name]))
    return found


def _definition(prefix: str) -> str:
    return os.path.join(os.path.dirname(os.path.dirname(prefix)), _FILE)

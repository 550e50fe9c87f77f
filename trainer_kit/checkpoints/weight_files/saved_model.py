"""Reads the names of the variables in a SavedModel.

Its checkpoint contains only lists and numbers for them.
"""

from __future__ import annotations

import os
from collections import deque

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import ROOT, CheckpointGraph, parse_message

_FILE = "saved_model.pb"


def is_in_saved_model(prefix: str) -> bool:
    """Whether a checkpoint is the part of a SavedModel that contains the variables."""
    path = _definition(prefix)
    return bool(tf.io.gfile.exists(path))


def read_variable_keys(graph: CheckpointGraph) -> dict[str, str]:
    """Returns, by name, the keys of the variables of a SavedModel in its checkpoint.

    Copies of the same name are left out.

    Args:
      graph: The graph of the SavedModel's checkpoint.
    """
    path = _definition(graph.prefix)
    with tf.io.gfile.GFile(path, "rb") as stream:
        serialized = stream.read()
    saved_model = parse_message("tensorflow.SavedModel", serialized)
    meta_graph = saved_model.meta_graphs[0]
    nodes = meta_graph.object_graph_def.nodes

    keys: dict[str, str] = {}
    # The two graphs have the same edges, not the same numbers. A pair is a node in both.
    waiting = deque([(ROOT, ROOT)])
    visited = {ROOT}
    while waiting:
        number, checkpoint_number = waiting.popleft()
        node = nodes[number]
        key = graph.key(checkpoint_number)
        if key is not None and node.HasField("variable"):
            keys.setdefault(node.variable.name, key)

        edges = graph.children(checkpoint_number)
        for child in node.children:
            name = child.local_name
            child_number = child.node_id
            if name in edges and child_number not in visited:
                visited.add(child_number)
                waiting.append((child_number, edges[name]))
    return keys


def _definition(prefix: str) -> str:
    # The prefix is <folder>/variables/variables.
    variables_folder = os.path.dirname(prefix)
    folder = os.path.dirname(variables_folder)
    return os.path.join(folder, _FILE)

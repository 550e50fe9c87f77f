"""Reads the graph of objects in a TensorFlow checkpoint: which attributes lead to which value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf
from google.protobuf import descriptor_pool, message_factory

from trainer_kit.errors import StorageError, UsageError

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_ATTRIBUTES = "/.ATTRIBUTES/"
_SUFFIX = f"{_ATTRIBUTES}VARIABLE_VALUE"
_BOOKKEEPING = ("save_counter", _GRAPH)
# The node of the root
ROOT = 0
# The public name of the format, whose Python module is not public
_MESSAGE = "tensorflow.TrackableObjectGraph"


class CheckpointGraph:
    """The nodes, edges and values of a checkpoint. Used eagerly, on the host.

    Args:
      prefix: The checkpoint's prefix.

    Attributes:
      shapes: A dict from key to shape of each value, without TensorFlow's bookkeeping.

    Raises:
      UsageError: when the checkpoint has no graph of objects, like those of TensorFlow 1.
      StorageError: when the checkpoint is gone or damaged.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        try:
            self._reader = tf.train.load_checkpoint(prefix)
            shapes = self._reader.get_variable_to_shape_map()
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(prefix, error) from error
        if _GRAPH not in shapes:
            raise UsageError(
                f"{prefix} stores only names and values, as TensorFlow 1 checkpoints do, "
                "and no graph of objects; "
                "read it with tf.train.load_checkpoint and assign the values yourself"
            )

        serialized = self.value(_GRAPH)
        graph = parse_message(_MESSAGE, serialized)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for key, shape in shapes.items():
            if key.endswith(_SUFFIX) and not key.startswith(_BOOKKEEPING):
                self.shapes[key] = tuple(shape)

        # The position in both lists is the number of a node.
        self._edges: list[dict[str, int]] = []
        self._keys: list[str | None] = []
        for node in graph.nodes:
            edges = {child.local_name: child.node_id for child in node.children}
            self._edges.append(edges)

            keys = [attribute.checkpoint_key for attribute in node.attributes]
            value_keys = [key for key in keys if key in self.shapes]
            self._keys.append(value_keys[0] if value_keys else None)

    def children(self, node: int | None) -> dict[str, int]:
        """Returns the children of `node` by the name of their attribute.

        The dict is empty if `node` is None.
        """
        return {} if node is None else self._edges[node]

    def key(self, node: int | None) -> str | None:
        """Returns the key of the value at `node`, or None if the node has no value."""
        return None if node is None else self._keys[node]

    def value(self, key: str) -> Any:
        """Returns a value as a NumPy array.

        Raises:
          StorageError: when the value cannot be read.
        """
        try:
            return self._reader.get_tensor(key)
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(self.prefix, error) from error

    def nodes(self, depth: int) -> dict[str, int]:
        """Returns the nodes with children, by path.

        Args:
          depth: The number of attributes below the root up to which nodes are included. The path of
            the root is "".
        """
        nodes_by_path = {"": ROOT}
        layer = {"": ROOT}
        for _ in range(depth):
            children = self._children_by_path(layer)
            layer = {}
            for path, node in children.items():
                # A node that a shorter path leads to is left out.
                if self._edges[node] and node not in nodes_by_path.values():
                    layer[path] = node
            nodes_by_path |= layer
        return nodes_by_path

    def get_section_keys(self, name: str) -> dict[str, str]:
        """Returns the keys of the values in a section, such as "random/model", by name."""
        prefix = f"{name}/"
        keys = {}
        for key in self.shapes:
            path = parse_attribute_path(key)
            if path.startswith(prefix):
                keys[path.removeprefix(prefix)] = key
        return keys

    def has_section(self, section: str) -> bool:
        """Whether the checkpoint contains anything of a section, or of a part of one, "a/b"."""
        prefix = f"{section}/"
        for key in self.shapes:
            path = parse_attribute_path(key)
            if f"{path}/".startswith(prefix):
                return True
        return False

    def shapes_by_name(self, depth: int = 0) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the values by the paths of attributes that they are saved under.

        Args:
          depth: The number of attributes up to which other paths are included. Several paths may
            lead to a value.
        """
        keys: dict[str, str] = {}
        layer = {"": ROOT}
        for _ in range(depth):
            layer = self._children_by_path(layer)
            for path, node in layer.items():
                node_key = self._keys[node]
                if node_key is not None:
                    keys[path] = node_key

        keys |= {parse_attribute_path(key): key for key in self.shapes}
        return {path: self.shapes[key] for path, key in keys.items()}

    def _children_by_path(self, nodes: Mapping[str, int]) -> dict[str, int]:
        children = {}
        for path, node in nodes.items():
            edges = self._edges[node]
            for name, child in edges.items():
                child_path = f"{path}/{name}".lstrip("/")
                children[child_path] = child
        return children

    def collect_keys_below(self, node: int) -> set[str]:
        """Returns the keys of all values below `node`."""
        visited = {node}
        waiting = [node]
        while waiting:
            descendant = waiting.pop()
            edges = self._edges[descendant]
            children = set(edges.values()) - visited
            visited |= children
            waiting += children

        keys = {self._keys[descendant] for descendant in visited}
        return {key for key in keys if key is not None}


def parse_message(name: str, serialized: bytes) -> Any:
    """Parses a message of a protocol of TensorFlow, by the public name of its type.

    Runs on the host.
    """
    pool = descriptor_pool.Default()
    descriptor = pool.FindMessageTypeByName(name)
    message_class = message_factory.GetMessageClass(descriptor)
    return message_class.FromString(serialized)


def find_missing_objects(graph: CheckpointGraph, root: tf.train.Checkpoint) -> dict[str, object]:
    """Returns the paths of saved objects that this run does not have, with their owners.

    Runs eagerly, on the host.

    Args:
      graph: The graph of the checkpoint.
      root: The tf.train.Checkpoint of this run. Sections that it lacks entirely are left out.

    Returns:
      A dict from the path of a missing object to the nearest owner that this run has and that is
      not a list or dict. Slots that TensorFlow saves with their variable, like those of
      tf_keras.optimizers.legacy, are left out.
    """
    missing: dict[int, tuple[str, object]] = {}
    visited: set[int] = set()
    # The number of a node, its path, its object in this run, and the nearest owner of that
    waiting: list[tuple[int, str, object, object]] = [(ROOT, "", root, root)]
    while waiting:
        node, path, item, owner = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if not isinstance(item, (list, tuple, Mapping)):
            owner = item

        run_children = tf.train.TrackableView.children(item)
        for name, child in graph.children(node).items():
            child_path = f"{path}/{name}"
            if name in run_children:
                waiting.append((child, child_path, run_children[name], owner))
            elif node != ROOT:
                missing[child] = (child_path.lstrip("/"), owner)

    # A value that another path leads to is not missing.
    visited_keys = {graph.key(node) for node in visited}
    owners = {}
    for node, (path, owner) in missing.items():
        keys_below = graph.collect_keys_below(node)
        if keys_below - visited_keys:
            owners[path] = owner
    return owners


def parse_attribute_path(key: str) -> str:
    """Returns the path of attributes in a key."""

    def unescape(escape: re.Match[str]) -> str:
        # TensorFlow writes "/" in a name as ".S", and "." as "..".
        character = escape[1]
        return "/" if character == "S" else character

    path, _, _ = key.partition(_ATTRIBUTES)
    return re.sub(r"\.(.)", unescape, path)


class CheckpointReader(Protocol):
    """The result of tf.train.load_checkpoint, whose class is not public."""

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint contains a value with this key."""


def has_object_graph(reader: CheckpointReader) -> bool:
    """Whether a checkpoint has a graph of objects. Those of TensorFlow 1 have none."""
    return bool(reader.has_tensor(_GRAPH))


def is_bookkeeping(key: str) -> bool:
    """Whether a key belongs to no variable but to what TensorFlow needs to save and restore."""
    if key.startswith(_BOOKKEEPING):
        return True
    is_value = key.endswith(_SUFFIX)
    return _ATTRIBUTES in key and not is_value


def create_read_error(prefix: str, error: Exception) -> StorageError:
    """Returns the error for a checkpoint that TensorFlow cannot read."""
    condition = "is gone or incomplete"
    if os.path.exists(f"{prefix}.index"):
        condition = "is damaged and cannot be read"
    message = str(getattr(error, "message", None) or error)
    reason = message.splitlines()[0]
    return StorageError(f"{prefix} {condition}: {reason}")

"""TensorFlowFile: the variables in a checkpoint of TensorFlow 1 or 2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import (
    ROOT,
    CheckpointGraph,
    create_read_error,
    has_object_graph,
    is_bookkeeping,
    parse_attribute_path,
)
from trainer_kit.checkpoints.weight_files.saved_model import is_in_saved_model, read_variable_keys
from trainer_kit.checkpoints.weight_files.weight_file import MODEL, WeightFile
from trainer_kit.process.run_directory import read_layer_names

# The kind of the variables of a SavedModel
SAVED_MODEL = "a SavedModel"


class TensorFlowFile(WeightFile):
    """The variables in a checkpoint of TensorFlow. A SavedModel contains one too.

    A name is the path of attributes that leads to the variable, such as model/net/dense/kernel. In
    a SavedModel and a checkpoint of TensorFlow 1 it is the variable's own name. In a checkpoint of
    a run it has the numbers that the user gave to layers, if the run has recorded them.

    Args:
      prefix: The prefix of the checkpoint.

    Attributes:
      keys: The key in the checkpoint of each variable, by name.
      layer_names: What `read_layer_names` returns.
      has_graph: Whether the checkpoint has a graph of objects.

    Raises:
      StorageError: when the checkpoint is gone or damaged.
    """

    def __init__(self, prefix: str) -> None:
        self.path = prefix
        try:
            self._reader = tf.train.load_checkpoint(prefix)
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
            self.has_graph = has_object_graph(self._reader)
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(prefix, error) from error

        self.kind = "a TensorFlow 2 checkpoint" if self.has_graph else "a TensorFlow 1 checkpoint"
        self.layer_names = read_layer_names(prefix)
        self.has_user_numbers = self.layer_names is not None

        if self.has_graph and is_in_saved_model(prefix):
            self.kind = SAVED_MODEL
            self.keys = read_variable_keys(self.graph)
        else:
            variable_keys = [key for key in sorted(shapes) if not is_bookkeeping(key)]
            self.keys = {self._name(key): key for key in variable_keys}

        shapes_by_name: dict[str, tuple[int, ...]] = {}
        dtypes_by_name: dict[str, str] = {}
        for name, key in self.keys.items():
            shapes_by_name[name] = tuple(shapes[key])
            dtypes_by_name[name] = dtypes[key].name
        self.shapes = shapes_by_name
        self.dtypes = dtypes_by_name

    def _name(self, key: str) -> str:
        name = parse_attribute_path(key) if self.has_graph else key
        inner = name.removeprefix(MODEL)
        if not self.layer_names or inner == name:
            return name
        user_name = self.layer_names.get(inner, inner)
        return f"{MODEL}{user_name}"

    @cached_property
    def graph(self) -> CheckpointGraph:
        """The graph of objects, if there is one."""
        return CheckpointGraph(self.path)

    @property
    def has_ranks(self) -> bool:
        """Whether the checkpoint has a graph and is one of trainer_kit.

        Its names then have ranks of layers.
        """
        if not self.has_graph:
            return False
        sections = self.graph.children(ROOT)
        model = sections.get("model")
        names = self.graph.children(model)
        # trainer_kit saves variables by their paths, so its names contain slashes.
        return any("/" in name for name in names)

    def read_tensor(self, name: str) -> Any:
        """Returns the value of a variable as a NumPy array, or bytes for text.

        Raises:
          StorageError: when the value cannot be read.
        """
        try:
            return self._reader.get_tensor(self.keys[name])
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(self.path, error) from error

    def write_copy(self, path: str, values: Mapping[str, np.ndarray]) -> None:
        """Writes a copy of the checkpoint with other values of some variables.

        Runs eagerly.

        Args:
          path: The prefix of the copy.
          values: The new values by name.

        Raises:
          StorageError: when a value cannot be read.
        """
        values_by_key = {self.keys[name]: value for name, value in values.items()}
        keys = sorted(self._reader.get_variable_to_shape_map())
        tensors = []
        try:
            for key in keys:
                value = values_by_key.get(key)
                if value is None:
                    value = self._reader.get_tensor(key)
                tensor = tf.constant(value)
                tensors.append(tensor)
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(self.path, error) from error

        slices = [""] * len(keys)
        tf.raw_ops.SaveV2(prefix=path, tensor_names=keys, shape_and_slices=slices, tensors=tensors)

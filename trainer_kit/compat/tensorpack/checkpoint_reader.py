"""CheckpointReader: reads the variables of a program from a checkpoint, by their names."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import (
    create_read_error,
    has_object_graph,
    is_bookkeeping,
    parse_attribute_path,
)

# Where checkpoints of the engine contain the variables of a program.
_FOLDER = "/by_name/"


class CheckpointReader:
    """A reader with the methods of tf.train.NewCheckpointReader. Used on the host.

    The checkpoint is one of TensorFlow 1, or of the engine, which stores more than variables.

    Args:
      filepattern: The prefix of the checkpoint, or a folder, whose newest checkpoint is read.

    Raises:
      StorageError: When the checkpoint does not exist or is damaged.
    """

    def __init__(self, filepattern: str) -> None:
        path = os.fspath(filepattern)
        if os.path.isdir(path):
            path = tf.train.latest_checkpoint(path) or path
        try:
            self._reader = tf.train.load_checkpoint(path)
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
        except (tf.errors.OpError, ValueError, IndexError, RuntimeError) as error:
            raise create_read_error(path, error) from error

        keys = {key: key for key in shapes if not is_bookkeeping(key)}
        if has_object_graph(self._reader):
            attribute_keys = list(keys)
            keys = {}
            for key in attribute_keys:
                path = parse_attribute_path(key)
                _, folder, name = path.partition(_FOLDER)
                if folder:
                    keys[name] = key
        self._keys = keys
        self._shapes = {name: shapes[key] for name, key in keys.items()}
        self._dtypes = {name: dtypes[key] for name, key in keys.items()}

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes by name."""
        return dict(self._shapes)

    def get_variable_to_dtype_map(self) -> dict[str, tf.DType]:
        """Returns the dtypes by name."""
        return dict(self._dtypes)

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint contains a variable of this name."""
        return name in self._keys

    def get_tensor(self, name: str) -> Any:
        """Returns the value of a variable as a NumPy array."""
        return self._reader.get_tensor(self._keys.get(name, name))

"""Text files at local and remote paths: atomic where the file system can be, else by tf.io.gfile."""

from __future__ import annotations

import os

import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import StorageError


def write_text(path: str | os.PathLike[str], text: str, point: str = "file") -> None:
    """Replaces the file at `path` by `text`; makes the folder if it is missing. Object stores replace whole files.

    Args:
      path: local or remote.
      text: the new content.
      point: the name under which fault injection knows this write.

    Raises:
      StorageError: when the file cannot be written.
    """
    if not files.is_remote(path):
        files.write_text(path, text, point)
        return
    name = os.fspath(path)
    try:
        tf.io.gfile.makedirs(os.path.dirname(name))
        with tf.io.gfile.GFile(name, "w") as stream:
            stream.write(text)
    except tf.errors.OpError as error:
        raise StorageError(f"{name} cannot be written: {error.message}") from error

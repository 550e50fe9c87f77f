"""Opens a file of weights of any kind."""

from __future__ import annotations

from trainer_kit.checkpoints.weight_files.keras_file import KerasFile, is_keras_file
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import WeightFile
from trainer_kit.errors import UsageError


def open_weights(path: str) -> WeightFile:
    """Opens a file of Keras or a checkpoint of TensorFlow, whose variables are read by their paths.

    Runs eagerly, on the host.

    Args:
      path: The path of a `.keras`, `.weights.h5` or `.h5` file, or the prefix of a checkpoint.

    Raises:
      UsageError: when there is no such file, or it contains no variable.
      StorageError: when it is damaged.
    """
    file = KerasFile(path) if is_keras_file(path) else TensorFlowFile(path)
    if not file.shapes:
        raise UsageError(f"{path}, {file.kind}, holds no variables; give a file of weights")
    return file

"""KerasFile: the variables in a `.keras`, `.weights.h5` or `.h5` file of Keras.

Keras 3 stores the variables of a layer by number, in the order of `layer.weights`, and with them
the layer's name. Here the variable is named layer/number, with the names of outer layers before it.
Keras 2 stores the variables' own names.
"""

from __future__ import annotations

import io
import itertools
import os
import zipfile
from collections.abc import Iterator, Mapping

import h5py
import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.state.variable_names import make_distinct
from trainer_kit.checkpoints.weight_files.weight_file import WeightFile
from trainer_kit.errors import StorageError, UsageError

ENDINGS = (".keras", ".h5", ".hdf5")
# The file with the weights in a .keras archive
WEIGHTS = "model.weights.h5"
# The group of a layer's variables
_VARIABLES = "vars"


def is_keras_file(path: str) -> bool:
    """Whether Keras reads files with this name."""
    return path.endswith(ENDINGS)


def ending(path: str) -> str:
    """Returns the ending of a file of Keras, such as ".weights.h5".

    The ending of another file is that after its last dot.
    """
    if path.endswith(".weights.h5"):
        return ".weights.h5"
    _, last_ending = os.path.splitext(path)
    return last_ending


class KerasFile(WeightFile):
    """The variables in a file of Keras.

    Args:
      path: The path of the file.

    Attributes:
      dataset_paths: The path of each variable in the HDF5 file, by name.
      has_numbered_variables: Whether variables are named by layer and number, and not by their own
        names.

    Raises:
      UsageError: when there is no such file.
      StorageError: when the file is damaged.
    """

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise UsageError(f"there is no file {path}")
        self.path = path
        self.kind = f"a Keras file ({ending(path)})"
        try:
            source: str | io.BytesIO = path
            if path.endswith(".keras"):
                with zipfile.ZipFile(path) as archive:
                    content = archive.read(WEIGHTS)
                source = io.BytesIO(content)
            self._file = h5py.File(source)

            # Keras 2 keeps the weights of a whole model in a group.
            top = self._file.get("model_weights", self._file)
            self.has_numbered_variables = not _names(top, "layer_names")
            variables: list[tuple[str, str]] = []
            if self.has_numbered_variables:
                variables += _iterate_keras3_variables(self._file, "")
            else:
                # The variables' own names end with an output number, as in dense/kernel:0.
                for layer in _names(top, "layer_names"):
                    group = top[layer]
                    for name in _names(group, "weight_names"):
                        variable_name = name.partition(":")[0]
                        dataset_path = str(group[name].name)
                        variables.append((variable_name, dataset_path))

            variable_names = [name for name, _ in variables]
            names = make_distinct(variable_names)
            dataset_paths = [dataset_path for _, dataset_path in variables]
            self.dataset_paths = dict(zip(names, dataset_paths, strict=True))

            shapes: dict[str, tuple[int, ...]] = {}
            dtypes: dict[str, str] = {}
            for name, dataset_path in self.dataset_paths.items():
                dataset = self._file[dataset_path]
                shapes[name] = tuple(dataset.shape)
                dtypes[name] = _dtype(dataset)
            self.shapes = shapes
            self.dtypes = dtypes
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise StorageError(f"{path} cannot be read as a Keras file: {error}") from error

    def read_tensor(self, name: str) -> np.ndarray:
        """Returns the value of a variable.

        Raises:
          StorageError: when the value cannot be read.
        """
        try:
            dataset_path = self.dataset_paths[name]
            dataset = self._file[dataset_path]
            dtype = tf.as_dtype(_dtype(dataset))
            return np.array(dataset, dtype=dtype.as_numpy_dtype)
        except OSError as error:
            raise StorageError(f"{self.path} is damaged: {name} cannot be read: {error}") from error

    def write_copy(self, path: str, values: Mapping[str, np.ndarray]) -> None:
        """Writes a copy of the file with other values of some variables, by name."""
        if not path.endswith(".keras"):
            with open(self.path, "rb") as original, open(path, "wb") as copy:
                content = original.read()
                copy.write(self._with_values(content, values))
            return

        with zipfile.ZipFile(self.path) as archive, zipfile.ZipFile(path, "w") as archive_copy:
            for item in archive.infolist():
                content = archive.read(item)
                if item.filename == WEIGHTS:
                    content = self._with_values(content, values)
                archive_copy.writestr(item, content)

    def _with_values(self, content: bytes, values: Mapping[str, np.ndarray]) -> bytes:
        stream = io.BytesIO(content)
        with h5py.File(stream, "r+") as weights:
            for name, value in values.items():
                dataset = weights[self.dataset_paths[name]]
                dataset[...] = value
        return stream.getvalue()


def _iterate_keras3_variables(group: h5py.Group, outer: str) -> Iterator[tuple[str, str]]:
    """Yields the variables in a group of Keras 3 and below it.

    Each is a pair of the names of layers with a number, and the path in the file.
    """
    for key, item in group.items():
        if key == _VARIABLES:
            for number in item:
                name = f"{outer}/{number}".lstrip("/")
                yield name, item[number].name
        elif isinstance(item, h5py.Group):
            # A list of layers has no name.
            layer = ""
            if _VARIABLES in item:
                attributes = item[_VARIABLES].attrs
                layer = str(attributes.get("name", key))
            layers = [name for name in (outer, layer) if name]
            path = "/".join(layers)
            yield from _iterate_keras3_variables(item, path)


def _names(group: h5py.Group, attribute: str) -> list[str]:
    """Returns the names in an attribute.

    Keras 2 splits an attribute that is larger than 64 KB into numbered ones.
    """
    pieces = [attribute]
    if attribute not in group.attrs:
        pieces = []
        for number in itertools.count():
            piece = f"{attribute}{number}"
            if piece not in group.attrs:
                break
            pieces.append(piece)

    names = []
    for piece in pieces:
        for value in group.attrs[piece]:
            if isinstance(value, bytes):
                value = value.decode()
            names.append(str(value))
    return names


def _dtype(dataset: h5py.Dataset) -> str:
    # The attribute is bfloat16, which HDF5 does not know.
    hdf5_name = dataset.dtype.name
    return str(dataset.attrs.get("dtype", hdf5_name))

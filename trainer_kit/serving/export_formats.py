"""The formats of an export: each writes an InferenceFunction, and loads it in its own runtime."""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.serving.inference_function import InferenceFunction

Arrays = Mapping[str, np.ndarray]
SIGNATURE = "serving_default"

# The program of a process that knows only Keras, as the reader of a .keras file does. It gets the
# file, the batches, and the nested names of the inputs, and writes the outputs of each batch.
_KERAS_PROGRAM = """
import json, sys
import keras
import numpy as np

model_path, batches_path, structure, outputs_path = sys.argv[1:]
model = keras.saving.load_model(model_path, compile=False)
batches = np.load(batches_path)
results = {}
for number in sorted({key.partition("|")[0] for key in batches}):
    def take(name):
        return batches[f"{number}|{name}"]
    features = keras.tree.map_structure(take, json.loads(structure))
    outputs = keras.tree.flatten(model(features, training=False))
    for index, output in enumerate(outputs):
        if keras.backend.standardize_dtype(output.dtype) in ("bfloat16", "float16"):
            output = keras.ops.cast(output, "float32")
        results[f"{number}|{index}"] = keras.ops.convert_to_numpy(output)
np.savez(outputs_path, **results)
"""


# The GPU is busy here.
_KERAS_ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}


class ExportFormat(abc.ABC):
    """A format.

    Attributes:
      name: The name.
      file: The name of the file in the folder of an export. "" if it is the folder itself.
      load_lines: The lines of Python that load the file and run it, for the model card.
    """

    name: str
    file: str
    load_lines: str

    @abc.abstractmethod
    def write(self, inference: InferenceFunction, path: str) -> None:
        """Writes the function to a path.

        Raises:
          UsageError: When the function cannot be written in this format.
        """

    @abc.abstractmethod
    def run(
        self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]
    ) -> list[dict[str, np.ndarray]]:
        """Returns the outputs for batches, as the runtime of the format computes them.

        Args:
          inference: The function that was written.
          path: The path that it was written to.
          batches: Batches of inputs by name.

        Raises:
          UsageError: When the runtime is not installed or does not load the file.
        """


class SavedModelFormat(ExportFormat):
    """A SavedModel with the signature `serving_default`."""

    name = "saved_model"
    file = ""
    load_lines = """\
import tensorflow as tf

model = tf.saved_model.load("{path}")
outputs = model.signatures["serving_default"]({arguments})"""

    def write(self, inference: InferenceFunction, path: str) -> None:
        """Writes the folder. See ExportFormat."""
        if isinstance(inference.model, keras.Model):
            archive = keras.export.ExportArchive()
            archive.track(inference.model)
            archive.add_endpoint(SIGNATURE, inference.function)
            archive.write_out(path, verbose=False)
            return
        module = tf.Module()
        module.model = inference.model
        signature = inference.function.get_concrete_function()
        tf.saved_model.save(module, path, signatures={SIGNATURE: signature})

    def run(
        self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]
    ) -> list[dict[str, np.ndarray]]:
        """Runs the signature. See ExportFormat."""
        model = tf.saved_model.load(path)
        results = []
        for batch in batches:
            arguments = {name: tf.constant(value) for name, value in batch.items()}
            outputs = model.signatures[SIGNATURE](**arguments)
            results.append({name: tensor.numpy() for name, tensor in outputs.items()})
        return results


class KerasFormat(ExportFormat):
    """A .keras file of a Keras 3 model, which Keras opens without the code of the task."""

    name = "keras"
    file = "model.keras"
    load_lines = """\
import keras

model = keras.saving.load_model("{path}")
outputs = model({features}, training=False)"""

    def write(self, inference: InferenceFunction, path: str) -> None:
        """Saves the model. See ExportFormat."""
        model = inference.model
        if not isinstance(model, keras.Model):
            kind = type(model)
            raise UsageError(
                f"keras: {kind.__module__}.{kind.__name__} is not a model of Keras 3; take the"
                " format saved_model"
            )
        if not inference.has_only_model:
            raise UsageError(
                "keras: the file would have the model without the task's preprocess and"
                " postprocess; take the format saved_model"
            )
        with _explain_conversion(self.name):
            model.save(path)

    def run(
        self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]
    ) -> list[dict[str, np.ndarray]]:
        """Runs the model in a process that knows only Keras. See ExportFormat."""
        structure = tf.nest.pack_sequence_as(inference.features_spec, list(inference.input_specs))
        arrays: dict[str, Any] = {}
        for number, batch in enumerate(batches):
            arrays.update({f"{number:03}|{name}": value for name, value in batch.items()})
        with tempfile.TemporaryDirectory() as folder:
            batches_path = os.path.join(folder, "batches.npz")
            outputs_path = os.path.join(folder, "outputs.npz")
            np.savez(batches_path, **arrays)
            arguments = [path, batches_path, json.dumps(structure), outputs_path]
            ended = subprocess.run(
                [sys.executable, "-c", _KERAS_PROGRAM, *arguments],
                env={**os.environ, **_KERAS_ENVIRONMENT},
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode != 0:
                reason = ended.stderr.strip().rpartition("\n")[2]
                raise UsageError(
                    f"keras: a program that knows only Keras cannot load the file: {reason:.150};"
                    " take the format saved_model"
                )
            with np.load(outputs_path) as outputs:
                return _split_outputs(outputs, list(inference.output_specs), len(batches))


class LiteRTFormat(ExportFormat):
    """A LiteRT file with the builtin operations, which need no other library."""

    name = "litert"
    file = "model.tflite"
    load_lines = """\
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter("{path}")
outputs = interpreter.get_signature_runner("serving_default")({arguments})"""

    def write(self, inference: InferenceFunction, path: str) -> None:
        """Converts a SavedModel. See ExportFormat."""
        with tempfile.TemporaryDirectory() as folder:
            SavedModelFormat().write(inference, folder)
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[SIGNATURE])
            with _explain_conversion(self.name):
                content = converter.convert()
        with open(path, "wb") as stream:
            stream.write(content)

    def run(
        self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]
    ) -> list[dict[str, np.ndarray]]:
        """Runs the signature in an interpreter. See ExportFormat."""
        runtime = import_runtime("ai_edge_litert.interpreter", self.name)
        with _explain_conversion(self.name):
            interpreter = runtime.Interpreter(model_path=path)
            runner = interpreter.get_signature_runner(SIGNATURE)
            return [runner(**batch) for batch in batches]


class OnnxFormat(ExportFormat):
    """An ONNX file, which ONNX Runtime runs."""

    name = "onnx"
    file = "model.onnx"
    load_lines = """\
import onnxruntime

session = onnxruntime.InferenceSession("{path}")
outputs = session.run(None, {feeds})"""

    def write(self, inference: InferenceFunction, path: str) -> None:
        """Converts the function with tf2onnx. See ExportFormat."""
        converter = import_runtime("tf2onnx", self.name)
        specs = list(inference.input_specs.values())
        with _explain_conversion(self.name):
            converter.convert.from_function(
                inference.function, input_signature=specs, output_path=path
            )

    def run(
        self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]
    ) -> list[dict[str, np.ndarray]]:
        """Runs the file in ONNX Runtime. See ExportFormat."""
        runtime = import_runtime("onnxruntime", self.name)
        with _explain_conversion("onnx: ONNX Runtime"):
            session = runtime.InferenceSession(path)
            names = [output.name for output in session.get_outputs()]
            results = []
            for batch in batches:
                values = session.run(names, dict(batch))
                results.append(dict(zip(names, values, strict=True)))
            return results


FORMATS: Mapping[str, ExportFormat] = {
    item.name: item for item in (SavedModelFormat(), KerasFormat(), LiteRTFormat(), OnnxFormat())
}


def get_formats(names: str | Sequence[str]) -> list[ExportFormat]:
    """Returns the formats of names, or of one name.

    Raises:
      UsageError: When there is none of a name.
    """
    formats = []
    for name in dict.fromkeys([names] if isinstance(names, str) else names):
        if name not in FORMATS:
            advice = suggest_names(name, list(FORMATS))
            raise UsageError(f"formats: there is no format {name!r}; {advice}")
        formats.append(FORMATS[name])
    if not formats:
        raise UsageError(f"formats: name at least one of {', '.join(FORMATS)}")
    return formats


def import_runtime(module: str, format_name: str) -> ModuleType:
    """Returns the module that a format needs.

    Raises:
      UsageError: When it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(
            f"{format_name}: the package {package} is not installed; pip install"
            " 'trainer_kit[export]'"
        ) from error


@contextlib.contextmanager
def _explain_conversion(name: str) -> Iterator[None]:
    """A context in which a converter or a runtime may refuse the model, in any words."""
    try:
        yield
    except (UsageError, OSError):
        raise
    except Exception as error:
        text = str(error)
        operations = sorted(set(re.findall(r"'tf\.(\w+)' op", text)))
        if "TensorListReserve" in operations:
            reason = "a recurrent layer has a loop; build it with unroll=True"
        elif operations:
            reason = f"it has no operation {', '.join(operations)}; take the format saved_model"
        else:
            reason = " ".join(text.split()) or type(error).__name__
        raise UsageError(f"{name} refuses the model: {reason:.300}") from error


def _split_outputs(
    arrays: Arrays, names: Sequence[str], batch_count: int
) -> list[dict[str, np.ndarray]]:
    """Returns the outputs of each batch by name, from arrays whose keys are `batch|index`.

    Raises:
      UsageError: When the model has other outputs than the function.
    """
    if len(arrays) != batch_count * len(names):
        raise UsageError(
            f"keras: the model has {len(arrays) // batch_count} outputs, and the task's inference"
            f" has {len(names)}; take the format saved_model, which contains the inference"
        )
    results = []
    for number in range(batch_count):
        results.append({name: arrays[f"{number:03}|{index}"] for index, name in enumerate(names)})
    return results

"""The formats of an export: each writes an InferenceFunction, and loads it in its own runtime."""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf
from tensorflow.saved_model.experimental import TrackableResource

from trainer_kit.errors import UsageError, get_install_command, suggest_names
from trainer_kit.process.error_report import format_reason
from trainer_kit.serving.inference_function import InferenceFunction, overrides

Arrays = Mapping[str, np.ndarray]
Outputs = list[dict[str, np.ndarray]]
SIGNATURE = "serving_default"

# The program of a process that knows only Keras, as the reader of a .keras file does. It replaces
# the batches in a file by the outputs for them.
_KERAS_PROGRAM = """
import keras, pickle, sys
model = keras.saving.load_model(sys.argv[1], compile=False)
batches = pickle.load(open(sys.argv[2], "rb"))
outputs = [model(batch, training=False) for batch in batches]
arrays = keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)
pickle.dump(arrays, open(sys.argv[2], "wb"))
"""


class ExportFormat(abc.ABC):
    """A format.

    Attributes:
      name: The name.
      file: The name of the file in the folder of an export. "" if it is the folder itself.
      is_exact: Whether it computes in the precision of the model.
      load_lines: The lines of Python that load the file and run it, for the model card.
    """

    name: str
    file: str
    load_lines: str
    is_exact = True

    @abc.abstractmethod
    def write(self, inference: InferenceFunction, path: str, examples: Arrays) -> None:
        """Writes the function to a path.

        Args:
          inference: The function.
          path: The new file, or the folder.
          examples: A batch of inputs by name, from which int8 takes the ranges of values.

        Raises:
          UsageError: When the function cannot be written in this format.
        """

    @abc.abstractmethod
    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
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

    def write(self, inference: InferenceFunction, path: str, examples: Arrays) -> None:
        """Writes the folder. See ExportFormat."""
        # The function brings its variables, and these objects their lookup tables.
        parts = [inference.model, *getattr(inference.task, "__dict__", {}).values()]
        kinds = (keras.Layer, tf.Module, TrackableResource)
        owner = tf.Module()
        owner.parts = [part for part in parts if isinstance(part, kinds)]
        archive = keras.export.ExportArchive()
        archive.track(owner)
        archive.add_endpoint(SIGNATURE, inference.function)
        with _explain_conversion(self.name):
            try:
                archive.write_out(path, verbose=False)
            except (tf.errors.ResourceExhaustedError, tf.errors.UnknownError) as error:
                reason, *_ = format_reason(error)
                raise OSError(reason) from error

    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
        """Runs the signature. See ExportFormat."""
        signature = tf.saved_model.load(path).signatures[SIGNATURE]
        return [tf.nest.map_structure(np.asarray, signature(**batch)) for batch in batches]


class KerasFormat(ExportFormat):
    """A .keras file of a Keras 3 model, which Keras opens without the code of the task."""

    name = "keras"
    file = "model.keras"
    load_lines = """\
import keras

model = keras.saving.load_model("{path}")
outputs = model({features}, training=False)"""

    def write(self, inference: InferenceFunction, path: str, examples: Arrays) -> None:
        """Saves the model. See ExportFormat."""
        model = inference.model
        if not isinstance(model, keras.Model):
            kind = type(model)
            raise UsageError(
                f"keras: {kind.__module__}.{kind.__name__} is not a model of Keras 3; take the"
                " format saved_model"
            )
        if overrides(inference.task, "preprocess") or overrides(inference.task, "postprocess"):
            raise UsageError(
                "keras: the file would have the model without the task's preprocess and"
                " postprocess; take the format saved_model"
            )
        with _explain_conversion(self.name):
            model.save(path)

    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
        """Runs the model in a process that knows only Keras. See ExportFormat."""
        spec = inference.features_spec
        features = []
        for batch in batches:
            flat = list(batch.values())
            features.append(tf.nest.pack_sequence_as(spec, flat))
        with tempfile.TemporaryDirectory() as folder:
            arrays = Path(folder, "arrays")
            arrays.write_bytes(pickle.dumps(features))
            # A program in a file does not import modules of the working directory.
            program = Path(folder, "run_model.py")
            program.write_text(_KERAS_PROGRAM)
            process = subprocess.run(
                [sys.executable, str(program), path, str(arrays)],
                # The GPU is busy here.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            if process.returncode != 0:
                reason = process.stderr.strip().rpartition("\n")[2]
                raise UsageError(
                    f"keras: a program that knows only Keras cannot load the file: {reason:.150};"
                    " take the format saved_model"
                )
            content = arrays.read_bytes()
            results = [tf.nest.flatten(outputs) for outputs in pickle.loads(content)]

        names = list(inference.output_specs)
        if len(results[0]) != len(names):
            raise UsageError(
                f"keras: the model has {len(results[0])} outputs, and the task's inference has"
                f" {len(names)}; take the format saved_model, which contains the inference"
            )
        return [dict(zip(names, result, strict=True)) for result in results]


class LiteRTFormat(ExportFormat):
    """A LiteRT file with the builtin operations, which need no other library."""

    name = "litert"
    file = "model.tflite"
    load_lines = """\
from ai_edge_litert.interpreter import Interpreter

interpreter = Interpreter("{path}")
outputs = interpreter.get_signature_runner("serving_default")({arguments})"""

    def write(self, inference: InferenceFunction, path: str, examples: Arrays) -> None:
        """Converts a SavedModel. See ExportFormat."""
        with tempfile.TemporaryDirectory() as folder:
            SavedModelFormat().write(inference, folder, examples)
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[SIGNATURE])
            if not self.is_exact:
                batches = tf.data.Dataset.from_tensor_slices(examples).batch(1)
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.representative_dataset = batches.as_numpy_iterator
            with _explain_conversion(self.name):
                content = converter.convert()
        Path(path).write_bytes(content)

    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
        """Runs the signature in an interpreter. See ExportFormat."""
        runtime = import_runtime("ai_edge_litert.interpreter", self.name)
        with _explain_conversion(self.name):
            interpreter = runtime.Interpreter(model_path=path)
            runner = interpreter.get_signature_runner(SIGNATURE)
            return [runner(**batch) for batch in batches]


class LiteRTInt8Format(LiteRTFormat):
    """A LiteRT file that computes with int8. Its inputs and outputs keep their dtypes."""

    name = "litert_int8"
    file = "model_int8.tflite"
    is_exact = False


class OnnxFormat(ExportFormat):
    """An ONNX file, which ONNX Runtime runs."""

    name = "onnx"
    file = "model.onnx"
    load_lines = """\
import onnxruntime

session = onnxruntime.InferenceSession("{path}")
outputs = session.run(None, {feeds})"""

    def write(self, inference: InferenceFunction, path: str, examples: Arrays) -> None:
        """Converts the function with tf2onnx. See ExportFormat."""
        converter = import_runtime("tf2onnx", self.name).convert
        specs = list(inference.input_specs.values())
        with _explain_conversion(self.name):
            converter.from_function(inference.function, input_signature=specs, output_path=path)

    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
        """Runs the file in ONNX Runtime. See ExportFormat."""
        runtime = import_runtime("onnxruntime", self.name)
        names = list(inference.output_specs)
        with _explain_conversion("onnx: ONNX Runtime"):
            session = runtime.InferenceSession(path)
            results = [session.run(names, batch) for batch in batches]
        return [dict(zip(names, result, strict=True)) for result in results]


_ALL = (SavedModelFormat(), KerasFormat(), LiteRTFormat(), LiteRTInt8Format(), OnnxFormat())
FORMATS: Mapping[str, ExportFormat] = {item.name: item for item in _ALL}


def get_formats(names: str | Sequence[str]) -> list[ExportFormat]:
    """Returns the formats of names, in a list or with commas between them.

    Raises:
      UsageError: When there is none of a name.
    """
    if isinstance(names, str):
        names = names.split(",")
    for name in names or [""]:
        if name not in FORMATS:
            advice = suggest_names(name, list(FORMATS))
            raise UsageError(f"formats: there is no format {name!r}; {advice}")
    return [FORMATS[name] for name in dict.fromkeys(names)]


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
            f"{format_name}: the package {package} is not installed;"
            f" {get_install_command('export')}"
        ) from error


@contextlib.contextmanager
def _explain_conversion(name: str) -> Iterator[None]:
    """A context in which a converter or a runtime may refuse the model, in any words."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = str(error)
        operations = sorted(set(re.findall(r"'tf\.(\w+)' op", text)))
        if "TensorListReserve" in operations:
            reason = "a recurrent layer has a loop; build it with unroll=True"
        elif "'untracked' resource" in text:
            reason = "it reads a lookup table that is no attribute of the task; make it one"
        elif operations:
            reason = f"it has no operation {', '.join(operations)}; take the format saved_model"
        else:
            line = " ".join(text.split()) or type(error).__name__
            advice = "" if name == SavedModelFormat.name else "; take the format saved_model"
            reason = f"{line:.200}{advice}"
        raise UsageError(f"{name} refuses the model: {reason}") from error

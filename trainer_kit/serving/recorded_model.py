"""The Keras model of a run without an experiment, whose config is in model.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.runtime.keras_internals import set_variable_paths
from trainer_kit.serving.inference_function import overrides
from trainer_kit.serving.run_config_loading import MODEL_FILE
from trainer_kit.training.task import Task
from trainer_kit.typing import Model, TaskLike


def describe_model(task: TaskLike, model: Model) -> dict[str, str]:
    """Returns the text of model.json by its name. Runs eagerly, on the host.

    Empty for a model that is not a graph of layers, or that Keras 3 cannot serialize, for one with
    an adapted vocabulary or adapted bins, which are in no variable, and for a task whose inference
    is not a call of the model.
    """
    methods = ("inference_step", "preprocess", "postprocess")
    if not isinstance(model, keras.Model) or any(overrides(task, name) for name in methods):
        return {}
    # A class with its own train_step is a graph of layers, and one with its own call is not.
    if not getattr(model, "inputs", None) or not type(model).call.__module__.startswith("keras."):
        return {}

    for part in tf.train.TrackableView(model).descendants():
        if hasattr(part, "adapt") and not isinstance(part, keras.layers.Normalization):
            return {}

    # A get_config of a user may raise anything.
    try:
        record = {
            "module": "keras",
            "class_name": "Sequential" if isinstance(model, keras.Sequential) else "Model",
            "config": keras.saving.serialize_keras_object(model.get_config()),
            "build_config": model.get_build_config(),
            "variables": [variable.path for variable in model.variables],
        }
        return {MODEL_FILE: json.dumps(record)}
    except Exception:
        return {}


class RecordedTask(Task):
    """A task that has only the model of a run."""

    def build_model(self) -> Any:
        """Returns the model. Called in strategy scope.

        Keras builds it in safe mode, so that no Lambda layer runs code.

        Raises:
          UsageError: when Keras cannot build it.
        """
        path = Path(self.logging_dir, MODEL_FILE)
        text = path.read_text(encoding="utf-8")
        try:
            model = keras.models.model_from_json(text)
            # Keras names variables by where a layer was first called, which may be elsewhere.
            set_variable_paths(model, json.loads(text)["variables"])
        except Exception as error:
            # The reason is between the config of the whole model and that of a part.
            reason = str(error).rpartition("Exception encountered: ")[2]
            reason = " ".join(reason.partition("Full object config")[0].split())
            raise UsageError(
                f"{path}: Keras cannot build the model: {reason:.500} Name the modules of its"
                " classes with import_modules, or build the model yourself and call"
                f" trainer_kit.load_weights(model, {self.logging_dir!r})"
            ) from error
        return model

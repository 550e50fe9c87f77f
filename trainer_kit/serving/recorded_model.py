"""The Keras model of a run without an experiment, whose config is in model.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.serving.inference_function import overrides
from trainer_kit.serving.run_config_loading import MODEL_FILE
from trainer_kit.training.task import Task
from trainer_kit.typing import Model, TaskLike


def describe_model(task: TaskLike, model: Model) -> dict[str, str]:
    """Returns the text of model.json by its name. Runs eagerly, on the host.

    Empty for a model that Keras 3 cannot serialize, for one with an adapted layer, whose state is
    not in its config, and for a task whose inference is not a call of the model.
    """
    parts = tf.train.TrackableView(model).descendants()
    is_adapted = any(hasattr(part, "adapt") for part in parts)
    methods = ("inference_step", "preprocess", "postprocess")
    has_inference = any(overrides(task, name) for name in methods)
    if not isinstance(model, keras.Model) or is_adapted or has_inference:
        return {}

    kind = type(model)
    record = {"class_name": kind.__name__, "registered_name": keras.saving.get_registered_name(kind)}
    if getattr(model, "inputs", None) and kind.call.__module__.startswith("keras."):
        # The class may have its own train_step, which a loaded model does not need.
        class_name = "Sequential" if isinstance(model, keras.Sequential) else "Model"
        record = {"module": "keras", "class_name": class_name}
    # A get_config of a user may raise anything.
    try:
        record["config"] = keras.saving.serialize_keras_object(model.get_config())
        # Without their own build_config the layers are built by the model, as in the run, which
        # gives their variables the same names.
        record = json.loads(
            json.dumps(record),
            object_hook=lambda part: {key: part[key] for key in part if key != "build_config"},
        )
        return {MODEL_FILE: json.dumps({**record, "build_config": model.get_build_config()})}
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
            if not model.built:
                raise ValueError("it does not say the shape of its inputs.")
        except Exception as error:
            reason = " ".join(str(error).partition("Full object config")[0].split())
            raise UsageError(
                f"{path}: Keras cannot build the model: {reason:.500} Name the modules of its"
                " classes with import_modules, or build the model yourself and call"
                f" trainer_kit.load_weights(model, {self.logging_dir!r})"
            ) from error
        return model

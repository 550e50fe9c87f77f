"""export: writes a trained model for other programs, after a comparison in their runtimes."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.process.run_lock import is_process_alive
from trainer_kit.serving.export_formats import Arrays, ExportFormat, get_formats
from trainer_kit.serving.inference_function import InferenceFunction, build_inference_function
from trainer_kit.serving.model_card import write_model_card
from trainer_kit.serving.model_loading import LoadedRun, check_built, open_run
from trainer_kit.serving.parity import TOLERANCE, Parity, check_parity
from trainer_kit.serving.recorded_model import RecordedTask
from trainer_kit.serving.validation_examples import (
    build_validation_dataset,
    draw_examples,
    get_features_spec,
    get_model_spec,
    get_serving_examples,
    take_features,
)
from trainer_kit.typing import Model, NestedSpec

_FOLDER = "export"
# The sizes of the batches that are compared. The export has to take any.
_BATCH_SIZES = (1, 7)
_LOW_PRECISION_EXAMPLES = 64


@dataclass(frozen=True)
class Export:
    """What `export` has written.

    Attributes:
      path: The folder.
      step: The step of the checkpoint. None for a model that is no run.
      formats: The comparison of each format with the live model, by its name.
    """

    path: str
    step: int | None
    formats: dict[str, Parity] = field(default_factory=dict)


def export(
    run_or_model: Model | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = ("saved_model",),
    *,
    which: str | int = "best",
    import_modules: str | Sequence[str] | Literal[False] = (),
    weights: str = "",
    examples: Any = None,
    tolerance: float | None = None,
) -> Export:
    """Writes a model in formats that need none of its code, each after a comparison.

    What is written is the task's `inference_step` with `training=False`, between its `preprocess`
    and its `postprocess`, with the weights that the run evaluates. Each format is loaded in its own
    runtime and compared with the live model. One that differs is not published. The folder appears
    by a rename, when all of its files are there. Runs eagerly, on the host, outside of a strategy.

    Args:
      run_or_model: The folder of a run, or a built Keras 3 model, tf_keras model or tf.Module.
      path: The new folder. None: `export/<step>` in the folder of the run.
      formats: Names of formats: saved_model, keras, litert, onnx.
      which, import_modules, weights: The checkpoint of a run. See `load_model`.
      examples: Features of some examples, in one batch, as the model takes them. None: of the run's
        first validation set, or random numbers, for a run without an experiment or for a model.
      tolerance: The largest difference that is allowed, as a part of the largest output. None: 1e-5
        for float32. In lower precision 9 of 10 examples have to have the same class.

    Raises:
      UsageError: When the run, the checkpoint or a format does not exist, the folder exists
        already, or a format cannot contain the model. The other formats are published.
      StorageError: When a file cannot be read or written.
    """
    chosen_formats = get_formats(formats)
    run: LoadedRun | None = None
    if isinstance(run_or_model, (str, os.PathLike)):
        run = open_run(run_or_model, which, import_modules, weights)
        target = Path(path) if path else run.folder / _FOLDER / str(run.step)
    elif path is None:
        raise UsageError("export: a model needs the path of the new folder")
    else:
        target = Path(path)
    if target.exists():
        raise UsageError(f"{target} exists already; remove it, or give another path")

    known_run = None if run is None or isinstance(run.task, RecordedTask) else run
    is_random = examples is None and known_run is None
    model = run.model if run else run_or_model
    inference, batches, is_exact = _prepare(model, known_run, examples)
    if tolerance is None and is_exact:
        tolerance = TOLERANCE
    results: dict[str, Parity] = {}
    refusals: list[str] = []
    with publish_folder(target) as folder:
        for export_format in chosen_formats:
            try:
                parity = _write_format(export_format, inference, batches, tolerance, folder)
            except UsageError as error:
                refusals.append(str(error))
                continue
            results[export_format.name] = replace(parity, is_random=is_random)
        if not results:
            raise UsageError(f"nothing is published: {'; '.join(refusals)}")
        write_model_card(folder, target, run, inference, results)

    for name, parity in results.items():
        print(f"{name}: {parity}")
    if refusals:
        published = ", ".join(results)
        raise UsageError(f"{'; '.join(refusals)}; {target} has the other formats: {published}")
    print(f"exported to {target}")
    return Export(str(target), run.step if run else None, results)


def _prepare(
    model: Any, run: LoadedRun | None, examples: Any
) -> tuple[InferenceFunction, list[Arrays], bool]:
    """Returns the function to export, batches to compare it on, and whether it is exact."""
    if run is None:
        check_built(model)
        task = None
        dtype = "float32"
    else:
        model = run.model
        task = run.task
        dtype = run.config.runtime.mixed_precision_dtype or "float32"
        if examples is None:
            examples = get_serving_examples(task)
    if getattr(model, "compute_dtype", "float32") != "float32":
        dtype = model.compute_dtype
    is_exact = dtype == "float32"

    count = sum(_BATCH_SIZES) if is_exact else _LOW_PRECISION_EXAMPLES
    spec = get_model_spec(model) if run is None else None
    if examples is None and run is not None:
        dataset = build_validation_dataset(run.config, run.task)
        examples = take_features(dataset, model, count)
        spec = get_features_spec(dataset, model)
    elif examples is None:
        examples = draw_examples(spec, count)
    if spec is None:
        examples = tf.nest.map_structure(_convert_example, examples)
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, examples)
    else:
        examples = _cast_examples(examples, spec)
    inference = build_inference_function(task, model, spec)

    arrays = inference.flatten_features(examples)
    batches = [
        {name: array[:1] for name, array in arrays.items()},
        {name: array[1:count] for name, array in arrays.items()},
    ]
    return inference, [batch for batch in batches if len(next(iter(batch.values())))], is_exact


def _write_format(
    export_format: ExportFormat,
    inference: InferenceFunction,
    batches: Sequence[Arrays],
    tolerance: float | None,
    folder: str,
) -> Parity:
    """Writes a format into a folder, if it equals the live model."""
    with tempfile.TemporaryDirectory(dir=folder) as trial:
        file = os.path.join(trial, export_format.file)
        export_format.write(inference, file)
        parity = check_parity(export_format, file, inference, batches, tolerance)
        for name in os.listdir(trial):
            os.rename(os.path.join(trial, name), os.path.join(folder, name))
    return parity


def _cast_examples(examples: Any, spec: NestedSpec) -> Any:
    """Returns examples as tensors of the dtypes of specs.

    Raises:
      UsageError: When they have another structure.
    """

    def cast(example: Any, part: tf.TensorSpec) -> tf.Tensor:
        tensor = tf.convert_to_tensor(example)
        return tensor if tensor.dtype == part.dtype else tf.cast(tensor, part.dtype)

    try:
        return tf.nest.map_structure(cast, examples, spec)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"examples: they have another structure than the model's inputs, {spec}"
        ) from error


def _convert_example(example: Any) -> tf.Tensor:
    """Returns a tensor. NumPy's numbers become those of Keras."""
    tensor = tf.convert_to_tensor(example)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor


@contextlib.contextmanager
def publish_folder(target: Path) -> Iterator[str]:
    """A context with a temporary folder, which gets the name `target` if nothing is raised.

    Raises:
      StorageError: When the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Folders that killed processes have left.
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            pid = leftover.name.split(".")[-2]
            # In a container each process may have the same number.
            is_own = pid == str(os.getpid())
            if is_own or (pid.isdigit() and not is_process_alive(int(pid))):
                shutil.rmtree(leftover, ignore_errors=True)
        folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        folder.mkdir()
        try:
            yield str(folder)
            files.flush_tree(folder)
            os.rename(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        files.flush_folder(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error

"""export: writes a trained model for other programs, after a comparison in their runtimes."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.process.run_lock import is_process_alive
from trainer_kit.serving.export_formats import Arrays, ExportFormat, get_formats
from trainer_kit.serving.inference_function import InferenceFunction, to_array
from trainer_kit.serving.model_card import write_model_card
from trainer_kit.serving.model_loading import LoadedRun, open_run
from trainer_kit.serving.parity import TOLERANCE, Parity, check_parity
from trainer_kit.serving.prediction_inputs import select_inputs
from trainer_kit.serving.recorded_model import RecordedTask
from trainer_kit.serving.validation_examples import (
    draw_examples,
    get_serving_examples,
    open_inference,
    take_validation_features,
)
from trainer_kit.typing import Model

_FOLDER = "export"
# The examples that are compared: a batch of one, and one of the others.
_FEW_EXAMPLES = 8
# The examples that are compared in low precision, and from which int8 takes its ranges.
_EXAMPLES = 128


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
    formats: dict[str, Parity]


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
    """Exports a model to formats that do not need its code, and compares each with the live model.

    What is written is the task's `inference_step` with `training=False`, between its `preprocess`
    and its `postprocess`, with the weights that the run evaluates. Each format is loaded in its own
    runtime and compared with the live model. One that differs is not published. The folder appears
    by a rename, when all of its files are there. Runs eagerly, on the host, outside of a strategy.

    Args:
      run_or_model: The folder of a run, or a built Keras 3 model, tf_keras model or tf.Module.
      path: The new folder. None: `export/<step>` in the folder of the run.
      formats: Names of formats: saved_model, keras, litert, litert_int8, onnx.
      which, import_modules, weights: The checkpoint of a run, and the modules to import. See
        `load_model`. Ignored for a live model.
      examples: Features of some examples, in one batch, as the model takes them. int8 is calibrated
        on them, so give it 100 or more. None: of the run's first validation set, or random numbers,
        for a run without an experiment or for a model.
      tolerance: The largest difference that is allowed, as a part of the largest output. None: 1e-5
        for float32. In lower precision 9 of 10 examples have to have the same class.

    Raises:
      UsageError: When the run, the checkpoint or a format does not exist, the folder exists
        already, or a format cannot contain the model. The other formats are published.
      StorageError: When a file cannot be read or written.
    """
    chosen_formats = get_formats(formats)
    run: LoadedRun | None = None
    model: Any = run_or_model
    if isinstance(run_or_model, (str, os.PathLike)):
        run = open_run(run_or_model, which, import_modules, weights)
        model = run.model
        path = path or run.folder / _FOLDER / str(run.step)
        if examples is None:
            examples = get_serving_examples(run.task)
    if path is None:
        raise UsageError("export: a model needs the path of the new folder")
    target = Path(path)
    if target.exists():
        raise UsageError(f"{target} exists already; remove it, or give another path")

    inference = open_inference(model, run, examples)
    is_random = False
    if examples is None and run is not None and not isinstance(run.task, RecordedTask):
        examples = take_validation_features(run, _EXAMPLES)
    elif examples is None:
        examples = draw_examples(inference.features_spec, _EXAMPLES)
        is_random = True

    columns, _ = select_inputs(inference.name_features(examples), inference)
    arrays = {}
    for name, column in columns.items():
        dtype = inference.input_specs[name].dtype
        arrays[name] = to_array(tf.cast(column, dtype))
    counts = {len(array) for array in arrays.values()}
    if len(counts) > 1 or 0 in counts:
        raise UsageError("examples: give one batch, with the same number of rows for each input")

    dtypes = {getattr(model, "compute_dtype", None)}
    if run is not None:
        dtypes.add(run.config.runtime.mixed_precision_dtype)
    has_low_precision = not dtypes.isdisjoint({"bfloat16", "float16"})
    results: dict[str, Parity] = {}
    refusals: list[str] = []
    with publish_folder(target) as folder:
        for export_format in chosen_formats:
            try:
                if is_random and not export_format.is_exact:
                    raise UsageError(
                        f"{export_format.name}: it takes its ranges from examples; give"
                        f" examples={_EXAMPLES} examples in one batch"
                    )
                is_exact = export_format.is_exact and not has_low_precision
                parity = _write_format(
                    export_format, inference, arrays, is_exact, tolerance, folder
                )
                results[export_format.name] = replace(parity, is_random=is_random)
            except UsageError as error:
                refusals.append(str(error))
        reasons = "; ".join(refusals)
        if not results:
            raise UsageError(f"nothing is published: {reasons}")
        write_model_card(folder, target, run, inference, results)

    for name, parity in results.items():
        print(f"{name}: {parity}")
    if refusals:
        published = ", ".join(results)
        raise UsageError(f"{reasons}; {target} has the other formats: {published}")
    print(f"exported to {target}")
    return Export(str(target), run.step if run else None, results)


def _write_format(
    export_format: ExportFormat,
    inference: InferenceFunction,
    examples: Arrays,
    is_exact: bool,
    tolerance: float | None,
    folder: str,
) -> Parity:
    """Writes a format into a folder, if it equals the live model.

    Raises:
      UsageError: When the format cannot contain the model, or differs from it.
    """
    end = _EXAMPLES
    if is_exact:
        end = _FEW_EXAMPLES
        tolerance = TOLERANCE if tolerance is None else tolerance

    batches = []
    for part in (slice(1), slice(1, end)):
        batch = {name: array[part] for name, array in examples.items()}
        # There may be only one example.
        if len(next(iter(batch.values()))):
            batches.append(batch)

    with tempfile.TemporaryDirectory(dir=folder) as trial:
        path = os.path.join(trial, export_format.file)
        export_format.write(inference, path, examples)
        parity = check_parity(export_format, path, inference, batches, tolerance)
        for file in Path(trial).iterdir():
            file.rename(Path(folder, file.name))
    return parity


@contextlib.contextmanager
def publish_folder(target: Path, replaces: bool = False) -> Iterator[str]:
    """A context with a temporary folder, which gets the name `target` if nothing is raised.

    Args:
      target: The path of the new folder.
      replaces: Whether an older folder of this name goes. It stays whole until it does.

    Raises:
      StorageError: When the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Folders that killed processes have left.
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.[0-9]*.tmp"):
            pid = int(leftover.suffixes[-2][1:])
            # In a container each process may have the same number.
            if pid == os.getpid() or not is_process_alive(pid):
                shutil.rmtree(leftover, ignore_errors=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        folder = temporary / "new"
        folder.mkdir(parents=True)
        try:
            yield str(folder)
            files.flush_tree(folder)
            if replaces and target.exists():
                os.rename(target, temporary / "old")
            os.rename(folder, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        files.flush_folder(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error

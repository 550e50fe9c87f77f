"""predict: the outputs of a model for many rows, in their order, to a file or as arrays."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from rich.progress import track

from trainer_kit.errors import UsageError
from trainer_kit.serving.export_formats import Arrays
from trainer_kit.serving.inference_function import InferenceFunction, build_inference_function
from trainer_kit.serving.model_loading import LoadedRun, check_built, open_run
from trainer_kit.serving.prediction_files import PredictionParts, check_output, merge_parts
from trainer_kit.serving.prediction_inputs import (
    Batch,
    PredictionInputs,
    is_tfrecord,
    open_inputs,
)
from trainer_kit.serving.validation_examples import (
    build_validation_dataset,
    get_features_spec,
    get_model_spec,
    get_serving_examples,
)
from trainer_kit.typing import Model

# The batches of a part.
_PART_BATCHES = 256
_WAIT_SECONDS = 0.2


def predict(
    run_or_model: Model | str | os.PathLike[str],
    data: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    which: str | int = "best",
    import_modules: str | Sequence[str] | Literal[False] = (),
    weights: str = "",
    batch_size: int = 32,
    strategy: tf.distribute.Strategy | None = None,
    worker: int = 0,
    workers: int = 1,
    verbose: bool = False,
) -> dict[str, np.ndarray] | str:
    """Computes the outputs of a model for all rows of some data, in the order of the data.

    The outputs are those of `export`. Rows are written as numbered parts, which become one file at
    the end, so a prediction that was killed continues with the part that is missing. Columns of the
    data that are no inputs are passed through. Runs eagerly, on the host.

    Args:
      run_or_model: The folder of a run, or a built Keras 3 model, tf_keras model or tf.Module.
      data: Arrays in the structure of the features, or a dict of arrays by the names of the inputs.
        Or the path of a .npz, .csv or .parquet file, of TFRecord files, which the task reads,
        or of a folder of images. None: the run's first validation set, with its labels.
      output: The path of the file: .parquet, .jsonl, .csv or .npz. None: the rows are returned.
      which, import_modules, weights: The checkpoint of a run. See `load_model`.
      batch_size: The number of rows in a batch, of data that is not in batches.
      strategy: The strategy whose replicas share each batch. None: one replica.
      worker, workers: The number of this worker and of all workers. They share the parts in the
        folder of `output`, and worker 0 writes the file.
      verbose: Whether to show a progress bar.

    Returns:
      The outputs and the passed columns by name, or the path of the file.

    Raises:
      UsageError: When the run or the data does not exist, or the data does not fit the inputs.
      StorageError: When a file cannot be read or written.
    """
    if output is not None:
        check_output(os.fspath(output))
    elif workers > 1:
        raise UsageError("predict: several workers need an output, whose folder they share")
    if not 0 <= worker < workers or batch_size < 1:
        raise UsageError(
            f"predict: worker={worker}, workers={workers}, batch_size={batch_size}; the worker is"
            " below the number of workers, and the batch size is at least 1"
        )

    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        run, inference = _open_inference(run_or_model, data, which, import_modules, weights)
    inputs = open_inputs(data, run, inference, batch_size)
    compute = _Computation(inference, strategy)
    if output is None:
        pieces = [compute(batch) for batch in _show_progress(inputs, 0, verbose)]
        return _join(pieces)

    path = os.fspath(output)
    identity = {
        "weights of the model": _compute_checksum(inference.model.variables),
        "data": inputs.identity,
        "batch_size": batch_size,
    }
    parts = PredictionParts(path, json.loads(json.dumps(identity)))
    count = _write_parts(parts, compute, inputs, worker, workers, verbose)
    if worker == 0:
        if any(not parts.has_part(number) for number in range(count)):
            print(f"waits for the parts of the other workers in {parts.folder}")
        while not all(parts.has_part(number) for number in range(count)):
            time.sleep(_WAIT_SECONDS)
        rows = merge_parts(parts, count, path)
        print(f"{rows:,} rows in {path}")
    return path


def _open_inference(
    run_or_model: Any,
    data: Any,
    which: str | int,
    import_modules: str | Sequence[str] | Literal[False],
    weights: str,
) -> tuple[LoadedRun | None, InferenceFunction]:
    """Returns the run, if it is one, and its inference. Called in strategy scope."""
    if isinstance(run_or_model, (str, os.PathLike)):
        run = open_run(run_or_model, which, import_modules, weights)
        if data is None or is_tfrecord(data):
            spec = get_features_spec(build_validation_dataset(run.config, run.task), run.model)
            return run, build_inference_function(run.task, run.model, spec, is_raw=False)
        examples = get_serving_examples(run.task)
        if examples is not None:
            spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, examples)
        else:
            # The validation data of the run may be on another machine.
            spec = get_model_spec(run.model)
            if spec is None:
                spec = get_features_spec(build_validation_dataset(run.config, run.task), run.model)
        return run, build_inference_function(run.task, run.model, spec)

    spec = get_model_spec(run_or_model)
    if spec is None:
        check_built(run_or_model)
        if data is None or isinstance(data, (str, os.PathLike)):
            raise UsageError("predict: a model that is not functional takes arrays as data")
        arrays = tf.nest.map_structure(tf.convert_to_tensor, data)
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, arrays)
    return None, build_inference_function(None, run_or_model, spec)


class _Computation:
    """Computes the columns of a batch, on all replicas of a strategy.

    Args:
      inference: The inference.
      strategy: The strategy, in whose scope the model was built.
    """

    def __init__(self, inference: InferenceFunction, strategy: tf.distribute.Strategy) -> None:
        self._inference = inference
        self._strategy = strategy
        self._replicas = strategy.num_replicas_in_sync

        def infer(*arguments: tf.Tensor) -> dict[str, tf.Tensor]:
            return inference.function(*arguments)

        @tf.function(autograph=False, reduce_retracing=True)
        def run_replicas(arguments: list[Any]) -> Any:
            return strategy.run(infer, args=arguments)

        self._run_replicas = run_replicas

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Returns the outputs and the columns that are passed through. Runs on the host."""
        inputs, keys = batch
        outputs = self._inference(inputs) if self._replicas == 1 else self._share(inputs)
        if both := keys.keys() & outputs.keys():
            raise UsageError(
                f"input: the column {min(both)!r} has the name of an output; rename it"
            )
        return {**keys, **outputs}

    def _share(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the outputs of a batch of which each replica computes a part."""
        rows = len(next(iter(inputs.values())))
        bounds = np.linspace(0, rows, self._replicas + 1).astype(int)

        def distribute(name: str) -> Any:
            dtype = self._inference.input_specs[name].dtype

            def select(context: tf.distribute.ValueContext) -> tf.Tensor:
                number = context.replica_id_in_sync_group
                return tf.constant(inputs[name][bounds[number] : bounds[number + 1]], dtype)

            return self._strategy.experimental_distribute_values_from_function(select)

        arguments = [distribute(name) for name in self._inference.input_specs]
        outputs = self._run_replicas(arguments)
        columns = {}
        for name, values in outputs.items():
            parts = self._strategy.experimental_local_results(values)
            columns[name] = np.concatenate([part.numpy() for part in parts])
        return columns


def _write_parts(
    parts: PredictionParts,
    compute: _Computation,
    inputs: PredictionInputs,
    worker: int,
    workers: int,
    verbose: bool,
) -> int:
    """Writes the parts of a worker that are missing, and returns the number of all parts."""
    first = 0
    while workers == 1 and parts.has_part(first):
        first += 1

    pieces: list[dict[str, np.ndarray]] = []
    index = first * _PART_BATCHES
    is_missing = False
    for batch in _show_progress(inputs, index, verbose):
        number, place = divmod(index, _PART_BATCHES)
        if place == 0:
            is_missing = number % workers == worker and not parts.has_part(number)
        index += 1
        if is_missing:
            pieces.append(compute(batch))
        if pieces and place == _PART_BATCHES - 1:
            parts.write(number, _join(pieces))
            pieces = []
    if pieces:
        parts.write(number, _join(pieces))
    if index == 0:
        raise UsageError("input: the data has no row")
    return math.ceil(index / _PART_BATCHES)


def _compute_checksum(variables: Iterable[Any]) -> int:
    checksum = 0
    for variable in variables:
        checksum = zlib.crc32(np.asarray(variable).tobytes(), checksum)
    return checksum


def _show_progress(inputs: PredictionInputs, skipped: int, verbose: bool) -> Iterator[Batch]:
    """Yields the batches after the skipped ones, with a bar on the terminal."""
    total = None if inputs.batch_count is None else inputs.batch_count - skipped
    batches = inputs.read_batches(skipped)
    return iter(track(batches, "predict", total, disable=not verbose))


def _join(pieces: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Returns the columns of several batches.

    Raises:
      UsageError: When there is none.
    """
    if not pieces:
        raise UsageError("input: the data has no row")
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

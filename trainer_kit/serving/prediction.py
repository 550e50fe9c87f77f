"""predict: the outputs of a model for many rows, in their order, to a file or as arrays."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from rich.progress import track

from trainer_kit.errors import UsageError
from trainer_kit.serving.classification_report import write_report
from trainer_kit.serving.export_formats import Arrays
from trainer_kit.serving.inference_function import InferenceFunction, to_array
from trainer_kit.serving.model_loading import open_run
from trainer_kit.serving.prediction_files import PredictionParts, check_output
from trainer_kit.serving.prediction_inputs import (
    Batch,
    PredictionInputs,
    is_read_by_task,
    open_inputs,
    select_inputs,
)
from trainer_kit.serving.validation_examples import get_serving_examples, open_inference
from trainer_kit.typing import Model

# The batches of a part.
_PART_BATCHES = 128
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
    evaluate: bool = False,
) -> dict[str, np.ndarray] | str:
    """Computes the outputs of a model for all rows of some data, in the order of the data.

    The outputs are those of `export`. Rows are written as numbered parts, which become one file at
    the end, so a prediction that was killed continues with the part that is missing. Columns of the
    data that are no inputs are passed through. A bar shows the progress. Runs eagerly, on the host.

    Args:
      run_or_model: The folder of a run, or a built Keras 3 model, tf_keras model or tf.Module.
      data: Arrays in the structure of the features, or a dict of arrays by the names of the inputs.
        Or the path of a .npz, .csv or .parquet file, of TFRecord files, which the task reads,
        or of a folder of images. None: the run's first validation set, with its labels.
      output: The path of the file: .parquet, .jsonl, .csv or .npz. None: the rows are returned.
      which, import_modules, weights: The checkpoint of a run, and the modules to import. See
        `load_model`. Ignored for a live model.
      batch_size: The number of rows in a batch, of data that is not in batches.
      strategy: The strategy whose replicas share each batch. None: one replica.
      worker, workers: The number of this worker and of all workers. They share the parts in the
        folder of `output`, and worker 0 writes the file.
      evaluate: Whether to write the results of a classifier beside `output`, too.

    Returns:
      The outputs and the passed columns by name, or the path of the file.

    Raises:
      UsageError: When the run or the data does not exist, or the data does not fit the inputs.
      StorageError: When a file cannot be read or written.
    """
    if output is not None:
        check_output(os.fspath(output))
    elif workers > 1 or evaluate:
        raise UsageError("predict: several workers and evaluate need an output")
    if not 0 <= worker < workers or batch_size < 1:
        raise UsageError(
            f"predict: worker={worker}, workers={workers}, batch_size={batch_size}; the worker is"
            " below the number of workers, and the batch size is at least 1"
        )

    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        if not isinstance(run_or_model, (str, os.PathLike)):
            run = None
            arrays = None if isinstance(data, (str, os.PathLike)) else data
            inference = open_inference(run_or_model, None, arrays)
        else:
            run = open_run(run_or_model, which, import_modules, weights)
            examples = None if is_read_by_task(data) else get_serving_examples(run.task)
            inference = open_inference(run.model, run, examples)
    inputs = open_inputs(data, run, inference, batch_size)
    infer = ReplicatedInference(inference, strategy)
    if output is None:
        return _join([infer(batch) for batch in _show_progress(inputs, 0)])

    path = os.fspath(output)
    weights_checksum = 0
    # The variables of a Keras model contain random states, which differ in each process.
    for variable in getattr(inference.model, "weights", inference.model.variables):
        weights_checksum = zlib.crc32(np.asarray(variable).tobytes(), weights_checksum)
    identity = {
        "weights": weights_checksum,
        "outputs": repr(inference.output_specs),
        "data": inputs.identity,
        "batch_size": batch_size,
    }
    parts = PredictionParts(path, identity)
    count = 0
    while parts.has_part(count):
        count += 1
    if count > 0:
        print(f"continues with part {count} in {parts.folder}")

    # This worker computes its missing parts, and passes over the others.
    batches = _show_progress(inputs, count * _PART_BATCHES)
    while True:
        is_missing = count % workers == worker and not parts.has_part(count)
        part_batches = itertools.islice(batches, _PART_BATCHES)
        pieces = [infer(batch) if is_missing else {} for batch in part_batches]
        if not pieces and count > 0:
            break
        if is_missing:
            parts.write(count, _join(pieces))
        count += 1

    if worker == 0:
        if workers > 1:
            print(f"waits for the parts of the other workers in {parts.folder}")
        while not all(parts.has_part(number) for number in range(count)):
            time.sleep(_WAIT_SECONDS)
        if evaluate:
            write_report(parts.read(count), list(inference.output_specs), parts.output)
        parts.merge(count)
        print(f"the predictions are in {path}")
    return path


class ReplicatedInference:
    """Computes the columns of a batch, of which each replica of a strategy computes a part.

    Args:
      inference: The inference.
      strategy: The strategy, in whose scope the model was built.
    """

    def __init__(self, inference: InferenceFunction, strategy: tf.distribute.Strategy) -> None:
        self._inference = inference
        self._strategy = strategy

        # The values of replicas do not fit its input signature.
        def infer(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            return inference.function(*tensors)

        @tf.function(autograph=False, reduce_retracing=True)
        def run_replicas(tensors: list[Any]) -> Any:
            return strategy.run(infer, args=tensors)

        self._run_replicas = run_replicas

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Returns the outputs and the columns that are passed through. Runs on the host."""
        inputs, passed = select_inputs(batch, self._inference)
        rows = len(next(iter(inputs.values())))

        def select_shard(context: tf.distribute.ValueContext) -> list[tf.Tensor]:
            tensors = []
            for name, spec in self._inference.input_specs.items():
                shards = np.array_split(inputs[name], context.num_replicas_in_sync)
                shard = shards[context.replica_id_in_sync_group]
                tensors.append(tf.convert_to_tensor(shard, spec.dtype))
            return tensors

        if 1 < self._strategy.num_replicas_in_sync <= rows:
            tensors = self._strategy.experimental_distribute_values_from_function(select_shard)
            outputs = {}
            for name, values in self._run_replicas(tensors).items():
                local_values = self._strategy.experimental_local_results(values)
                outputs[name] = np.concatenate([to_array(value) for value in local_values])
        else:
            try:
                outputs = self._inference(inputs)
            except tf.errors.InvalidArgumentError as error:
                reason = error.message.partition("\n")[0]
                raise UsageError(f"input: the model cannot compute a batch: {reason}") from error

        for name, output in outputs.items():
            if name in passed:
                raise UsageError(f"input: the column {name!r} has the name of an output; rename it")
            if output.shape[:1] != (rows,):
                raise UsageError(
                    f"the output {name!r} has the shape {list(output.shape)} for {rows} rows; a"
                    " prediction needs outputs with a row for each of them"
                )
        return {**passed, **outputs}


def _show_progress(inputs: PredictionInputs, skipped: int) -> Iterator[Batch]:
    """Yields the batches after the skipped ones, with a bar on a terminal."""
    total = None if inputs.batch_count is None else inputs.batch_count - skipped
    batches = inputs.read_batches(skipped)
    return iter(track(batches, "predict", total, transient=True))


def _join(pieces: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Returns the columns of several batches.

    Raises:
      UsageError: When there is no row, or the rows of the batches differ in shape.
    """
    columns = {}
    for name in pieces[0] if pieces else ():
        arrays = [piece[name] for piece in pieces]
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise UsageError(
                f"the rows of {name!r} have the shapes {sorted(shapes)}; pad the data to one length"
            )
        columns[name] = np.concatenate(arrays)
    if not any(len(column) for column in columns.values()):
        raise UsageError("input: the data has no row")
    return columns

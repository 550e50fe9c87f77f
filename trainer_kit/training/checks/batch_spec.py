"""Finds the spec of a batch without reading one: to build a model, and to explain an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.errors import UsageError, add_note, find_trainer_kit_error
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.dataset_iterator import explain_missing_files
from trainer_kit.inputs.registered_datasets import get_build_inputs
from trainer_kit.inputs.sources.source_protocol import call_build_inputs
from trainer_kit.inputs.worker_pipeline import build_one_pass
from trainer_kit.process.error_report import describe_structure
from trainer_kit.runtime.keras_internals import LayerNumbering
from trainer_kit.runtime.variable_creation import trace_concrete_function
from trainer_kit.training.task import is_compiled

# The data has ended, or another worker is gone: errors that are not about batches or models.
_NOT_ABOUT_BATCHES = (
    StopIteration,
    tf.errors.OutOfRangeError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)


def create_model(task: Any) -> Any:
    """Returns the model of a task; called in strategy scope. Its Keras 3 layers have the numbers of the first model."""
    with LayerNumbering.restart():
        return task.build_model()


def build_model(
    sections: Any, task: Any, model: Any, train: bool, ready_made_dataset: Any = None
) -> None:
    """Creates the missing variables of a model; runs eagerly, in strategy scope.

    The task calls the model on the specs of a batch, in a graph that is thrown away: no data is
    read, and nothing is computed. A model that is already built is not changed. The metrics of its
    `compile` are built too: a loop that was traced before that could not reset them.

    Args:
      sections: The section `task` of the config.
      task: The task; its steps call the model.
      model: The model of `task.build_model`.
      train: Whether the batch is of the training data rather than of the first validation set. If
        that data has no batch size, the other data is used.
      ready_made_dataset: A ready-made dataset to use instead of the task's, or a dict of datasets
        by name.

    Raises:
      UsageError: when `model` is not a model.
      Exception: the error of the task or the model when it is called, with a note on the attempted
        call.
    """
    if not _is_model(model):
        kind = (
            "None"
            if model is None
            else f"the class {model.__name__}"
            if isinstance(model, type)
            else repr(model)
        )
        raise UsageError(f"{type(task).__name__}.build_model returned {kind:.80}; return the model")
    _name_for_graphs(task, model)
    if is_built(model) and not has_unbuilt_metrics(model):
        return
    try:
        section, batch = _compute_batch_spec(sections, task, model, train, ready_made_dataset)
    except Exception:
        if has_variables(model):  # the first step creates the rest
            return
        raise
    had_variables = has_variables(model)
    errors: list[Exception] = []
    for step in _steps_with_model(task, model):
        try:
            _trace(step, batch)
            is_traced = True
        except Exception as error:
            errors.append(error)
            is_traced = False
        if has_unbuilt_metrics(model):
            continue
        # A step without an optimizer or metrics may fail later. A model may have layers that no
        # step uses.
        if is_built(model) or (is_traced and had_variables):
            return
    if errors and not has_variables(model):
        add_note(
            errors[0],
            f"the model {type(model).__name__} has no variables yet, so it was called on a batch of"
            f" {section}, which is {describe_structure(batch)}; if it cannot be called so, build its"
            " variables in build_model",
        )
        raise errors[0]


def build_metrics(
    sections: Any,
    task: Any,
    model: Any,
    metrics: Sequence[Any],
    train: bool,
    ready_made_dataset: Any = None,
) -> None:
    """Creates the variables of metrics that make theirs at the first update; runs eagerly, in strategy scope.

    A loop that was traced before could not reset them, and several replicas cannot make them. What
    fails here fails again in the loop, where the error is explained.

    Args:
      sections, task, model, train, given: See `build_model`.
      metrics: The metrics, which the validation step updates.
    """
    if not any(_lacks_variables(metric) for metric in metrics):
        return
    strategy = tf.distribute.get_strategy()

    def update(batch: Any) -> None:
        apply_autograph(task.validation_step)(batch, model=model, metrics=list(metrics))

    with contextlib.suppress(Exception):
        _, spec = _compute_batch_spec(sections, task, model, train, ready_made_dataset)
        trace_concrete_function(
            lambda batch: strategy.run(tf.autograph.experimental.do_not_convert(update), (batch,)),
            spec,
        )


def _lacks_variables(metric: Any) -> bool:
    """Whether a metric has no variables yet, or lacks some that its result needs."""
    try:
        metric.result()
    except Exception:  # a missing attribute, or whatever else the class raises
        return True
    return not metric.variables


def _name_for_graphs(task: Any, model: Any) -> None:
    """Gives models whose class name begins with an underscore a name that a graph scope can have.

    Keras 3 names a model after its class, and opens a scope of that name when the model is called.
    At the root of a graph TensorFlow refuses a scope that begins with "_". Keras 2 puts "private"
    before the name.
    """
    for one in (model, *getattr(task, "__dict__", {}).values()):
        if isinstance(one, keras.Layer) and one.name.startswith("_"):
            one.name = f"private{one.name}"


def _compute_batch_spec(
    sections: Any, task: Any, model: Any, train: bool, ready_made_dataset: Any
) -> tuple[str, Any]:
    """Returns the dotted path of the data in the config, and the spec of one replica's batch."""
    name, data = _section_of_batches(sections, train)
    dataset = (
        next(iter(ready_made_dataset.values()))
        if isinstance(ready_made_dataset, Mapping)
        else ready_made_dataset
    )
    if dataset is None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        why = (
            f"the model {type(model).__name__} has no variables yet, so the shape of a batch is"
            " read from the data"
        )
        with explain_missing_files(
            name, f"{why}; with a keras.Input in build_model the model is built without data"
        ):
            context = tf.distribute.InputContext(1, 0, replicas)
            dataset = build_one_pass(
                call_build_inputs(get_build_inputs(task, data), data, context), context
            )
    return f"task.{name}", get_replica_spec(dataset.element_spec)


def _section_of_batches(sections: Any, train: bool) -> tuple[str, Any]:
    """Returns name and config of the data to use: the other data if the preferred one has no batch size."""
    evaluated = {
        f"validation_data.{name}".rstrip("."): data
        for name, data in get_validation_sets(sections).items()
    }
    trained = {"train_data": getattr(sections, "train_data", None)}
    found = {**trained, **evaluated} if train else {**evaluated, **trained}
    has_batches = (
        one
        for one in found.items()
        if one[1] is not None and getattr(one[1], "global_batch_size", True)
    )
    return next(has_batches, next(iter(found.items())))


def _is_model(model: Any) -> bool:
    """Whether the object may be a model: an object that has an attribute `variables`."""
    try:
        return not isinstance(model, type) and hasattr(model, "variables")
    except ValueError:  # as in has_variables
        return True


def has_variables(model: Any) -> bool:
    """Whether a model has variables already."""
    try:
        return bool(getattr(model, "variables", None))
    except ValueError:  # what a Sequential of Keras 2 says as long as it has none
        return False


def is_built(model: Any) -> bool:
    """Whether a model has all of its variables, as far as the model knows."""
    if not has_variables(model):
        return False
    if isinstance(model, keras.Model):
        return model.built or all(layer.built for layer in model.layers)
    # A model of tf_keras may share layers with another that is built.
    return all(getattr(part, "built", True) for part in getattr(model, "submodules", ()))


def has_unbuilt_metrics(model: Any) -> bool:
    """Whether a compiled model has metrics that the first batch is to build."""
    return any(
        getattr(metric, "built", True) is False for metric in getattr(model, "metrics", None) or ()
    )


def _steps_with_model(task: Any, model: Any) -> Iterator[Callable[[Any], Any]]:
    """Yields functions of a batch that call the model as the task does, the most likely one first."""
    if not _is_default(task, "validation_step") or has_unbuilt_metrics(model):
        yield lambda batch: apply_autograph(task.validation_step)(batch, model=model, metrics=[])
    yield lambda batch: apply_autograph(task.inference_step)(_features(batch, model), model)
    if not _is_default(task, "train_step") or has_unbuilt_metrics(model):
        yield lambda batch: apply_autograph(task.train_step)(
            batch, model=model, optimizer=None, metrics=[]
        )


def _trace(step: Callable[[Any], Any], batch: Any) -> Any:
    """Traces a function of a batch on specs, and returns the specs of its outputs."""
    return trace_concrete_function(step, batch).structured_outputs


@contextlib.contextmanager
def explain_batch_errors(
    section: str, get_spec: Callable[[], Any], task: Any, model: Any
) -> Iterator[None]:
    """Adds a note to an error in a loop: the spec of a batch of `section`, and the spec of the model's outputs.

    The model is traced once more for this, so errors that are not about batches or models get no
    note.
    """
    try:
        yield
    except Exception as error:
        if find_trainer_kit_error(error) is None and not isinstance(error, _NOT_ABOUT_BATCHES):
            with contextlib.suppress(Exception):
                add_note(
                    error,
                    "\n".join(_describe_batch(section, get_replica_spec(get_spec()), task, model)),
                )
        raise


def get_replica_spec(spec: Any) -> Any:
    """Returns the spec of the first replica's part of a distributed element."""
    return tf.nest.map_structure(
        lambda part: (
            tf.nest.flatten(part, expand_composites=True)[0]
            if type(part).__name__ == "PerReplicaSpec"
            else part
        ),
        spec,
    )


def _describe_batch(section: str, batch: Any, task: Any, model: Any) -> Iterator[str]:
    yield f"a batch of {section} is {describe_structure(batch)}"
    if not (isinstance(batch, tuple) and len(batch) == 2) and _is_default(task, "train_step"):
        yield (
            "that is not a pair (features, labels), so both the model and build_losses (as labels)"
            " get the whole batch; return pairs from build_inputs, or override the step"
        )
    with contextlib.suppress(Exception):
        outputs = _trace(
            lambda inputs: apply_autograph(task.inference_step)(_features(inputs, model), model),
            batch,
        )
        yield f"the model gives {describe_structure(outputs)}"


def _features(batch: Any, model: Any) -> Any:
    lengths = (2, 3) if is_compiled(model) else (2,)
    return batch[0] if isinstance(batch, tuple) and len(batch) in lengths else batch


def _is_default(task: Any, step: str) -> bool:
    """Whether a step is the default of trainer_kit's or Model Garden's Task, which take (features, labels)."""
    module = getattr(getattr(type(task), step, None), "__module__", "")
    return module in ("trainer_kit.training.task", "official.core.base_task")

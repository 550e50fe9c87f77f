"""Finds the spec of a batch without reading one: to build a model, and to explain an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import keras
import tensorflow as tf

from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import TaskConfig
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
from trainer_kit.typing import Dataset, Metric, Model, NestedSpec, TaskLike

# The data has ended, or another worker is gone: errors that are not about batches or models.
_NOT_ABOUT_BATCHES = (
    StopIteration,
    tf.errors.OutOfRangeError,
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)


def create_model(task: TaskLike) -> Any:
    """Returns the model of a task. Called in strategy scope.

    Its Keras 3 layers have the numbers of the first model.
    """
    with LayerNumbering.restart():
        return task.build_model()


def build_model(
    sections: TaskConfig,
    task: TaskLike,
    model: object,
    train: bool,
    ready_made_dataset: Dataset | Mapping[str, Dataset] | None = None,
) -> None:
    """Creates the missing variables of a model. Runs eagerly, in strategy scope.

    The task calls the model on the specs of a batch, in a graph that is thrown away. No data is
    read, and nothing is computed. A model that is already built is not changed. The metrics of its
    `compile` are built too, since a loop that was traced before that could not reset them.

    Args:
      sections: The section `task` of the config.
      task: The task, whose steps call the model.
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
        if model is None:
            kind = "None"
        elif isinstance(model, type):
            kind = f"the class {model.__name__}"
        else:
            kind = repr(model)
        raise UsageError(f"{type(task).__name__}.build_model returned {kind:.80}; return the model")

    # Keras 3 names a model after its class, and opens a scope of that name when the model is
    # called. At the root of a graph TensorFlow refuses a scope that begins with "_". Keras 2 puts
    # "private" before the name.
    for layer in (model, *getattr(task, "__dict__", {}).values()):
        if isinstance(layer, keras.Layer) and layer.name.startswith("_"):
            layer.name = f"private{layer.name}"

    if is_built(model) and not has_unbuilt_metrics(model):
        return

    try:
        section, batch = _compute_batch_spec(sections, task, model, train, ready_made_dataset)
    except Exception:
        # A model that has some variables gets the rest in the first step.
        if has_variables(model):
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
            f"the model {type(model).__name__} has no variables yet, "
            f"so it was called on a batch of {section}, which is {describe_structure(batch)}; "
            "if it cannot be called so, build its variables in build_model",
        )
        raise errors[0]


def build_metrics(
    sections: TaskConfig,
    task: TaskLike,
    model: Model,
    metrics: Sequence[Metric],
    train: bool,
    ready_made_dataset: Dataset | Mapping[str, Dataset] | None = None,
) -> None:
    """Creates the variables of metrics that create theirs at the first update.

    A loop that was traced before could not reset them, and several replicas cannot create them.
    What fails here fails again in the loop, where the error is explained. Runs eagerly, in strategy
    scope.

    Args:
      sections, task, model, train, ready_made_dataset: See `build_model`.
      metrics: The metrics, which the validation step updates.
    """
    if not any(_lacks_variables(metric) for metric in metrics):
        return

    strategy = tf.distribute.get_strategy()

    def update(batch: Any) -> None:
        apply_autograph(task.validation_step)(batch, model=model, metrics=list(metrics))

    update_unconverted = tf.autograph.experimental.do_not_convert(update)
    with contextlib.suppress(Exception):
        _, spec = _compute_batch_spec(sections, task, model, train, ready_made_dataset)
        trace_concrete_function(lambda batch: strategy.run(update_unconverted, (batch,)), spec)


def _lacks_variables(metric: Metric) -> bool:
    """Whether a metric has no variables yet, or lacks some that its result needs."""
    try:
        metric.result()
    except Exception:
        # An attribute may be missing, and the class may raise anything else.
        return True
    return not metric.variables


def _compute_batch_spec(
    sections: TaskConfig,
    task: TaskLike,
    model: Model,
    train: bool,
    ready_made_dataset: Dataset | Mapping[str, Dataset] | None,
) -> tuple[str, NestedSpec]:
    """Returns the dotted path of the data in the config, and the spec of one replica's batch."""
    evaluated = {}
    for set_name, section in get_validation_sets(sections).items():
        evaluated[f"validation_data.{set_name}".rstrip(".")] = section
    trained = {"train_data": getattr(sections, "train_data", None)}
    candidates = {**trained, **evaluated} if train else {**evaluated, **trained}

    # The other data is used if the preferred one has no batch size.
    name, data = next(iter(candidates.items()))
    for candidate, section in candidates.items():
        if section is not None and getattr(section, "global_batch_size", True):
            name = candidate
            data = section
            break

    dataset = ready_made_dataset
    if isinstance(dataset, Mapping):
        dataset = next(iter(dataset.values()))

    if dataset is None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        why = (
            f"the model {type(model).__name__} has no variables yet, "
            "so the shape of a batch is read from the data; "
            "with a keras.Input in build_model the model is built without data"
        )
        with explain_missing_files(name, why):
            context = tf.distribute.InputContext(1, 0, replicas)
            inputs = call_build_inputs(get_build_inputs(task, data), data, context)
            dataset = build_one_pass(inputs, context)
    return f"task.{name}", get_replica_spec(dataset.element_spec)


def _is_model(model: object) -> TypeGuard[Model]:
    """Whether the object may be a model: an object that has an attribute `variables`."""
    try:
        return not isinstance(model, type) and hasattr(model, "variables")
    except ValueError:
        # As in has_variables.
        return True


def has_variables(model: Model) -> bool:
    """Whether a model has variables already."""
    try:
        return bool(getattr(model, "variables", None))
    except ValueError:
        # A Sequential of Keras 2 raises it as long as it has none.
        return False


def is_built(model: Model) -> bool:
    """Whether a model has all of its variables, as far as the model knows."""
    if not has_variables(model):
        return False
    if isinstance(model, keras.Model):
        return model.built or all(layer.built for layer in model.layers)

    # A model of tf_keras may share layers with another that is built.
    parts = getattr(model, "submodules", ())
    return all(getattr(part, "built", True) for part in parts)


def has_unbuilt_metrics(model: Model) -> bool:
    """Whether a compiled model has metrics that the first batch is to build."""
    metrics = getattr(model, "metrics", None) or ()
    return any(getattr(metric, "built", True) is False for metric in metrics)


def _steps_with_model(task: TaskLike, model: Model) -> Iterator[Callable[[Any], Any]]:
    """Yields functions of a batch that call the model as the task does.

    The most likely one comes first.
    """
    if not _is_default(task, "validation_step") or has_unbuilt_metrics(model):
        yield lambda batch: apply_autograph(task.validation_step)(batch, model=model, metrics=[])

    yield lambda batch: apply_autograph(task.inference_step)(select_features(batch, model), model)

    if not _is_default(task, "train_step") or has_unbuilt_metrics(model):
        yield lambda batch: apply_autograph(task.train_step)(
            batch, model=model, optimizer=None, metrics=[]
        )


def _trace(step: Callable[[Any], Any], batch: NestedSpec) -> NestedSpec:
    """Traces a function of a batch on specs, and returns the specs of its outputs."""
    return trace_concrete_function(step, batch).structured_outputs


@contextlib.contextmanager
def explain_batch_errors(
    section: str, get_spec: Callable[[], NestedSpec], task: TaskLike, model: Model
) -> Iterator[None]:
    """Adds a note to an error in a loop: the specs of a batch and of the model's outputs.

    The model is traced once more for this, so errors that are not about batches or models get no
    note.

    Args:
      section: The dotted path of the data in the config.
      get_spec: Returns the spec of an element of the data, also of a distributed one.
      task: The task.
      model: Its model.
    """
    try:
        yield
    except Exception as error:
        is_explained = find_trainer_kit_error(error) is not None
        if not is_explained and not isinstance(error, _NOT_ABOUT_BATCHES):
            # Whatever fails here must not replace the error itself.
            with contextlib.suppress(Exception):
                spec = get_replica_spec(get_spec())
                lines = _describe_batch(section, spec, task, model)
                add_note(error, "\n".join(lines))
        raise


def get_replica_spec(spec: NestedSpec) -> NestedSpec:
    """Returns the spec of the first replica's part of a distributed element."""

    def select_first(part: tf.TypeSpec) -> tf.TypeSpec:
        if type(part).__name__ != "PerReplicaSpec":
            return part
        return tf.nest.flatten(part, expand_composites=True)[0]

    return tf.nest.map_structure(select_first, spec)


def _describe_batch(section: str, batch: NestedSpec, task: TaskLike, model: Model) -> Iterator[str]:
    """Yields the lines of the note: the batch, what is odd in it, and the model's outputs."""
    yield f"a batch of {section} is {describe_structure(batch)}"

    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if not is_pair and _is_default(task, "train_step"):
        yield (
            "that is not a pair (features, labels), "
            "so both the model and build_losses (as labels) get the whole batch; "
            "return pairs from build_inputs, or override the step"
        )

    def run_inference(inputs: Any) -> Any:
        features = select_features(inputs, model)
        return apply_autograph(task.inference_step)(features, model)

    # A model that fails on the batch has no outputs to describe.
    with contextlib.suppress(Exception):
        outputs = _trace(run_inference, batch)
        yield f"the model gives {describe_structure(outputs)}"


def select_features(batch: Any, model: Model) -> Any:
    """Returns the part of a batch that the model is called on.

    This is the first of a pair, and for a compiled model also of a triple.
    """
    lengths = (2, 3) if is_compiled(model) else (2,)
    if isinstance(batch, tuple) and len(batch) in lengths:
        return batch[0]
    return batch


def _is_default(task: TaskLike, step: str) -> bool:
    """Whether a step is the default of trainer_kit's or Model Garden's Task.

    These take (features, labels).
    """
    method = getattr(type(task), step, None)
    module = getattr(method, "__module__", "")
    return module in ("trainer_kit.training.task", "official.core.base_task")

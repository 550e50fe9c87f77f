"""The private names of Keras 3 and tf_keras that trainer_kit needs. No other module may use one.

Each is wrapped in a function, whose docstring says why no public way exists and what happens in a
release without the name. tests/engine/runtime/test_keras_internals.py fails when a name is gone or
has changed.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import keras
import tensorflow as tf

from trainer_kit.typing import Model, Variable

_LOG = logging.getLogger(__name__)

# A context variable, since each replica has a thread.
_SKIP_REPLICA_LOSS_SCALING = contextvars.ContextVar("losses are undivided", default=False)

# Keys of Keras' global state.
_SEED_GENERATOR_KEY = "global_seed_generator"
_NAME_COUNTS_KEY = "object_name_uids"


def get_global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that serves keras.random functions without a seed.

    None means that Keras has not created it yet. Keras does not expose it:
    `keras.utils.set_random_seed` only drops it. Without the name the answer is None.
    """
    try:
        from keras.src.backend.common import global_state

        return global_state.get_global_attribute(_SEED_GENERATOR_KEY)
    except (ImportError, AttributeError):
        return None


def set_global_seed_generator(generator: keras.random.SeedGenerator) -> None:
    """Makes keras.random functions without a seed draw from `generator`.

    Takes effect in functions that are traced afterwards. `keras.utils.set_random_seed` would seed
    Python, NumPy and TensorFlow too, in the middle of their numbers. Without the name nothing is
    set, and a warning says so: the state of Keras' own generator is then in no checkpoint.
    """
    try:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(_SEED_GENERATOR_KEY, generator)
    except (ImportError, AttributeError) as error:
        _LOG.warning(
            "Keras %s does not take a global seed generator (%s): after a resume, keras.random"
            " functions without a seed draw other numbers; give them a keras.random.SeedGenerator",
            *(keras.version(), error),
        )


class LayerNumbering:
    """Makes Keras 3 number the layers of each model of a process as those of the first one.

    Runs eagerly, on the host. Patterns of a config are searched in the names of layers, and so
    apply to each run of a process.

    The public way is `keras.utils.clear_session`, which also resets the default graph that the
    scope of a strategy needs. After it the next model is the first one. Without the private name
    Keras continues to count, and a pattern with a number matches the first model only.
    """

    # The number of names of each kind before the first model.
    _counts_before_first_model: Mapping[str, int] = {}

    # The numbers after the last model. After clear_session Keras has another object.
    _counts_after_last_model: Mapping[str, int] | None = None

    @classmethod
    @contextlib.contextmanager
    def restart(cls) -> Iterator[None]:
        """Numbers the layers that the block creates as in the first such block.

        No layer that is created after the block gets one of these numbers.
        """
        before = _get_layer_counts()
        if before is not cls._counts_after_last_model:
            cls._counts_before_first_model = dict(before)
        _set_layer_counts(cls._counts_before_first_model)

        try:
            yield
        finally:
            after = _get_layer_counts()
            highest = {
                name: max(before.get(name, 0), after.get(name, 0)) for name in {*before, *after}
            }
            cls._counts_after_last_model = _set_layer_counts(highest)


def _get_layer_counts() -> Mapping[str, int]:
    try:
        from keras.src.backend.common import global_state

        return global_state.get_global_attribute(_NAME_COUNTS_KEY) or {}
    except (ImportError, AttributeError):
        return {}


def _set_layer_counts(counts: Mapping[str, int]) -> Mapping[str, int]:
    new_counts = collections.defaultdict(int, counts)
    try:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(_NAME_COUNTS_KEY, new_counts)
    except (ImportError, AttributeError):
        _LOG.debug("Keras %s goes on to number layers", keras.version())
    return new_counts


def get_learning_rate_or_schedule(optimizer: object) -> Any:
    """Returns the variable or schedule of the learning rate of an optimizer of either Keras.

    None means that the optimizer has no rate. The public property shows only the value of a
    schedule at the optimizer's own iterations. Without the name that value is returned, and the
    rate at another step is unknown. Legacy optimizers of tf_keras show the schedule.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        rate = getattr(optimizer, "learning_rate", None)
    return rate


def replace_learning_rate(
    optimizer: keras.Optimizer, rate: keras.optimizers.schedules.LearningRateSchedule
) -> bool:
    """Makes a schedule the rate of an optimizer; returns whether it did.

    The public setter takes the variable of a constant rate out of the optimizer's variables, so out
    of checkpoints. Where the name is gone nothing is done.
    """
    if getattr(optimizer, "_learning_rate", None) is None:
        return False
    optimizer._learning_rate = rate
    return True


def get_trained_variables(optimizer: keras.Optimizer) -> list[Variable]:
    """Returns the variables that an optimizer was built with, in order.

    No public attribute leads from a slot to its variable. Without the name the list is empty: in
    checkpoints, the slots of variables of other models than the run's then have names that depend
    on the layers that a process created before.
    """
    return list(getattr(optimizer, "_trainable_variables", ()))


def set_variable_paths(model: keras.Model, paths: Sequence[str]) -> None:
    """Gives the variables of a model, in their order, the paths that checkpoints know them by.

    Keras takes a path from the place where a layer is called first, and has no public way to change
    it. Without the name the paths stay, and a restore refuses those that differ.

    Raises:
      ValueError: when the model has another number of variables.
    """
    for variable, path in zip(model.variables, paths, strict=True):
        variable._path = path


def get_variable_index(optimizer: keras.Optimizer, variable: Variable) -> int:
    """Returns the position of a variable among those that an optimizer was built with.

    Keras' guide for own optimizers calls this method in `update_step`, where `variable` is a
    replica's part of a variable and no public attribute tells which one it belongs to. Without the
    name a step ends with an AttributeError.
    """
    return int(optimizer._get_variable_index(variable))


def uses_weight_decay(optimizer: keras.Optimizer, variable: Variable) -> bool:
    """Whether Keras applies the `weight_decay` of an optimizer to a variable.

    Keras has a public way to exclude variables, `exclude_from_weight_decay`, and none to read which
    are excluded. Without the name the answer is True.
    """
    decays = getattr(optimizer, "_use_weight_decay", None)
    if decays is None:
        return True
    return bool(decays(variable))


class DataAdapter(Protocol):
    """The object with which `Model.fit` reads data of one kind."""

    # The number of batches in a pass. None if it is not known.
    num_batches: int | None

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Returns one pass over the data."""

    def get_numpy_iterator(self) -> Iterable[Any]:
        """Returns the batches of one pass, as NumPy arrays."""


class ArrayAdapter(DataAdapter, Protocol):
    """The adapter of arrays."""

    # The number of examples in a batch.
    batch_size: int


def get_data_adapter(
    x: Any, y: Any = None, sample_weight: Any = None, **options: Any
) -> DataAdapter:
    """Returns the object with which `Model.fit` reads data of any kind.

    Keras exposes the adapters of no data, and they decide what its dtypes, weights and orders are.
    Without the name trainer_kit.compat.keras ends with an ImportError.

    Args:
      x: Arrays, a tf.data.Dataset, a PyDataset, a generator: all that `Model.fit` takes.
      y: The targets of arrays.
      sample_weight: The weights of examples of arrays.
      **options: batch_size, steps_per_epoch, shuffle, class_weight, as `Model.fit` takes them.

    Raises:
      ValueError: for data that Keras cannot read, with Keras's message.
    """
    from keras.src.trainers import data_adapters

    adapter: DataAdapter = data_adapters.get_data_adapter(x, y, sample_weight, **options)
    return adapter


def is_array_adapter(adapter: DataAdapter) -> TypeGuard[ArrayAdapter]:
    """Whether an adapter of `get_data_adapter` reads arrays; see there."""
    from keras.src.trainers import data_adapters

    return isinstance(adapter, data_adapters.ArrayDataAdapter)


def train_validation_split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns nested arrays without their last part, and that part.

    The arrays are cut as `validation_split` of `Model.fit` does. Keras has the function for all
    kinds of arrays and does not expose it. Without the name trainer_kit.compat.keras ends with an
    ImportError.
    """
    from keras.src.trainers.data_adapters import array_slicing

    train, validation = array_slicing.train_validation_split(
        arrays, validation_split=validation_split
    )
    return train, validation


def install_global_clipping(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer clip the sum of the gradients of all replicas; runs in strategy scope.

    Keras 3 clips the gradients of each replica and adds them up afterwards, so that the update
    depends on the number of replicas. The two steps are one public method. Without the name Keras's
    order stays, and a warning says so. A second call changes nothing.
    """
    name = "_clip_gradients"
    clip = getattr(optimizer, name, None)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    bounds = ("clipnorm", "global_clipnorm", "clipvalue")
    has_bounds = any(getattr(optimizer, bound, None) for bound in bounds)
    if name in vars(optimizer) or not has_bounds or replicas == 1:
        return

    if clip is None:
        _LOG.warning(
            "Keras %s clips the gradients of each replica by itself, before they are summed",
            keras.version(),
        )
        return

    def clip_sum(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
        context = tf.distribute.get_replica_context()
        if context is None:
            return list(clip(gradients))

        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, dense)
        # Keras adds the gradients of all replicas up once more.
        return [gradient / replicas for gradient in clip(summed)]

    setattr(optimizer, name, clip_sum)


def should_trace_batches(tensorboard: object) -> bool:
    """Whether a TensorBoard callback profiles batches, so that it has to be called for each.

    Its argument `profile_batch` is kept under private names only. Without these the answer is
    False, and nothing is traced. `trainer_kit.train --profile` does the same as the callback.
    """
    return bool(getattr(tensorboard, "_should_trace", False))


def set_monitor_op(callback: object) -> None:
    """Makes a callback of Keras 3 choose whether lower or higher values of its log are better.

    Keras chooses at the end of the first epoch of a process, so that a callback of a process that
    resumes could not compare within its first epoch. Without the name Keras chooses there.
    """
    choose = getattr(callback, "_set_monitor_op", None)
    if choose is not None and getattr(callback, "monitor_op", choose) is None:
        choose()


def is_keras_2_model(model: object) -> bool:
    """Whether a model is one of tf_keras, which need not be installed."""
    keras_2 = sys.modules.get("tf_keras")
    return keras_2 is not None and isinstance(model, keras_2.Model)


def get_compile_arguments(model: Model) -> dict[str, Any]:
    """Returns the arguments that a model of either Keras was compiled with, as they were passed.

    Empty if they are unknown. `get_compile_config` returns them serialized, which loses functions
    that are not registered.
    """
    compile_config = getattr(model, "_compile_config", None)
    return dict(getattr(compile_config, "config", None) or {})


def get_compilation_token(model: Model) -> object:
    """Returns an object that each `compile` of either Keras replaces.

    Without the name the result is None, and no new compilation is noticed.
    """
    return getattr(model, "_compile_config", None)


@contextlib.contextmanager
def skip_replica_loss_scaling() -> Iterator[None]:
    """Makes Loss objects and `compute_loss` of either Keras return the mean loss of a replica.

    Runs in graph, on a replica. On several replicas they divide the loss by the number of replicas.
    Functions of keras.losses do not. Keras has no public switch for that. Without the names they
    divide in this context, too.
    """
    for module_name in ("keras.src.losses.loss", "tf_keras.src.utils.losses_utils"):
        module = sys.modules.get(module_name)
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(module, name, _make_scaling_optional(function))

    token = _SKIP_REPLICA_LOSS_SCALING.set(True)
    try:
        yield
    finally:
        _SKIP_REPLICA_LOSS_SCALING.reset(token)


def _make_scaling_optional(
    function: Callable[[tf.Tensor], tf.Tensor],
) -> Callable[[tf.Tensor], tf.Tensor]:
    @functools.wraps(function)
    def divide(value: tf.Tensor) -> tf.Tensor:
        return value if _SKIP_REPLICA_LOSS_SCALING.get() else function(value)

    return divide


def set_batch_counter(model: Model, batches: int, *, training: bool) -> None:
    """Sets how many batches `fit` or `evaluate` of a tf_keras model has run.

    Does nothing for other models. The callback TensorBoard of tf_keras reads the counter of the
    model, which only the loops of tf_keras advance. Without the name its points of batches are all
    at step 0.
    """
    name = "_train_counter" if training else "_test_counter"
    counter = getattr(model, name, None)
    if isinstance(counter, tf.Variable):
        counter.assign(batches)

"""The names of Keras 3 and tf_keras that are not public and that trainer_kit still needs. No other module may use one.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

_LOG = logging.getLogger(__name__)
_SKIP_REPLICA_LOSS_SCALING = contextvars.ContextVar(
    "losses are undivided", default=False
)  # each replica has a thread
_SEED_GENERATOR_KEY, _NAME_COUNTS_KEY = "global_seed_generator", "object_name_uids"


def get_global_seed_generator() -> keras.random.SeedGenerator | None:
    """Returns the generator that serves keras.random functions without a seed; None if none was made yet.

    Keras does not expose it: `keras.utils.set_random_seed` only drops it. Without the name the
    answer is None.
    """
    try:
        from keras.src.backend.common import global_state

        return global_state.get_global_attribute(_SEED_GENERATOR_KEY)
    except (ImportError, AttributeError):
        return None


def set_global_seed_generator(generator: keras.random.SeedGenerator) -> None:
    """Makes keras.random functions without a seed draw from `generator`, in functions that are traced afterwards.

    `keras.utils.set_random_seed` would seed Python, NumPy and TensorFlow too, in the middle of
    their numbers. Without the name nothing is set, and a warning says so: the state of Keras' own
    generator is then in no checkpoint.
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
    """Has Keras 3 number the layers of each model of a process as those of the first one; runs eagerly, on the host.

    Patterns of a config are searched in the names of layers, and so hold for each run of a process.
    The public way is `keras.utils.clear_session`, which also resets the default graph that the
    scope of a strategy needs. After it the next model is the first one. Without the private name
    Keras goes on counting, and a pattern with a number matches the first model only.
    """

    _counts_before_first_model: Mapping[
        str, int
    ] = {}  # the number of names of each kind before the first model
    _counts_after_last_model: Mapping[str, int] | None = (
        None  # after the last model; another object is there after clear_session
    )

    @classmethod
    @contextlib.contextmanager
    def restart(cls) -> Iterator[None]:
        """Numbers the layers that are made inside as in the first such block; no later layer gets such a number."""
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
    new = collections.defaultdict(int, counts)
    try:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(_NAME_COUNTS_KEY, new)
    except (ImportError, AttributeError):
        _LOG.debug("Keras %s goes on to number layers", keras.version())
    return new


def get_learning_rate_or_schedule(optimizer: Any) -> Any:
    """Returns the variable or schedule of the learning rate of an optimizer of either Keras; None if it has no rate.

    The public property shows only the value of a schedule at the optimizer's own iterations.
    Without the name that value is returned, and the rate at another step is unknown; legacy
    optimizers of tf_keras show the schedule.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    return getattr(optimizer, "learning_rate", None) if rate is None else rate


def replace_learning_rate(optimizer: keras.Optimizer, rate: Any) -> bool:
    """Makes a schedule the rate of an optimizer; False, and nothing is done, where the name is gone.

    The public setter takes the variable of a constant rate out of the optimizer's variables, so out
    of checkpoints.
    """
    if getattr(optimizer, "_learning_rate", None) is None:
        return False
    optimizer._learning_rate = rate
    return True


def get_trained_variables(optimizer: keras.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built with, in order.

    No public attribute leads from a slot to its variable. Without the name there are none: in
    checkpoints, the slots of variables of other models than the run's then have names that depend
    on the layers that a process made before.
    """
    return list(getattr(optimizer, "_trainable_variables", ()))


def get_variable_index(optimizer: keras.Optimizer, variable: Any) -> int:
    """Returns the position of a variable among those that an optimizer was built with.

    Keras' guide for own optimizers calls this method in `update_step`, where `variable` is a
    replica's part of a variable and no public attribute tells which one it belongs to. Without the
    name a step ends with an AttributeError.
    """
    return int(optimizer._get_variable_index(variable))


def uses_weight_decay(optimizer: keras.Optimizer, variable: Any) -> bool:
    """Whether Keras applies the `weight_decay` of an optimizer to a variable, as `exclude_from_weight_decay` has set.

    Keras has a public way to exclude variables and none to read which are. Without the name the
    answer is True.
    """
    decays = getattr(optimizer, "_use_weight_decay", None)
    return True if decays is None else bool(decays(variable))


def get_data_adapter(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Any:
    """Returns the object with which `Model.fit` reads data of any kind: `get_tf_dataset()`, `num_batches`.

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

    return data_adapters.get_data_adapter(x, y, sample_weight, **options)


def is_array_adapter(adapter: Any) -> bool:
    """Whether `get_data_adapter` has been given arrays; see there."""
    from keras.src.trainers import data_adapters

    return isinstance(adapter, data_adapters.ArrayDataAdapter)


def train_validation_split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns nested arrays without their last part, and that part, as `validation_split` of `Model.fit` cuts them.

    Keras has the function for all kinds of arrays and exposes none of it. Without the name
    trainer_kit.compat.keras ends with an ImportError.
    """
    from keras.src.trainers.data_adapters import array_slicing

    train, validation = array_slicing.train_validation_split(
        arrays, validation_split=validation_split
    )
    return train, validation


def install_global_clipping(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer clip the sum of the gradients of all replicas; a second call changes nothing. In scope.

    Keras 3 clips the gradients of each replica and adds them up afterwards, so that the update
    depends on the number of replicas. The two steps are one public method. Without the name Keras's
    order stays, and a warning says so.
    """
    name = "_clip_gradients"
    clip, replicas = (
        getattr(optimizer, name, None),
        tf.distribute.get_strategy().num_replicas_in_sync,
    )
    clips = any(
        getattr(optimizer, bound, None) for bound in ("clipnorm", "global_clipnorm", "clipvalue")
    )
    if name in vars(optimizer) or not clips or replicas == 1:
        return
    if clip is None:
        _LOG.warning(
            "Keras %s clips the gradients of each replica by itself, before they are summed",
            keras.version(),
        )
        return

    def clip_sum(gradients: Sequence[Any]) -> list[Any]:
        context = tf.distribute.get_replica_context()
        if context is None:
            return list(clip(gradients))
        summed = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [tf.convert_to_tensor(one) for one in gradients]
        )
        return [one / replicas for one in clip(summed)]  # Keras adds them up once more

    setattr(optimizer, name, clip_sum)


def should_trace_batches(tensorboard: Any) -> bool:
    """Whether a TensorBoard callback profiles batches, which it then has to be told of.

    Its argument `profile_batch` is kept under private names only. Without them the answer is False,
    and nothing is traced; `trainer_kit.train --profile` does the same.
    """
    return bool(getattr(tensorboard, "_should_trace", False))


def set_monitor_op(callback: Any) -> None:
    """Makes a callback of Keras 3 that monitors a log choose whether lower or higher values are better.

    Keras does so at the end of the first epoch of a process, so that a callback of a process that
    resumes could not compare within its first epoch. Without the name the first end of an epoch
    does it.
    """
    choose = getattr(callback, "_set_monitor_op", None)
    if choose is not None and getattr(callback, "monitor_op", choose) is None:
        choose()


def is_keras_2_model(model: Any) -> bool:
    """Whether a model is one of tf_keras, which need not be installed."""
    keras_2 = sys.modules.get("tf_keras")
    return keras_2 is not None and isinstance(model, keras_2.Model)


def get_compile_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments that a model of either Keras was compiled with, as they were given; empty if unknown.

    `get_compile_config` returns them serialized, which loses functions that are not registered.
    """
    return dict(getattr(getattr(model, "_compile_config", None), "config", None) or {})


def get_compilation_token(model: Any) -> Any:
    """Returns an object that each `compile` of either Keras makes anew; without the name None: no change is seen."""
    return getattr(model, "_compile_config", None)


@contextlib.contextmanager
def skip_replica_loss_scaling() -> Iterator[None]:
    """Has Loss objects and `compute_loss` of either Keras return the mean loss of a replica; runs in graph, on one.

    On several replicas they divide it by the number of replicas; functions of keras.losses do not.
    Keras has no public switch for that. Without the names they divide in this context, too.
    """
    for place in ("keras.src.losses.loss", "tf_keras.src.utils.losses_utils"):
        module = sys.modules.get(place)
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(module, name, _make_scaling_optional(function))
    token = _SKIP_REPLICA_LOSS_SCALING.set(True)
    try:
        yield
    finally:
        _SKIP_REPLICA_LOSS_SCALING.reset(token)


def _make_scaling_optional(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def divide(value: Any) -> Any:
        return value if _SKIP_REPLICA_LOSS_SCALING.get() else function(value)

    return divide


def set_batch_counter(model: Any, batches: int, *, training: bool) -> None:
    """Tells a model of tf_keras how many batches `fit` or `evaluate` has run; does nothing for other models.

    Its callback TensorBoard reads the counter of the model, which only the loops of tf_keras
    advance. Without the name its points of batches are all at step 0.
    """
    counter = getattr(model, "_train_counter" if training else "_test_counter", None)
    if isinstance(counter, tf.Variable):
        counter.assign(batches)

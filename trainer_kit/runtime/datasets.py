"""tf.data datasets over the replicas of a strategy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig


def distribute_dataset(
    strategy: tf.distribute.Strategy | None,
    dataset_or_fn: tf.data.Dataset | Callable[..., tf.data.Dataset],
    *args: Any,
    input_options: tf.distribute.InputOptions | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a dataset whose elements are what `strategy.run` takes; runs eagerly, on the host.

    One device, by the default strategy or as the one CPU, gets the plain tf.data.Dataset: it costs
    nothing, and its iterator can be saved. With parameter servers, each worker creates its dataset
    in a graph.

    Args:
      strategy: The strategy. None means the current one.
      dataset_or_fn: A dataset in global batches, which are split among the replicas. Or a function
        that returns a dataset in batches for one replica, which is called once for each worker. If
        the function has an argument `input_context`, it gets the tf.distribute.InputContext of its
        worker, with `get_per_replica_batch_size`.
      *args: Arguments of the function.
      input_options: How the strategy fetches the elements.
      **kwargs: Keyword arguments of the function.

    Raises:
      TypeError: when `dataset_or_fn` is neither, or the function returns something else.
    """
    strategy = strategy or tf.distribute.get_strategy()

    has_parameter_servers = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
    if has_parameter_servers and tf.executing_eagerly():
        # A strategy has one coordinator, which is the same at each call.
        coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
        make_on_worker = functools.partial(
            distribute_dataset,
            strategy,
            dataset_or_fn,
            *args,
            input_options=input_options,
            **kwargs,
        )
        return coordinator.create_per_worker_dataset(tf.function(make_on_worker))

    if isinstance(dataset_or_fn, tf.data.Dataset):
        if _is_one_cpu(strategy):
            return dataset_or_fn
        return strategy.experimental_distribute_dataset(dataset_or_fn, input_options)

    if not callable(dataset_or_fn):
        raise TypeError(
            f"a {type(dataset_or_fn).__name__} cannot be distributed;"
            " give a tf.data.Dataset or a function that returns one"
        )
    takes_context = "input_context" in inspect.signature(dataset_or_fn).parameters

    def make(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        context = {"input_context": input_context} if takes_context else {}
        dataset = dataset_or_fn(*args, **{**kwargs, **context})
        if not isinstance(dataset, tf.data.Dataset):
            name = getattr(dataset_or_fn, "__qualname__", repr(dataset_or_fn))
            raise TypeError(
                f"{name} returned a {type(dataset).__name__}; it has to return a tf.data.Dataset"
            )
        return dataset

    if _is_one_cpu(strategy):
        single_context = tf.distribute.InputContext(
            num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1
        )
        return make(single_context)
    return strategy.distribute_datasets_from_function(make, input_options)


def drop_partial_steps(
    dataset: tf.data.Dataset, input_context: tf.distribute.InputContext | None
) -> tf.data.Dataset:
    """Returns a dataset of full batches in which every replica gets a batch in each step.

    The last batches are left out if they are too few for all replicas. A dataset whose batches are
    all of one size has left out its remainder (drop_remainder), and a batch of the config is one
    for all replicas. (A replica without data gets an empty batch, of which convolutions by oneDNN,
    on a CPU, make something of the wrong shape.) A dataset with a last batch that may be smaller is
    returned as it is: every example counts.

    Args:
      dataset: The data of one worker, in batches for one replica.
      input_context: The worker's context. None for a single replica.
    """
    replicas = 1
    if input_context:
        replicas = input_context.num_replicas_in_sync // input_context.num_input_pipelines

    specs = tf.nest.flatten(dataset.element_spec)
    has_full_batches = all(
        isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] for spec in specs
    )
    if replicas == 1 or not has_full_batches:
        return dataset

    is_tuple = isinstance(dataset.element_spec, tuple)
    windows = dataset.window(replicas, drop_remainder=True)
    cardinality = dataset.cardinality()
    whole = windows.flat_map(lambda *parts: tf.data.Dataset.zip(parts if is_tuple else parts[0]))
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return whole

    # The flat_map has lost the number of batches.
    if cardinality != tf.data.INFINITE_CARDINALITY:
        cardinality = cardinality // replicas * replicas
    return whole.apply(tf.data.experimental.assert_cardinality(cardinality))


def with_private_threadpool(dataset: tf.data.Dataset, runtime: RuntimeConfig) -> tf.data.Dataset:
    """Returns `dataset` with a private pool of runtime.dataset_num_private_threads threads.

    Without that setting the dataset is returned unchanged.
    """
    if runtime.dataset_num_private_threads is None:
        return dataset
    options = tf.data.Options()
    options.threading.private_threadpool_size = runtime.dataset_num_private_threads
    return dataset.with_options(options)


def has_plain_iterator(strategy: tf.distribute.Strategy) -> bool:
    """Whether iterators under `strategy` are those of tf.data itself, whose state can be saved."""
    return not tf.distribute.has_strategy() or _is_one_cpu(strategy)


def _is_one_cpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy uses one CPU, so that a dataset needs no distribution.

    The default strategy reads a plain dataset directly.
    """
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return False
    return "CPU" in strategy.extended.worker_devices[0]

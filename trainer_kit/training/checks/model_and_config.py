"""Checks a trainer's config, model, strategy, training step, and the methods of its task."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import TrainerKitError, UsageError
from trainer_kit.inputs.op_definitions import find_op_definition
from trainer_kit.inputs.stateful_ops import find_unsaved_state, iterate_nodes
from trainer_kit.runtime.determinism import is_op_determinism_enabled
from trainer_kit.training.task import Task
from trainer_kit.typing import ExperimentLike, Model, TaskLike

_LOG = logging.getLogger(__name__)


def check_sections(
    config: ExperimentLike, needs_train_data: bool, needs_validation_data: bool
) -> None:
    """Checks that the config has the sections that a trainer needs.

    Args:
      config: The config of the experiment.
      needs_train_data: Whether the section task.train_data is needed.
      needs_validation_data: Whether the section task.validation_data is needed.

    Raises:
      AttributeError: when `config` lacks trainer, task, runtime, or a needed section of data.
    """
    for name in ("trainer", "task", "runtime"):
        if not hasattr(config, name):
            raise AttributeError(f"the trainer needs a config with a section {name!r}")

    needs = {"train_data": needs_train_data, "validation_data": needs_validation_data}
    for name, is_needed in needs.items():
        if is_needed and not hasattr(config.task, name):
            raise AttributeError(
                f"the trainer needs a config with a section 'task.{name}', or a ready-made dataset"
            )


def check_model(model: Model, runtime: RuntimeConfig, strategy: tf.distribute.Strategy) -> None:
    """Checks that the model is built, and that the devices support the options in `runtime`.

    Runs eagerly, on the host.

    Raises:
      UsageError: when one of the two is not so.
    """
    if not getattr(model, "variables", None) and not getattr(model, "built", False):
        raise UsageError(
            f"the model {type(model).__name__} has no variables yet; build it in build_model, "
            "for instance by calling it once on a batch of zeros"
        )

    replicas = strategy.num_replicas_in_sync
    if runtime.enable_xla and replicas > 1:
        raise UsageError(
            f"runtime.enable_xla needs one replica, and there are {replicas}: "
            "XLA cannot update mirrored variables; "
            "set enable_xla=false or distribution_strategy=one_device"
        )

    if getattr(runtime, "executor", "default") == "single_threaded":
        problem = find_single_thread_problem(strategy)
        if problem:
            raise UsageError(f"runtime.executor=single_threaded: {problem}; set executor=default")


def find_single_thread_problem(strategy: tf.distribute.Strategy) -> str:
    """Returns why runtime.executor=single_threaded cannot be used. "" if it can.

    That executor does not move tensors between devices.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        return f"this executor works on one device only, and there are {replicas} replicas"

    gpus = tf.config.list_logical_devices("GPU")
    tpus = tf.config.list_logical_devices("TPU")
    accelerators = [*gpus, *tpus]
    if accelerators:
        return (
            "this executor works on one CPU only, "
            f"and TensorFlow also sees the device {accelerators[0].name}"
        )
    return ""


def warn_about_dropped_assertions(graph: tf.Graph) -> None:
    """Warns when the graph of a fused loop has assertions, which XLA leaves out."""
    if any(node.op == "Assert" for node in iterate_nodes(graph.as_graph_def())):
        _LOG.warning(
            "the training step has assertions, such as tf.debugging.assert_less, "
            "and XLA leaves them out: "
            "with trainer.fuse_steps above 1 a failed assertion does not stop the run"
        )


def warn_about_slow_convolutions(graph: tf.Graph) -> None:
    """Warns when the graph of a fused loop has convolutions and runs on CPUs.

    Those of XLA are slow there.
    """
    if tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("TPU"):
        return

    convolutions = ("Conv2D", "Conv3D", "DepthwiseConv2d")
    nodes = iterate_nodes(graph.as_graph_def())
    if any(node.op.startswith(convolutions) for node in nodes):
        _LOG.warning(
            "the training step has convolutions, "
            "and on a CPU those of XLA can take ten times as long as those of TensorFlow: "
            "set trainer.fuse_steps to 1, or measure both"
        )


def check_deterministic_kernels(strategy: tf.distribute.Strategy, required: bool) -> None:
    """Logs that a run on a GPU without op determinism has other bits each time.

    Args:
      strategy: The strategy of the run.
      required: Whether to raise an error instead.

    Raises:
      UsageError: when the strategy has a GPU without op determinism, and `required` is set.
    """
    # The default strategy has no devices of its own, so all devices count.
    try:
        devices = list(strategy.extended.worker_devices)
    except RuntimeError:
        devices = [device.name for device in tf.config.list_logical_devices()]

    if is_op_determinism_enabled() or not any("GPU" in name for name in devices):
        return
    text = (
        "on a GPU TensorFlow adds numbers in an order that differs from run to run, "
        "so a resumed run may differ from one that was never stopped; "
        "set runtime.deterministic_ops=true to prevent that"
    )
    if required:
        raise UsageError(
            f"trainer.require_exact_resume: {text}. Or set trainer.require_exact_resume=false"
        )
    _LOG.info(text)


def check_exact_resume(graph: tf.Graph, required: bool) -> None:
    """Warns of ops in a training loop whose state no checkpoint contains.

    A resumed run may then differ.

    Args:
      graph: The graph of the loop.
      required: Whether to raise an error instead of a warning.

    Raises:
      UsageError: when the loop has such ops and `required` is set.
    """
    ops = set()
    for node in iterate_nodes(graph.as_graph_def()):
        # A recurrent cuDNN layer without dropout draws nothing. tf_keras adds one for GPUs.
        is_recurrent = node.op.startswith("CudnnRNN") and "dropout" in node.attr
        if is_recurrent and node.attr["dropout"].f == 0:
            continue
        ops.add(node.op)

    unsaved = []
    for op in sorted(ops):
        definition = find_op_definition(op)
        if find_unsaved_state(op, definition):
            unsaved.append(op)
    if not unsaved:
        return
    text = (
        f"the training step uses {', '.join(unsaved)}, whose state is not in a checkpoint: "
        "a resumed run may differ from one that was never stopped; "
        "draw random numbers from a keras.random.SeedGenerator or a tf.random.Generator "
        "that the model holds, and compute in TensorFlow"
    )
    if required:
        raise UsageError(
            f"trainer.require_exact_resume: {text}. Or set trainer.require_exact_resume=false"
        )
    _LOG.warning("%s", text)


def check_methods(task: TaskLike, train: bool, evaluate: bool) -> None:
    """Checks the methods of a Task that a run will call. Tasks of other classes are not checked.

    Only the signatures are compared, and no method is called.

    Args:
      task: The task.
      train: Whether the run trains it.
      evaluate: Whether the run evaluates it.

    Raises:
      TrainerKitError: when a method does not accept the arguments that it is called with. The
        message names file and line.
    """
    if not isinstance(task, Task):
        return
    for name, count, keywords in _calls(task, train, evaluate):
        method = getattr(task, name)
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            # Some callables do not show their signature.
            continue

        # The values do not matter, so the signature is bound to numbers and None.
        try:
            signature.bind(*range(count), **dict.fromkeys(keywords))
        except TypeError as problem:
            # The arguments of the call, in words.
            arguments = []
            if count:
                arguments.append(f"{count} positional argument{'s' if count > 1 else ''}")
            if keywords:
                arguments.append(", ".join(f"{keyword}=" for keyword in keywords))

            parameters = _format_parameters(signature)
            expected = _format_parameters(inspect.signature(getattr(Task, name)))
            code = getattr(inspect.unwrap(method), "__code__", None)
            place = "the task"
            if code is not None:
                place = f"{code.co_filename}:{code.co_firstlineno}"
            raise TrainerKitError(
                f"{place}: {type(task).__name__}.{name}{parameters} "
                f"is called with {' and '.join(arguments)}: {problem}; "
                f"declare it as {name}{expected}"
            ) from None


def _calls(task: Task, train: bool, evaluate: bool) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yields each call that a run makes.

    A call is the method's name, the number of positional arguments, and the keyword names.
    """
    default_training = train and type(task).train_step is Task.train_step
    default_validation = evaluate and type(task).validation_step is Task.validation_step

    yield "build_metrics", 0, ("training",)
    if train:
        yield "train_step", 1, ("model", "optimizer", "metrics")
    if evaluate:
        yield "validation_step", 1, ("model", "metrics")

    # The default steps call these methods.
    if default_training or default_validation:
        yield "build_losses", 0, ("labels", "model_outputs", "aux_losses")
        yield "process_metrics", 3, ()
    if default_validation:
        yield "inference_step", 2, ()


def _format_parameters(signature: inspect.Signature) -> str:
    """Returns the parameters as text, without types."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return f"({', '.join(map(str, parameters))})"

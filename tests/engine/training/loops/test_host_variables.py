"""What loops compute on the host."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests.engine.training.loops.counting_step import Counter, batches
from trainer_kit.inputs.fused_batches import stack_batches
from trainer_kit.training.loops.eval_loop import EvalLoop
from trainer_kit.training.loops.fused_loop import BatchStack, FusedLoop
from trainer_kit.training.loops.iterators import StopFlag
from trainer_kit.training.loops.train_loop import TrainLoop


def _fuse_loop(counter: Counter, stop: tf.Variable) -> FusedLoop:
    return FusedLoop(counter, stop, BatchStack(), 4)


@pytest.mark.parametrize("kind", [TrainLoop, _fuse_loop, EvalLoop])
def test_no_loop_waits_for_a_gpu_to_learn_whether_it_goes_on(kind: Any) -> None:
    counter = Counter()
    loop = kind(counter, counter.stop)
    loop(iter(stack_batches(batches(), 4) if kind is _fuse_loop else batches()), tf.constant(2))
    graph = loop.newest_graph.as_graph_def()
    conditions = {node.attr["cond"].func.name for node in graph.node if node.op == "While"}
    (condition,) = [
        function for function in graph.library.function if function.signature.name in conditions
    ]
    decided = [node for node in condition.node_def if node.op.startswith("Logical")]

    assert decided
    assert all(node.device.endswith("CPU:0") for node in decided)


@pytest.mark.parametrize("devices", [["CPU:1"], ["CPU:1", "CPU:2"]])
def test_a_strategy_does_not_take_the_stop_flag_to_its_devices(devices: list[str]) -> None:
    is_single = len(devices) == 1
    strategy = (
        tf.distribute.OneDeviceStrategy(devices[0])
        if is_single
        else tf.distribute.MirroredStrategy(devices)
    )

    with strategy.scope():
        flag = StopFlag(strategy)

    assert [variable.device.rpartition("device:")[2] for variable in flag.variables] == [
        "CPU:0",
        "CPU:0",
    ]

    flag.request()

    assert flag.is_requested
    assert flag.variable.numpy()

"""All callbacks of Tensorpack in one training, and what they write."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from trainer_kit.compat.tensorpack.tfutils.summary import add_moving_summary, add_param_summary

from trainer_kit.compat.tensorpack import (
    BatchData,
    BinaryClassificationStats,
    Callback,
    CallbackFactory,
    ClassificationError,
    DataFromList,
    DumpTensors,
    EnableCallbackIf,
    EstimatedTimeLeft,
    FullyConnected,
    HostMemoryTracker,
    HumanHyperParamSetter,
    HyperParamSetterWithFunc,
    InferenceRunner,
    JSONWriter,
    MaxSaver,
    MergeAllSummaries,
    MinSaver,
    ModelDesc,
    ModelSaver,
    MovingAverageSummary,
    ObjAttrParam,
    PeriodicCallback,
    PeriodicTrigger,
    ProcessTensors,
    ProgressBar,
    RunOp,
    RunUpdateOps,
    ScalarPrinter,
    ScalarStats,
    ScheduledHyperParamSetter,
    SessionRunTimeout,
    SimpleTrainer,
    StatMonitorParamSetter,
    TensorPrinter,
    TFEventWriter,
    ThroughputTracker,
    TrainConfig,
    launch_train_with_config,
    logger,
    tfv1,
)

tf = tfv1


class Classifier(ModelDesc):
    """A linear net with summaries."""

    def inputs(self) -> list[tf.TensorSpec]:
        """Returns the inputs."""
        return [
            tf.TensorSpec((None, 4), tf.float32, "features"),
            tf.TensorSpec((None,), tf.int32, "label"),
        ]

    def build_graph(self, features: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        """Returns the cost."""
        logits = FullyConnected("fc", features, 2)
        costs = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=label)
        cost = tf.reduce_mean(costs, name="cost")
        tf.to_float(tf.logical_not(tf.nn.in_top_k(logits, label, 1)), name="wrong")
        tf.argmax(logits, 1, name="prediction")
        tf.cast(label, tf.int64, name="truth")
        add_moving_summary(cost)
        add_param_summary((".*/W", ["histogram", "rms"]))
        tf.summary.image("image", tf.reshape(features, [-1, 2, 2, 1]), max_outputs=1)
        tf.summary.scalar("doubled", cost * 2)
        return cost

    def optimizer(self) -> tf.train.Optimizer:
        """Returns the optimizer, whose rate is a variable."""
        rate = tf.get_variable("rate", initializer=0.1, trainable=False)
        return tf.train.GradientDescentOptimizer(rate)


class Reporter(Callback):
    """Uses the monitors, the predictor and the session as programs do."""

    def __init__(self) -> None:
        self.costs: list[float] = []

    def _setup_graph(self) -> None:
        self.predict = self.trainer.get_predictor(["features"], ["fc/output"])

    def _before_run(self, context: Any) -> Any:
        return ["cost:0"]

    def _after_run(self, context: Any, values: Any) -> None:
        self.costs.append(float(values.results[0]))

    def _trigger(self) -> None:
        monitors = self.trainer.monitors
        monitors.put_scalar("epoch", self.epoch_num)
        monitors.put_image("zeros", np.zeros((2, 4, 4, 3), np.uint8))
        assert monitors.get_latest("epoch") == self.epoch_num
        assert len(monitors.get_history("epoch")) == self.epoch_num
        assert self.predict(np.ones((3, 4)))[0].shape == (3, 2)


class Holder:
    """Has an attribute that a schedule sets."""

    temperature = 1.0


def count_calls() -> tf.Operation:
    counter = tf.get_variable("calls", [], initializer=tf.zeros_initializer(), trainable=False)
    return tf.assign_add(counter, 1).op


def read_steps(folder: Path) -> dict[str, list[int]]:
    """Returns the steps of each name in the event files."""
    steps = defaultdict(list)
    for path in folder.glob("events*"):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                steps[value.tag].append(event.step)
    return dict(steps)


def test_callbacks_run_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    logger.set_logger_dir(str(folder), action="k")
    (folder / "hyper.txt").write_text("rate:0.05\n")
    random = np.random.RandomState(0)
    points = [[random.rand(4).astype(np.float32), np.int32(index % 2)] for index in range(8)]
    data = BatchData(DataFromList(points, shuffle=False), 2)
    holder, reporter = Holder(), Reporter()
    calls: list[Any] = []
    inferencers = [
        ScalarStats("cost"),
        ScalarStats(["cost"], prefix="second"),
        ClassificationError("wrong"),
        BinaryClassificationStats("prediction", "truth"),
    ]
    callbacks = [
        ModelSaver(max_to_keep=3),
        InferenceRunner(data, inferencers),
        MinSaver("validation_cost"),
        MaxSaver("validation_error", filename="worst"),
        ScheduledHyperParamSetter(ObjAttrParam(holder, "temperature"), [(1, 2.0), (2, 3.0)]),
        ScheduledHyperParamSetter("rate", [(0, 0.1), (100, 0.0)], interp="linear", step_based=True),
        HyperParamSetterWithFunc("rate", lambda epoch, rate: rate * 0.9),
        StatMonitorParamSetter("rate", "validation_cost", lambda rate: rate / 2, 0, 2),
        HumanHyperParamSetter("rate"),
        PeriodicTrigger(CallbackFactory(trigger=lambda _: calls.append("steps")), every_k_steps=5),
        PeriodicCallback(
            CallbackFactory(trigger=lambda _: calls.append("epochs")), every_k_epochs=2
        ),
        EnableCallbackIf(
            CallbackFactory(trigger=lambda _: calls.append("enabled")),
            lambda self: self.epoch_num == 3,
        ),
        RunOp(count_calls, run_before=True, run_as_trigger=True, run_step=True),
        ProcessTensors(["cost:0"], lambda cost: calls.append(float(cost))),
        DumpTensors(["cost:0"]),
        TensorPrinter(["cost"]),
        EstimatedTimeLeft(),
        SessionRunTimeout(60_000),
        ThroughputTracker(samples_per_step=2),
        HostMemoryTracker(),
        reporter,
    ]
    extra_callbacks = [
        MovingAverageSummary(),
        ProgressBar(["cost"]),
        MergeAllSummaries(period=2),
        RunUpdateOps(),
    ]
    config = TrainConfig(
        model=Classifier(),
        dataflow=data,
        callbacks=callbacks,
        extra_callbacks=extra_callbacks,
        monitors=[TFEventWriter(), JSONWriter(), ScalarPrinter(enable_step=True)],
        steps_per_epoch=4,
        max_epoch=3,
    )

    launch_train_with_config(config, SimpleTrainer())

    # What was called.
    assert holder.temperature == 3
    costs = [item for item in calls if isinstance(item, float)]
    assert costs == reporter.costs
    assert len(costs) == 12
    names = [item for item in calls if isinstance(item, str)]
    # A PeriodicCallback also runs after the last step.
    assert sorted(names) == ["enabled", "epochs", "epochs", "steps", "steps"]
    with np.load(folder / "DumpTensor-12.npz") as dumped:
        assert float(dumped["cost:0"]) == costs[-1]

    # The statistics that people's scripts read.
    statistics = json.loads((folder / "stats.json").read_text())
    assert [record["global_step"] for record in statistics] == [2, 4, 6, 8, 10, 12]
    last = statistics[-1]
    assert last["epoch"] == last["epoch_num"] == 3
    assert last["second_cost"] == last["validation_cost"]
    assert 0 <= last["val_precision"] <= 1
    assert {"doubled", "fc/W-rms", "Throughput (samples/sec)", "HostFreeMemory (GB)"} <= {
        name.removeprefix("param-summary/") for name in last
    }

    # Event files and checkpoints.
    steps = read_steps(folder)
    assert steps["image/image"] == steps["cost"] == [2, 4, 6, 8, 10, 12]
    assert steps["zeros/0"] == steps["validation_cost"] == [4, 8, 12]
    reader = tf.train.NewCheckpointReader(str(folder / "min-validation_cost"))
    assert reader.has_tensor("fc/W")
    assert (folder / "worst.index").exists()
    newest = tf.train.latest_checkpoint(str(folder))
    assert newest == str(folder / "ckpt-12")

"""What a training step changes beside weights and optimizer is the same after a resume, or is
named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import assert_all_close
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.fork_server import ForkServer
from tests.process.checkpoints.stateful_tasks import (
    FORMS,
    STEPS,
    HostWrites,
    KerasTwoUnbuilt,
    ModuleOfTask,
    Table,
    TwoModels,
    train_all,
)
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.step_state import StepState
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.state.traced_writes import find_written_handles
from trainer_kit.errors import UsageError
from trainer_kit.testing.tiny_task import FEATURES
from trainer_kit.training.trainer import Trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of runs that were not stopped, and of copies that another process resumed in the
    middle, by form.
    """
    base = tmp_path_factory.mktemp("trained")
    with ForkServer(["tests.process.checkpoints.stateful_tasks"]) as server:
        for which, from_step in (("straight", None), ("stopped", STEPS // 2)):
            if from_step:
                for form in FORMS:
                    shutil.copytree(base / f"{form} straight", base / f"{form} stopped")
            end = server.run(train_all, str(base), which, from_step)
            assert end.code == 0, end.text[-1500:]
            assert "no checkpoint contains" not in end.text
            assert "keeps its current value" not in end.text
            first_halves = end.text.count(f"train | step {STEPS // 2}/")
            assert first_halves == (len(FORMS) if from_step is None else 0)
        yield base


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(runs: Path, form: str) -> None:
    straight = json.loads((runs / f"{form} straight" / "ends.json").read_text())
    stopped = json.loads((runs / f"{form} stopped" / "ends.json").read_text())
    assert stopped == straight


def test_saved_step_state_has_the_path_of_attributes_or_a_number(runs: Path) -> None:
    keys = {
        form: CheckpointGraph(f"{runs}/{form} stopped/ckpt-{STEPS}").get_section_keys("step_state")
        for form in FORMS
    }

    compiled = keys["compiled"]
    attributes = {name.split("/")[1] for name in compiled if name.startswith("task/")}
    # The optimizer's path to the critic is the shortest.
    assert attributes == {"critic_optimizer", "fixed_critic"}
    numbered = {name for name in compiled if name.startswith("written/")}
    assert numbered == {"written/0 float32 []", "written/1 float32 []"}

    replicated = keys["two replicas"]
    attributes = {name.split("/")[1] for name in replicated if name.startswith("task/")}
    assert attributes == {"target", "evaluated", "teacher", "fixed", "fixed_critic"}
    numbered = {name for name in replicated if name.startswith("written/")}
    assert len(numbered) == len(replicated) - 2 * len(attributes)
    assert "written/0 float32 [8, 1]" in numbered

    assert keys["compiled, Keras 2"] == {}  # other sections contain all of it
    # Nothing of the trainer's own is among the attributes.
    assert not any(name.startswith("written/") for name in keys["eager"])


def test_a_sidecar_evaluates_with_the_tasks_second_model(runs: Path) -> None:
    folder = runs / "compiled straight"
    _, logs = json.loads((folder / "ends.json").read_text())
    config = linear_experiment()
    task_type = FORMS["compiled"][0]

    for path in (f"{folder}/ckpt-{STEPS}", f"{folder}/best_ckpt/ckpt-{STEPS}"):
        keras.utils.set_random_seed(5)
        trainer = Trainer.create(config, task_type(config.task), train=False, evaluate=True)
        trainer.state.restore_weights(path)
        evaluation_logs = trainer.evaluate(tf.constant(-1))
        assert float(evaluation_logs["validation_loss"]) == logs["validation_loss"]


def _create_trainer(kind: Any, **options: Any) -> Trainer:
    config = linear_experiment(**options)
    return Trainer.create(config, kind(config.task), train=True, evaluate=True)


def test_a_table_that_the_step_changes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _create_trainer(Table)
    for _ in range(2):
        trainer.train(tf.constant(1))
    (text,) = caplog.messages
    assert text.startswith("the training step changes a hash table, which no checkpoint contains")

    trainer = _create_trainer(Table, require_exact_resume=True)
    message = "require_exact_resume: the training step changes a hash table"
    with pytest.raises(UsageError, match=message):
        trainer.train(tf.constant(1))
    assert int(trainer.global_step) == 0


def test_a_checkpoint_without_what_the_step_changes_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Written before the step is known.
    path = _create_trainer(ModuleOfTask).checkpoint.write(str(tmp_path / "ckpt-3"))

    trainer = _create_trainer(ModuleOfTask)
    trainer.after_restore(path)
    for _ in range(2):
        trainer.train(tf.constant(1))
    (text,) = caplog.messages
    assert text == f"{path} does not contain written/0 float32 [], which keeps its current value"

    trainer = _create_trainer(ModuleOfTask, require_exact_resume=True)
    trainer.after_restore(path)
    with pytest.raises(UsageError, match=r"require_exact_resume: .* does not contain written/0"):
        trainer.train(tf.constant(1))


def test_state_that_this_run_does_not_have_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _create_trainer(ModuleOfTask)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))

    trainer = _create_trainer(LinearTask)
    trainer.after_restore(path)
    message = r"ckpt-1 contains written/0 float32 .* does not have .* --from_step=0, or"
    with pytest.raises(UsageError, match=message):
        trainer.train(tf.constant(1))
    assert int(trainer.global_step) == 0

    trainer = _create_trainer(LinearTask)
    trainer.state.allow_partial_restore()
    trainer.after_restore(path)
    trainer.train(tf.constant(1))
    assert "ckpt-1 contains written/0 float32 []" in caplog.text


def test_earlier_names_of_attributes_are_read_and_others_refused(tmp_path: Path) -> None:
    section = tf.Module()
    kernel = tf.Variable(tf.fill([FEATURES, 1], 3.0))
    setattr(section, "task/critic_optimizer/_trainable_variables/0", kernel)
    setattr(section, "task/fixed_critic/_layers/1/bias", tf.Variable([4.0]))
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-1"))

    trainer = _create_trainer(TwoModels)
    trainer.after_restore(path)
    assert trainer.task.critic.layers[0].kernel.value.numpy().tolist() == [[3.0]] * FEATURES
    assert trainer.task.fixed_critic.layers[0].bias.value.numpy().tolist() == [4.0]
    trainer.train(tf.constant(1))

    setattr(section, "task/train_step/counts/0", tf.Variable(1.0))  # of a closure
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-2"))
    trainer = _create_trainer(TwoModels)
    trainer.after_restore(path)
    message = r"contains task/train_step/counts/0, which this run does not have"
    with pytest.raises(UsageError, match=message):
        trainer.train(tf.constant(1))


def test_an_evaluation_names_what_it_cannot_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _create_trainer(ModuleOfTask)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))

    evaluator = Trainer.create(
        trainer.config, ModuleOfTask(trainer.config.task), train=False, evaluate=True
    )
    evaluator.state.restore_weights(path)

    (text,) = caplog.messages
    assert "contains written/0 float32 [], which this evaluation does not restore" in text


class _OtherSecond(KerasTwoUnbuilt):
    def make_second(self) -> Any:
        return tf_keras.optimizers.SGD(0.05)


def test_slots_that_no_step_makes_are_refused_before_it(tmp_path: Path) -> None:
    trainer = _create_trainer(KerasTwoUnbuilt)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))
    trainer.model.other = tf.Variable(1.0)
    path_of_other = trainer.checkpoint.save(str(tmp_path / "other"))

    # What is no slot is refused at once.
    other = _create_trainer(_OtherSecond)
    with pytest.raises(UsageError, match="does not fit this run"):
        restore(other.checkpoint, path_of_other, strict=True)

    other = _create_trainer(_OtherSecond)
    restore(other.checkpoint, path, strict=True)
    other.after_restore(path)
    before = [variable.numpy().tolist() for variable in other.model.variables]
    message = r"does not fit this run.*\n  model/second/_variables\n    2 +not in this run"
    with pytest.raises(UsageError, match=message):
        other.train(tf.constant(1))
    assert before == [variable.numpy().tolist() for variable in other.model.variables]


class _OwnLoop(Trainer):
    def create_train_loop_fn(self) -> Any:
        return lambda iterator, steps: None


def test_a_trainer_with_its_own_loop_saves_attributes(tmp_path: Path) -> None:
    config = linear_experiment()
    trainer, resumed = (
        _OwnLoop.create(config, TwoModels(config.task), True, True) for _ in range(2)
    )
    trainer.after_restore(None)
    trainer.task.critic.layers[0].bias.assign([4.0])
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))

    resumed.after_restore(path)

    assert resumed.task.critic.layers[0].bias.value.numpy().tolist() == [4.0]


class _OwnTrain(Trainer):
    def train(self, num_steps: Any) -> Any:
        model = self.task.learned
        features = tf.ones([2, FEATURES])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                self.task.target(features) * model(features) * self.task.fixed(features)
            )
        self.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )
        if getattr(self.task, "late_counter", None) is None:
            self.task.late_counter = tf.Variable(0.0)
        self.task.late_counter.assign_add(1.0)
        self.task.after_loop({})
        self.global_step.assign_add(1)
        return {}


def test_a_trainer_with_its_own_train_saves_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = linear_experiment()
    trainer, resumed = (
        _OwnTrain.create(config, HostWrites(config.task), True, True) for _ in range(2)
    )
    trainer.initialize()
    trainer.train(tf.constant(1))
    trainer.before_save(str(tmp_path / "ckpt-1"))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
    names = {name.split("/")[1] for name in CheckpointGraph(path).get_section_keys("step_state")}
    assert names == {"target", "evaluated", "teacher", "fixed", "late_counter"}

    resumed.after_restore(path)
    assert_all_close(
        [variable.numpy() for variable in resumed.task.target.variables],
        [variable.numpy() for variable in trainer.task.target.variables],
    )
    assert not caplog.records

    resumed.train(tf.constant(1))
    resumed.before_save(str(tmp_path / "ckpt-2"))
    missing, created = caplog.messages
    assert "ckpt-1 contains task/late_counter, which this run does not have yet" in missing
    restored = "and has the value of the checkpoint from now on"
    assert f"task/late_counter was created after the restore, {restored}" in created


@pytest.mark.parametrize("kind", [_OwnLoop, _OwnTrain])
def test_a_trainer_that_only_evaluates_keeps_no_attributes(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    config = linear_experiment()
    trainer = kind.create(config, TwoModels(config.task), False, True)
    trainer.initialize()
    trainer.write_weights(str(tmp_path / "weights"))

    assert not trainer.state.is_step_tracked
    assert not trainer.state.step_state.variables


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_each_replica_gets_its_own_value_back(tmp_path: Path, aggregation: str) -> None:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
    )
    config = linear_experiment()
    trainers = []
    with strategy.scope():
        for _ in range(2):
            task = _ReplicaValues(config.task)
            task.aggregation = tf.VariableAggregation[aggregation]
            model = task.build_model()
            optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
            trainers.append(Trainer(config, task, model, optimizer))
        trainer, resumed = trainers

        if aggregation == "NONE":
            message = r"variable total .* aggregation NONE, and TensorFlow cannot save"
            with pytest.raises(UsageError, match=message):
                trainer.initialize()
            return

        trainer.initialize()
        trainer.train(tf.constant(1))
        trainer.before_save(str(tmp_path / "ckpt-1"))
        path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
        restore(resumed.checkpoint, path, strict=True)
        resumed.after_restore(path)

    totals = _values_of_replicas(trainer.task.total)
    assert totals[0] != totals[1]
    assert _values_of_replicas(resumed.task.total) == totals
    means = _values_of_replicas(trainer.task.second.layers[0].moving_mean.value)
    assert means[0] != means[1]
    assert _values_of_replicas(resumed.task.second.layers[0].moving_mean.value) == means


def _values_of_replicas(variable: Any) -> list[Any]:
    return [part.numpy().tolist() for part in variable.values]


class _ReplicaValues(LinearTask):
    """A variable, and the averages of a second model, of which each replica has its own."""

    aggregation: Any

    def build_model(self) -> Any:
        self.total = tf.Variable(
            0.0,
            trainable=False,
            name="total",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=self.aggregation,
        )
        self.second = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.BatchNormalization()]
        )
        return super().build_model()

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.total.assign_add(tf.reduce_mean(inputs[0]))
        self.second(inputs[0], training=True)
        return super().train_step(inputs, model, optimizer, metrics)


class _Holder:
    def __init__(self, names: list[str]) -> None:
        for name in names:
            setattr(self, name, tf.Variable(0.0, name=name))
        self.deep = {"list": [tf.Variable(1.0)], 3: keras.random.SeedGenerator(1)}
        self.plain = SimpleNamespace(count=tf.Variable(2.0))
        hidden = tf.Variable(3.0)

        def add_hidden(x: Any) -> Any:
            return x + hidden

        self.function = add_hidden


def test_paths_depend_on_neither_attribute_order_nor_counters() -> None:
    model = _Holder(["a"])
    states = [
        StepState({"model": model, "task": _Holder(names)}, [model])
        for names in (["a", "b"], ["b", "a"])
    ]

    for state in states:
        assert state.add_attributes(set())
        assert not state.add_attributes(set())
        assert list(state.variables) == ["task/a", "task/b", "task/deep/3", "task/deep/list/0"]
    assert [states[1].variables[name].name for name in ("task/a", "task/b")] == ["a:0", "b:0"]


def test_variables_that_a_graph_only_reads_are_not_written() -> None:
    read_only = tf.Variable(1.0)
    changed = tf.Variable(1.0)
    inner = tf.Variable(1.0)
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)

    @tf.function
    def change_inner() -> Any:
        return inner.assign_add(1.0)

    def loop() -> None:
        def step(number: Any) -> tuple[Any]:
            tf.cond(
                read_only > 0,
                lambda: changed.assign_add(table.lookup(tf.constant("a"))),
                lambda: change_inner(),
            )
            return (number + 1,)

        tf.while_loop(lambda number: number < 3, step, (tf.constant(0),))

    graph = tf.function(loop, autograph=False).get_concrete_function().graph
    handles = {id(handle) for handle in find_written_handles(graph)}

    assert handles == {id(changed.handle), id(inner.handle)}


class _Saving(LinearTask):
    """Counts in Python."""

    count = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().train_step(*args, **kwargs)

    def state(self) -> Any:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]


EAGER = {"train_tf_function": False, "train_tf_while_loop": False}


def test_a_tasks_own_state_is_in_every_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _create_trainer(_Saving, **EAGER)
    trainer.train(tf.constant(3))
    trainer.before_save(str(tmp_path / "ckpt"))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))

    resumed = _create_trainer(_Saving, **EAGER)
    restore(resumed.checkpoint, path, strict=True)
    resumed.state.after_restore(path)
    assert resumed.task.count == 3

    task = _Saving(resumed.config.task)
    evaluator = Trainer.create(resumed.config, task, train=False, evaluate=True)
    evaluator.state.restore_weights(path)
    assert evaluator.task.count == 3
    assert not caplog.records

    weights = resumed.state.weights_checkpoint.write(str(tmp_path / "best-3"))
    evaluator.state.restore_weights(weights)
    (message,) = caplog.messages
    assert "best-3 holds no state of the task; the task is used as it is now" in message


class _ChangedByEvaluation(LinearTask):
    """Its validation step changes a variable that its training step reads, and one of its own."""

    def build_model(self) -> Any:
        self.level = tf.Variable(1.0, name="level")
        self.evaluated = tf.Variable(0, name="evaluated")
        return super().build_model()

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return super().build_losses(labels, model_outputs, aux_losses) * self.level

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        self.level.assign_add(1.0)
        self.evaluated.assign_add(1)
        return super().validation_step(inputs, model, metrics)


def test_what_an_evaluation_changes_and_training_uses_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = _create_trainer(_ChangedByEvaluation)
    trainer.evaluate(tf.constant(1))  # before a training step is known
    for _ in range(2):
        trainer.train(tf.constant(1))
        trainer.evaluate(tf.constant(1))
    (text,) = caplog.messages
    assert text.startswith("the evaluation changes level:0, which training uses")

    trainer = _create_trainer(_ChangedByEvaluation, require_exact_resume=True)
    trainer.train(tf.constant(1))
    with pytest.raises(UsageError, match="require_exact_resume: the evaluation changes level"):
        trainer.evaluate(tf.constant(1))


class _Drawing(LinearTask):
    """Draws in validation, and calls what it is given in the middle of it."""

    meanwhile: Any = None

    def build_model(self) -> Any:
        self.seeds = keras.random.SeedGenerator(3)
        return super().build_model()

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        logs = super().validation_step(inputs, model, metrics)
        return {"loss": logs["loss"] + keras.random.normal((), seed=self.seeds)}

    def aggregate_logs(self, state: Any = None, step_outputs: Any = None) -> Any:
        self.meanwhile()
        return {}

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> Any:
        return {}


def test_generators_are_put_back_by_late_saves_and_errors() -> None:
    trainer = _create_trainer(_Drawing, eval_tf_while_loop=False)
    before = trainer.task.seeds.state.numpy().tolist()
    states: list[Any] = []

    def save_late() -> None:
        states.append(trainer.task.seeds.state.numpy().tolist())
        trainer.restore_trained_weights()
        states.append(trainer.task.seeds.state.numpy().tolist())

    trainer.task.meanwhile = save_late
    trainer.evaluate(tf.constant(1))
    drawn, restored = states
    assert drawn != before
    assert restored == before

    trainer.task.meanwhile = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(tf.constant(2))
    assert trainer.task.seeds.state.numpy().tolist() == before

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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
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
            assert (
                "no checkpoint contains" not in end.text
                and "keeps its current value" not in end.text
            )
            begun = end.text.count(f"train | step {STEPS // 2}/")
            assert begun == (len(FORMS) if from_step is None else 0)
        yield base


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(trained: Path, form: str) -> None:
    ends = [
        json.loads((trained / f"{form} {which}" / "ends.json").read_text())
        for which in ("straight", "stopped")
    ]
    assert ends[0] == ends[1]


def test_what_is_saved_has_the_path_of_attributes_or_a_number(trained: Path) -> None:
    saved = {
        form: CheckpointGraph(f"{trained}/{form} stopped/ckpt-{STEPS}").get_section_keys(
            "step_state"
        )
        for form in FORMS
    }
    compiled = saved["compiled"]
    attributes = {name.split("/")[1] for name in compiled if name.startswith("task/")}
    assert attributes == {
        "critic_optimizer",
        "fixed_critic",
    }  # the optimizer's path to the critic is the shortest
    numbered = {name for name in compiled if name.startswith("written/")}
    assert numbered == {"written/0 float32 []", "written/1 float32 []"}
    of_two = saved["two replicas"]
    attributes = {name.split("/")[1] for name in of_two if name.startswith("task/")}
    assert attributes == {"target", "evaluated", "teacher", "fixed", "fixed_critic"}
    numbered = [name for name in of_two if name.startswith("written/")]
    assert (
        len(numbered) == len(of_two) - 2 * len(attributes)
        and "written/0 float32 [8, 1]" in numbered
    )
    assert saved["compiled, Keras 2"] == {}  # other sections contain all of it
    assert not any(
        name.startswith("written/") for name in saved["eager"]
    )  # and nothing of the trainer's own


def test_a_sidecar_evaluates_with_the_tasks_second_model(trained: Path) -> None:
    folder = trained / "compiled straight"
    _, logs = json.loads((folder / "ends.json").read_text())
    config = linear_experiment()
    for path in (f"{folder}/ckpt-{STEPS}", f"{folder}/best_ckpt/ckpt-{STEPS}"):
        keras.utils.set_random_seed(5)
        trainer = Trainer.create(
            config, FORMS["compiled"][0](config.task), train=False, evaluate=True
        )
        trainer.state.restore_weights(path)
        assert (
            float(trainer.evaluate(tf.constant(-1))["validation_loss"]) == logs["validation_loss"]
        )


def _trainer(kind: Any, **options: Any) -> Trainer:
    config = linear_experiment(**options)
    return Trainer.create(config, kind(config.task), train=True, evaluate=True)


def test_a_table_that_the_step_changes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(Table)
    for _ in range(2):
        trainer.train(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("the training step changes a hash table, which no checkpoint contains")
    trainer = _trainer(Table, require_exact_resume=True)
    with pytest.raises(
        UsageError, match="require_exact_resume: the training step changes a hash table"
    ):
        trainer.train(tf.constant(1))
    assert int(trainer.global_step) == 0


def test_a_checkpoint_without_what_the_step_changes_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _trainer(ModuleOfTask).checkpoint.write(
        str(tmp_path / "ckpt-3")
    )  # before the step is known
    trainer = _trainer(ModuleOfTask)
    trainer.after_restore(path)
    for _ in range(2):
        trainer.train(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text == f"{path} does not contain written/0 float32 [], which keeps its current value"
    trainer = _trainer(ModuleOfTask, require_exact_resume=True)
    trainer.after_restore(path)
    with pytest.raises(UsageError, match=r"require_exact_resume: .* does not contain written/0"):
        trainer.train(tf.constant(1))


def test_state_that_this_run_does_not_have_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _trainer(ModuleOfTask)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
    trainer = _trainer(LinearTask)
    trainer.after_restore(path)
    with pytest.raises(
        UsageError, match=r"ckpt-1 contains written/0 float32 .* does not have .* --from_step=0, or"
    ):
        trainer.train(tf.constant(1))
    assert int(trainer.global_step) == 0
    trainer = _trainer(LinearTask)
    trainer.state.allow_partial_restore()
    trainer.after_restore(path)
    trainer.train(tf.constant(1))
    assert "ckpt-1 contains written/0 float32 []" in caplog.text


def test_earlier_names_of_attributes_are_read_and_others_refused(tmp_path: Path) -> None:
    section = tf.Module()
    setattr(
        section,
        "task/critic_optimizer/_trainable_variables/0",
        tf.Variable(tf.fill([FEATURES, 1], 3.0)),
    )
    setattr(section, "task/fixed_critic/_layers/1/bias", tf.Variable([4.0]))
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-1"))
    trainer = _trainer(TwoModels)
    trainer.after_restore(path)
    assert trainer.task.critic.layers[0].kernel.value.numpy().tolist() == [[3.0]] * FEATURES
    assert trainer.task.fixed_critic.layers[0].bias.value.numpy().tolist() == [4.0]
    trainer.train(tf.constant(1))

    setattr(section, "task/train_step/counts/0", tf.Variable(1.0))  # of a closure
    path = tf.train.Checkpoint(step_state=section).write(str(tmp_path / "ckpt-2"))
    trainer = _trainer(TwoModels)
    trainer.after_restore(path)
    with pytest.raises(
        UsageError, match=r"contains task/train_step/counts/0, which this run does not have"
    ):
        trainer.train(tf.constant(1))


def test_an_evaluation_names_what_it_cannot_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _trainer(ModuleOfTask)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
    evaluated = Trainer.create(
        trainer.config, ModuleOfTask(trainer.config.task), train=False, evaluate=True
    )
    evaluated.state.restore_weights(path)
    (text,) = (record.getMessage() for record in caplog.records)
    assert "contains written/0 float32 [], which this evaluation does not restore" in text


class _OtherSecond(KerasTwoUnbuilt):
    def make_second(self) -> Any:
        return tf_keras.optimizers.SGD(0.05)


def test_slots_that_no_step_makes_are_refused_before_it(tmp_path: Path) -> None:
    trainer = _trainer(KerasTwoUnbuilt)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))
    trainer.model.other = tf.Variable(1.0)
    with pytest.raises(
        UsageError, match="does not fit this run"
    ):  # what is no slot is refused at once
        restore(
            _trainer(_OtherSecond).checkpoint,
            trainer.checkpoint.save(str(tmp_path / "other")),
            strict=True,
        )
    other = _trainer(_OtherSecond)
    restore(other.checkpoint, path, strict=True)
    other.after_restore(path)
    before = [variable.numpy().tolist() for variable in other.model.variables]
    with pytest.raises(
        UsageError,
        match=r"does not fit this run.*\n  model/second/_variables\n    2 +not in this run",
    ):
        other.train(tf.constant(1))
    assert before == [variable.numpy().tolist() for variable in other.model.variables]


class _OwnLoop(Trainer):
    def create_train_loop_fn(self) -> Any:
        return lambda iterator, steps: None


def test_with_a_loop_of_its_own_attributes_are_saved(tmp_path: Path) -> None:
    config = linear_experiment()
    trainers = [_OwnLoop.create(config, TwoModels(config.task), True, True) for _ in range(2)]
    trainers[0].after_restore(None)
    trainers[0].task.critic.layers[0].bias.assign([4.0])
    path = trainers[0].checkpoint.write(str(tmp_path / "ckpt-1"))
    trainers[1].after_restore(path)
    assert trainers[1].task.critic.layers[0].bias.value.numpy().tolist() == [4.0]


class _OwnTrain(Trainer):
    def train(self, num_steps: Any) -> Any:
        model, features = self.task.learned, tf.ones([2, FEATURES])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(
                self.task.target(features) * model(features) * self.task.fixed(features)
            )
        self.optimizer.apply(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables
        )
        if getattr(self.task, "made", None) is None:
            self.task.made = tf.Variable(0.0)
        self.task.made.assign_add(1.0)
        self.task.after_loop({})
        self.global_step.assign_add(1)
        return {}


def test_with_a_train_of_its_own_what_changes_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, kind = linear_experiment(), HostWrites
    trainers = [_OwnTrain.create(config, kind(config.task), True, True) for _ in range(2)]
    trainers[0].initialize()
    trainers[0].train(tf.constant(1))
    trainers[0].before_save(str(tmp_path / "ckpt-1"))
    path = trainers[0].checkpoint.write(str(tmp_path / "ckpt-1"))
    names = {name.split("/")[1] for name in CheckpointGraph(path).get_section_keys("step_state")}
    assert names == {"target", "evaluated", "teacher", "fixed", "made"}
    trainers[1].after_restore(path)
    expected, found = ([v.numpy().tolist() for v in one.task.target.variables] for one in trainers)
    assert expected == found and not caplog.records
    trainers[1].train(tf.constant(1))
    trainers[1].before_save(str(tmp_path / "ckpt-2"))
    missing, created = (record.getMessage() for record in caplog.records)
    assert "ckpt-1 contains task/made, which this run does not have yet" in missing
    assert (
        "task/made was created after the restore, and has the value of the checkpoint from now on"
        in created
    )


@pytest.mark.parametrize("kind", [_OwnLoop, _OwnTrain])
def test_a_trainer_that_only_evaluates_keeps_no_attributes(
    tmp_path: Path, kind: type[Trainer]
) -> None:
    config = linear_experiment()
    trainer = kind.create(config, TwoModels(config.task), False, True)
    trainer.initialize()
    trainer.write_weights(str(tmp_path / "weights"))
    assert not trainer.state.step_is_known and not trainer.state.step_state.variables


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_each_replica_gets_its_own_value_back(tmp_path: Path, aggregation: str) -> None:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
    )
    config, trainers = linear_experiment(), []
    with strategy.scope():
        for _ in range(2):
            task = _OfReplicas(config.task)
            task.aggregation = tf.VariableAggregation[aggregation]
            trainers.append(
                Trainer(
                    config,
                    task,
                    task.build_model(),
                    task.create_optimizer(config.trainer.optimizer_config, config.runtime),
                )
            )
        if aggregation == "NONE":
            with pytest.raises(
                UsageError, match=r"variable seen .* aggregation NONE, and TensorFlow cannot save"
            ):
                trainers[0].initialize()
            return
        trainers[0].initialize()
        trainers[0].train(tf.constant(1))
        trainers[0].before_save(str(tmp_path / "ckpt-1"))
        path = trainers[0].checkpoint.write(str(tmp_path / "ckpt-1"))
        restore(trainers[1].checkpoint, path, strict=True)
        trainers[1].after_restore(path)
    before, after = (
        [*map(_values, (one.task.seen, one.task.second.layers[0].moving_mean.value))]
        for one in trainers
    )
    assert before == after and all(first != second for first, second in before)


def _values(variable: Any) -> list[Any]:
    return [part.numpy().tolist() for part in variable.values]


class _OfReplicas(LinearTask):
    """A variable, and the averages of a second model, of which each replica has its own."""

    aggregation: Any

    def build_model(self) -> Any:
        how = {
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": self.aggregation,
        }
        self.seen = tf.Variable(0.0, trainable=False, name="seen", **how)
        self.second = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.BatchNormalization()]
        )
        return super().build_model()

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.seen.assign_add(tf.reduce_mean(inputs[0]))
        self.second(inputs[0], training=True)
        return super().train_step(inputs, model, optimizer, metrics)


class _Holder:
    def __init__(self, names: list[str]) -> None:
        for name in names:
            setattr(self, name, tf.Variable(0.0, name=name))
        self.deep = {"list": [tf.Variable(1.0)], 3: keras.random.SeedGenerator(1)}
        self.plain = SimpleNamespace(count=tf.Variable(2.0))
        hidden = tf.Variable(3.0)
        self.function = lambda x: x + hidden


def test_paths_depend_on_neither_attribute_order_nor_counters() -> None:
    model = _Holder(["a"])
    states = [
        StepState({"model": model, "task": _Holder(names)}, [model])
        for names in (["a", "b"], ["b", "a"])
    ]
    for state in states:
        assert state.add_attributes(set()) and not state.add_attributes(set())
        assert list(state.variables) == ["task/a", "task/b", "task/deep/3", "task/deep/list/0"]
    assert [states[1].variables[name].name for name in ("task/a", "task/b")] == ["a:0", "b:0"]


def test_what_a_graph_only_reads_is_not_written() -> None:
    read, changed, inner = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)

    @tf.function
    def function() -> Any:
        return inner.assign_add(1.0)

    def loop() -> None:
        def step(number: Any) -> tuple[Any]:
            tf.cond(
                read > 0,
                lambda: changed.assign_add(table.lookup(tf.constant("a"))),
                lambda: function(),
            )
            return (number + 1,)

        tf.while_loop(lambda number: number < 3, step, (tf.constant(0),))

    graph = tf.function(loop, autograph=False).get_concrete_function().graph
    assert {id(handle) for handle in find_written_handles(graph)} == {
        id(changed.handle),
        id(inner.handle),
    }


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
    trainer = _trainer(_Saving, **EAGER)
    trainer.train(tf.constant(3))
    trainer.before_save(str(tmp_path / "ckpt"))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))
    again = _trainer(_Saving, **EAGER)
    restore(again.checkpoint, path, strict=True)
    again.state.after_restore(path)
    assert again.task.count == 3 and not caplog.records
    evaluated = Trainer.create(again.config, _Saving(again.config.task), train=False, evaluate=True)
    evaluated.state.restore_weights(path)
    assert evaluated.task.count == 3 and not caplog.records
    evaluated.state.restore_weights(again.state.weights_checkpoint.write(str(tmp_path / "best-3")))
    (record,) = caplog.records
    assert "best-3 holds no state of the task; the task is used as it is now" in record.getMessage()


class _ChangedByEvaluation(LinearTask):
    """Its validation step changes a variable that its training step reads, and one that is its own."""

    def build_model(self) -> Any:
        self.level, self.evaluated = (
            tf.Variable(1.0, name="level"),
            tf.Variable(0, name="evaluated"),
        )
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
    trainer = _trainer(_ChangedByEvaluation)
    trainer.evaluate(tf.constant(1))  # before a training step is known
    for _ in range(2):
        trainer.train(tf.constant(1))
        trainer.evaluate(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("the evaluation changes level:0, which training uses")
    trainer = _trainer(_ChangedByEvaluation, require_exact_resume=True)
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
    trainer, seen = _trainer(_Drawing, eval_tf_while_loop=False), []
    before = trainer.task.seeds.state.numpy().tolist()

    def save_late() -> None:
        seen.append(trainer.task.seeds.state.numpy().tolist())
        trainer.restore_trained_weights()
        seen.append(trainer.task.seeds.state.numpy().tolist())

    trainer.task.meanwhile = save_late
    trainer.evaluate(tf.constant(1))
    assert seen[0] != before and seen[1] == before
    trainer.task.meanwhile = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(tf.constant(2))
    assert trainer.task.seeds.state.numpy().tolist() == before

"""What a training step changes beside weights and optimizer is the same after a resume, or is named."""

from __future__ import annotations

import json
import shutil
import sys
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
    Unreachable,
    train_all,
)
from trainer_kit.checkpoints.state.attribute_paths import reachable
from trainer_kit.checkpoints.state.discovered_state import saved_section
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.state.traced_writes import described, written
from trainer_kit.errors import UsageError
from trainer_kit.testing.tiny_task import FEATURES
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.task_attributes import PlainValues


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of runs that were not stopped, and of copies that another process resumed in the middle, by form."""
    base = tmp_path_factory.mktemp("trained")
    with ForkServer(["tests.process.checkpoints.stateful_tasks"]) as server:
        for which, from_step in (("straight", None), ("stopped", STEPS // 2)):
            if from_step:
                for form in FORMS:
                    shutil.copytree(base / f"{form} straight", base / f"{form} stopped")
            end = server.run(train_all, str(base), which, from_step)
            assert end.code == 0, end.text[-1500:]
            assert "no checkpoint holds" not in end.text and "keeps its initial" not in end.text
            begun = end.text.count(f"train | step {STEPS // 2}/")
            assert begun == (len(FORMS) if from_step is None else 0)
        yield base


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(trained: Path, form: str) -> None:
    ends = [json.loads((trained / f"{form} {which}" / "ends.json").read_text()) for which in ("straight", "stopped")]
    assert ends[0] == ends[1]


def test_what_is_saved_has_the_path_that_leads_to_it(trained: Path) -> None:
    saved = {form: saved_section(f"{trained}/{form} stopped/ckpt-{STEPS}", "step_state") for form in FORMS}
    assert saved["compiled"]["task/parts/modules/a/0/count"] == ()
    names = {name.split("/")[1] for name in saved["compiled"]}
    assert names == {"parts", "table", "critic_optimizer"}  # and not what a step only reads
    changed = {name.split("/")[1] for name in saved["two replicas"]}
    assert changed == {"target", "evaluated", "teacher", "table", "critic_optimizer"}
    assert saved["compiled, Keras 2"] == {}  # held by other sections
    assert saved["eager"] == {"task/factor/SCALE/count": ()}  # and nothing of the trainer's own


def test_a_sidecar_evaluates_with_the_tasks_second_model(trained: Path) -> None:
    folder = trained / "compiled straight"
    _, logs = json.loads((folder / "ends.json").read_text())
    config = linear_experiment()
    for path in (f"{folder}/ckpt-{STEPS}", f"{folder}/best_ckpt/ckpt-{STEPS}"):
        keras.utils.set_random_seed(5)
        trainer = Trainer.create(config, FORMS["compiled"][0](config.task), train=False, evaluate=True)
        trainer.state.restore_weights(path)
        assert float(trainer.evaluate(tf.constant(-1))["validation_loss"]) == logs["validation_loss"]


def _trainer(kind: Any, **options: Any) -> Trainer:
    config = linear_experiment(**options)
    return Trainer.create(config, kind(config.task), train=True, evaluate=True)


def test_what_cannot_be_found_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(Unreachable)
    for _ in range(2):
        trainer.train(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records if "no checkpoint holds" in record.getMessage())
    assert "the variable hidden (float32 []) (changed in tests/process/checkpoints/stateful_tasks.py:" in text
    trainer = _trainer(Unreachable, require_exact_resume=True)
    with pytest.raises(UsageError, match="require_exact_resume: the training step changes the variable hidden"):
        trainer.train(tf.constant(1))
    assert int(trainer.global_step) == 0


def test_an_earlier_versions_checkpoint_resumes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _trainer(ModuleOfTask)
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-3"))  # before the step is known
    again = _trainer(ModuleOfTask)
    again.state.restored(path)
    for _ in range(2):
        again.train(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records)
    assert "ckpt-3 does not hold task/parts/modules/a/0/count" in text and "keeps its initial value" in text


def test_state_that_this_run_does_not_have_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(ModuleOfTask)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
    again = _trainer(LinearTask)
    again.state.restored(path)
    again.train(tf.constant(1))
    assert "ckpt-1 holds task/parts/modules/a/0/count, which this run does not have" in caplog.text


class _OtherSecond(KerasTwoUnbuilt):
    def make_second(self) -> Any:
        return tf_keras.optimizers.SGD(0.05)


def test_slots_that_no_step_makes_are_refused_before_it(tmp_path: Path) -> None:
    trainer = _trainer(KerasTwoUnbuilt)
    trainer.train(tf.constant(1))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))
    trainer.model.other = tf.Variable(1.0)
    with pytest.raises(UsageError, match="does not fit this run"):  # what is no slot is refused at once
        restore(_trainer(_OtherSecond).checkpoint, trainer.checkpoint.save(str(tmp_path / "other")), whole=True)
    other = _trainer(_OtherSecond)
    restore(other.checkpoint, path, whole=True)
    other.after_restore(path)
    before = [variable.numpy().tolist() for variable in other.model.variables]
    with pytest.raises(UsageError, match=r"does not fit this run.*\n  model/second/_variables\n    2 +not in this run"):
        other.train(tf.constant(1))
    assert before == [variable.numpy().tolist() for variable in other.model.variables]


class _OwnLoop(Trainer):
    def create_train_loop_fn(self) -> Any:
        return lambda iterator, steps: None


def test_with_a_loop_of_its_own_all_that_can_be_found_is_saved(tmp_path: Path) -> None:
    config, kind = linear_experiment(), ModuleOfTask
    trainers = [_OwnLoop.create(config, kind(config.task), True, True) for _ in range(2)]
    for trainer, path in zip(trainers, (None, str(tmp_path / "ckpt-1")), strict=True):
        trainer.after_restore(path)
        trainer.task.parts.modules["a"][0].count.assign_add(0.0 if path else 3.0)
        trainer.checkpoint.write(str(tmp_path / "ckpt-1"))
    assert float(trainers[1].task.parts.modules["a"][0].count) == 4.0


class _Hidden(LinearTask):
    """Its loss has a factor that it only reads, and that no attribute leads to."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return super().build_losses(labels, model_outputs, aux_losses) * sys.hidden  # type: ignore[attr-defined]


def test_what_an_action_changes_and_cannot_be_found_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = tf.Variable(1.0, name="hidden")
    monkeypatch.setattr(sys, "hidden", hidden, raising=False)
    trainers = [_trainer(_Hidden), _trainer(_Hidden, require_exact_resume=True)]
    for trainer in trainers:
        trainer.initialize()
        trainer.train(tf.constant(1))
        trainer.before_save("ckpt-1")
    assert not caplog.records
    hidden.assign(2.0)
    for _ in range(2):
        trainers[0].before_save("ckpt-2")
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("the variable hidden (float32 []) changes between training steps")
    with pytest.raises(UsageError, match="require_exact_resume: the variable hidden"):
        trainers[1].before_save("ckpt-2")


def test_a_rewind_names_state_that_changed_after_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _trainer(HostWrites)
    trainer.initialize()
    paths = []
    for step in (1, 2):
        trainer.train(tf.constant(1))
        trainer.before_save(str(tmp_path / f"ckpt-{step}"))
        paths.append(trainer.checkpoint.write(str(tmp_path / f"ckpt-{step}")))
        trainer.task.after_loop({})
    assert {name.split("/")[1] for name in saved_section(paths[0], "step_state")} == {"teacher"}
    for path in paths:
        trainer.after_restore(path)
    (text,) = (record.getMessage() for record in caplog.records)
    assert "ckpt-1 does not hold task/evaluated/" in text and "which keeps its current value" in text


class _OwnTrain(Trainer):
    def train(self, num_steps: Any) -> Any:
        model, features = self.task.learned, tf.ones([2, FEATURES])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.task.target(features) * model(features) * self.task.fixed(features))
        self.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        if getattr(self.task, "made", None) is None:
            self.task.made = tf.Variable(0.0)
        self.task.made.assign_add(1.0)
        self.task.after_loop({})
        self.global_step.assign_add(1)
        return {}


def test_with_a_train_of_its_own_what_changes_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, kind = linear_experiment(), HostWrites
    trainers = [_OwnTrain.create(config, kind(config.task), True, True) for _ in range(2)]
    trainers[0].initialize()
    trainers[0].train(tf.constant(1))
    trainers[0].before_save(str(tmp_path / "ckpt-1"))
    path = trainers[0].checkpoint.write(str(tmp_path / "ckpt-1"))
    names = {name.split("/")[1] for name in saved_section(path, "step_state")}
    assert names == {"target", "evaluated", "teacher", "table", "made"}
    trainers[1].after_restore(path)
    expected, found = ([v.numpy().tolist() for v in one.task.target.variables] for one in trainers)
    assert expected == found and not caplog.records
    trainers[1].train(tf.constant(1))
    trainers[1].before_save(str(tmp_path / "ckpt-2"))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith("task/made: created in the first step")


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_each_replica_gets_its_own_value_back(tmp_path: Path, aggregation: str) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce())
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
            with pytest.raises(UsageError, match=r"variable seen .* aggregation NONE, and TensorFlow cannot save"):
                trainers[0].initialize()
            return
        trainers[0].initialize()
        trainers[0].train(tf.constant(1))
        trainers[0].before_save(str(tmp_path / "ckpt-1"))
        path = trainers[0].checkpoint.write(str(tmp_path / "ckpt-1"))
        restore(trainers[1].checkpoint, path, whole=True)
        trainers[1].after_restore(path)
    before, after = ([*map(_values, (one.task.seen, one.task.second.layers[0].moving_mean.value))] for one in trainers)
    assert before == after and all(first != second for first, second in before)


def _values(variable: Any) -> list[Any]:
    return [part.numpy().tolist() for part in variable.values]


class _OfReplicas(LinearTask):
    """A variable, and the averages of a second model, of which each replica has its own."""

    aggregation: Any

    def build_model(self) -> Any:
        how = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": self.aggregation}
        self.seen = tf.Variable(0.0, trainable=False, name="seen", **how)
        self.second = keras.Sequential([keras.Input((FEATURES,)), keras.layers.BatchNormalization()])
        return super().build_model()

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.seen.assign_add(tf.reduce_mean(inputs[0]))
        self.second(inputs[0], training=True)
        return super().train_step(inputs, model, optimizer, metrics)


class _Slotted:
    __slots__ = ("empty", "value")

    def __init__(self) -> None:
        self.value = tf.Variable(6.0)


class _Holder:
    def __init__(self, names: list[str]) -> None:
        for name in names:
            setattr(self, name, tf.Variable(0.0, name=name))
        self.deep = {"list": [tf.Variable(1.0)], 3: keras.random.SeedGenerator(1)}
        self.slotted = _Slotted()
        default = tf.Variable(2.0)
        self.function = lambda x, added=default: x + added + self.deep["list"][0]

    shared: Any = None

    def method(self) -> Any:
        return OF_THE_MODULE


OF_THE_MODULE: Any = None


def test_paths_depend_on_neither_attribute_order_nor_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Holder, "shared", tf.Variable(5.0))
    monkeypatch.setitem(globals(), "OF_THE_MODULE", tf.Variable(4.0))
    found = [reachable({"task": _Holder(names)}) for names in (["a", "b"], ["b", "a"])]
    assert found[0].keys() == found[1].keys()
    assert [found[1][name].name for name in ("task/a", "task/b")] == ["a:0", "b:0"]
    wanted = {"task/deep/list/0", "task/deep/3", "task/shared", "task/method/OF_THE_MODULE", "task/function/defaults.0"}
    assert found[0].keys() == {"task/a", "task/b", "task/slotted/value", *wanted}
    model = _Holder(["a"])
    assert reachable({"task": SimpleNamespace(model=model), "model": model}, [model]) == {}


def test_what_a_graph_only_reads_is_not_written() -> None:
    read, changed, inner = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)

    @tf.function
    def function() -> Any:
        return inner.assign_add(1.0)

    def loop() -> None:
        def step(number: Any) -> tuple[Any]:
            tf.cond(read > 0, lambda: changed.assign_add(table.lookup(tf.constant("a"))), lambda: function())
            return (number + 1,)

        tf.while_loop(lambda number: number < 3, step, (tf.constant(0),))

    graph = tf.function(loop, autograph=False).get_concrete_function().graph
    handles = written(graph)
    assert {id(one) for one in handles} == {id(changed.handle), id(inner.handle)}
    assert all(
        "changed in tests/process/checkpoints/state/test_discovered_state.py:" in described(graph, one)
        for one in handles
    )


def test_what_a_library_writes_on_replicas_has_no_line_of_python() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce())
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build([None, 2])
    function = tf.function(lambda: strategy.run(layer, (tf.ones([3, 2]),), {"training": True}), autograph=False)
    graph = function.get_concrete_function().graph
    texts = [described(graph, handle) for handle in written(graph)]
    assert texts and not any("threading.py" in text for text in texts)


class _Counting(LinearTask):
    """Counts in Python: in attributes, and in an object of a class of its own; fills caches as it goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count, self.history, self.curriculum = 0, {"losses": [1.0]}, _Curriculum()
        self.cache, self.built, self.evaluated = None, False, 0

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        self.cache, self.built = {"shape": list(labels.shape)}, True
        if metrics is self.scored:
            self.evaluated += 1
        super().process_metrics(metrics, labels, model_outputs, **kwargs)

    scored: Any = None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        self.history["losses"].append(0.5)
        self.curriculum.level += 1
        return super().train_step(*args, **kwargs)


class _Curriculum:
    level = 0

    def __init__(self) -> None:
        self.level = 0


class _Saving(_Counting):
    def state(self) -> Any:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]


EAGER = {"train_tf_function": False, "train_tf_while_loop": False}


def test_python_values_that_steps_change_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_Counting, **EAGER)
    for _ in range(3):
        trainer.train(tf.constant(2))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith(
        "_Counting.count, _Counting.curriculum.level, _Counting.history changes while the run trains"
    )
    assert "give the task methods state() and restore(state)" in text
    trainer = _trainer(_Counting, **EAGER, require_exact_resume=True)
    with pytest.raises(UsageError, match=r"require_exact_resume: _Counting\.count"):
        trainer.train(tf.constant(2))


def test_caches_and_counts_of_evaluations_are_no_state(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_Counting)  # compiled: the counts change while it is traced
    trainer.task.scored = trainer.validation_metrics
    for _ in range(2):
        trainer.train(tf.constant(2))
        trainer.evaluate(tf.constant(1))
    assert trainer.task.evaluated and trainer.task.count and not caplog.records


def test_an_action_that_changes_the_task_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_Counting)
    trainer.train(tf.constant(1))
    trainer.task.curriculum.level += 1
    trainer.train(tf.constant(1))
    assert ["_Counting.curriculum.level" in record.getMessage() for record in caplog.records] == [True]


def test_a_tasks_own_state_is_in_every_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_Saving, **EAGER)
    trainer.train(tf.constant(3))
    trainer.before_save(str(tmp_path / "ckpt"))
    path = trainer.checkpoint.save(str(tmp_path / "ckpt"))
    again = _trainer(_Saving, **EAGER)
    restore(again.checkpoint, path, whole=True)
    again.state.restored(path)
    assert again.task.count == 3 and not caplog.records
    evaluated = Trainer.create(again.config, _Saving(again.config.task), train=False, evaluate=True)
    evaluated.state.restore_weights(path)
    assert evaluated.task.count == 3 and not caplog.records
    evaluated.state.restore_weights(again.state.weights.write(str(tmp_path / "best-3")))
    (record,) = caplog.records
    assert "best-3 holds no state of the task; the task is used as it is now" in record.getMessage()


class _SavingEvaluations(_Saving):
    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        self.count += self.counts
        return super().validation_step(inputs, model, metrics)

    counts = 0


def test_an_evaluation_that_changes_the_tasks_own_state_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_SavingEvaluations, eval_tf_function=False, eval_tf_while_loop=False)
    trainer.train(tf.constant(1))
    trainer.evaluate(tf.constant(1))
    assert not caplog.records
    trainer.task.counts = 1
    for _ in range(2):
        trainer.evaluate(tf.constant(1))
    (record,) = caplog.records
    assert "the evaluation changes what _SavingEvaluations.state() returns" in record.getMessage()


def test_of_long_and_nested_containers_a_part_is_compared() -> None:
    task = SimpleNamespace(long=[0.5] * 10_000, nested=[[0.5] * 99] * 99, layers=[object()] * 10_000, best=float("nan"))
    values = PlainValues(task)
    task.long, task.nested, task.best = list(task.long), [list(one) for one in task.nested], float("nan")
    task.layers.append(object())
    assert values.changed() == []
    task.long.append(0.5)
    task.nested.append([])
    assert values.changed() == ["SimpleNamespace.long", "SimpleNamespace.nested"]


class _ChangedByEvaluation(LinearTask):
    """Its validation step changes a variable that its training step reads, and one that is its own."""

    def build_model(self) -> Any:
        self.level, self.evaluated = tf.Variable(1.0, name="level"), tf.Variable(0, name="evaluated")
        return super().build_model()

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return super().build_losses(labels, model_outputs, aux_losses) * self.level

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        self.level.assign_add(1.0)
        self.evaluated.assign_add(1)
        return super().validation_step(inputs, model, metrics)


def test_what_an_evaluation_changes_and_training_uses_is_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _trainer(_ChangedByEvaluation)
    trainer.evaluate(tf.constant(1))  # before a training step is known
    for _ in range(2):
        trainer.train(tf.constant(1))
        trainer.evaluate(tf.constant(1))
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith(
        "the evaluation changes the variable level (float32 []) (changed in tests/process/checkpoints/state/test_"
    )
    trainer = _trainer(_ChangedByEvaluation, require_exact_resume=True)
    trainer.train(tf.constant(1))
    with pytest.raises(UsageError, match="require_exact_resume: the evaluation changes the variable level"):
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
        trainer.end_averaging()
        seen.append(trainer.task.seeds.state.numpy().tolist())

    trainer.task.meanwhile = save_late
    trainer.evaluate(tf.constant(1))
    assert seen[0] != before and seen[1] == before
    trainer.task.meanwhile = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate(tf.constant(2))
    assert trainer.task.seeds.state.numpy().tolist() == before

"""TrainState: the complete state of a training run, as its checkpoints hold it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.python_state import ARRAYS, PythonState
from trainer_kit.checkpoints.state.random_state import (
    prepare_process_generators,
    task_state,
    untracked_model_state,
)
from trainer_kit.checkpoints.state.step_state import STEP_STATE as STEP_STATE
from trainer_kit.checkpoints.state.step_state import StepState, get_handle_ids, restore_section
from trainer_kit.checkpoints.state.strict_restore import (
    NAME_DEPTH,
    OMITTABLE_SECTIONS,
    check_variables_created,
    create_training_checkpoint,
    create_weights_checkpoint,
    find_uncreated_variables,
    restore,
)
from trainer_kit.config.schema.optimization import AVERAGE
from trainer_kit.errors import UsageError
from trainer_kit.runtime.replica_values import ReplicaLocalState
from trainer_kit.runtime.tensorflow_internals import stop_async_saver

_SMALL = 4096  # elements
_GENERATOR = re.compile(
    r"(^|/)(StateVar|seed_generator_state)\b"
)  # TensorFlow's names and Keras', of their states

_LOG = logging.getLogger(__name__)


class TrainState:
    """Model, optimizers, global step, moving average, random state and run state. Created in strategy scope.

    Args:
      global_step: The step counter, an int64 scalar.
      model: A built Keras 3 model, tf_keras model or tf.Module.
      optimizer: A built optimizer or a dict of them; None for evaluation, which has no run state
        either.
      average: A MovingAverage, or an object with the same `begin`, `reset`, `section`, `variables`
        and `more_variables`; None: there is none.
      task: The task, whose own variables and generators belong to the run.
      seed: The seed of the process's random generators.
      items: Further parts of every checkpoint, the best included, by name; they are restored as far
        as both sides have them.
      trainable: The variables that were trainable before some were frozen; empty: none were.
      require_exact: Whether state that cannot be saved is an error.

    Attributes:
      checkpoint: The checkpoint of the complete state.
      python_state: The Python state, which takes further parts before the restore.
      step_state: The variables that training changes and that no other section contains.
      optional_sections: The names of the further parts.
      random_generator: The generator that random operations of training steps draw from:
        TensorFlow's global one, which checkpoints hold. None for evaluation.
      model_replicas: The model's values on each replica; an evaluation shares those that a
        checkpoint holds.
      variables_lock: A lock, held while variables have other values for an evaluation; a late save
        comes from another thread.
      step_is_known: Whether `track_step_state` has added what the training step writes.

    Raises:
      UsageError: when the name of a further part is already taken.
    """

    def __init__(
        self,
        global_step: tf.Variable,
        model: Any,
        optimizer: Any,
        average: Any,
        task: Any,
        seed: int,
        items: Mapping[str, Any] | None = None,
        trainable: Sequence[Any] = (),
        require_exact: bool = False,
    ) -> None:
        self._global_step, self._model, self._average = global_step, model, average
        self._strategy = tf.distribute.get_strategy()
        self._require_exact = require_exact
        self.variables_lock = threading.RLock()
        self.python_state = PythonState()
        optimizers = list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]
        self.step_state = StepState({"model": model, "task": task}, exclude=optimizers)
        self._evaluation_sections = {
            "task": task_state(task, model),
            "random/model": untracked_model_state(model),
        }
        of_model = self._evaluation_sections["random/model"]
        evaluated = {
            "task": self._evaluation_sections["task"],
            "random": {"model": of_model} if of_model else {},
        }
        others: dict[str, Any] = {}
        self.random_generator: tf.random.Generator | None = None
        if optimizer is not None:
            generators = {**prepare_process_generators(seed), **evaluated["random"]}
            self.random_generator = tf.random.get_global_generator()
            others = {
                "run_state": self.python_state.variable,
                ARRAYS: self.python_state.arrays,
                "task": evaluated["task"],
                "random": generators,
            }
        self._items, self.optional_sections = dict(items or {}), frozenset(items or ())
        if taken := self.optional_sections & {
            *OMITTABLE_SECTIONS,
            ARRAYS,
            STEP_STATE,
            "global_step",
            "model",
            "optimizer",
        }:
            names = ", ".join(sorted(taken))
            raise UsageError(
                f"every checkpoint already has a part named {names}; give your item another name"
            )
        others |= {"optimizer": optimizer, **self._average_section(), **self._items}
        others[STEP_STATE] = self.step_state.section
        evaluated[STEP_STATE] = self.step_state.section_of_weights
        self.checkpoint = create_training_checkpoint(
            global_step=global_step, model=model, trainable=trainable, **others
        )
        self._saved_with_weights = evaluated
        self._optimizer = optimizer
        self.model_replicas = ReplicaLocalState(lambda: self._model.variables, self._strategy)
        self.step_is_known = False
        self._step_is_traced = False
        self._checked_graphs: set[Any] = set()  # the graphs that are checked
        self._partly_restored_path: str | None = (
            None  # the checkpoint that was restored but for what the first step makes
        )
        self._weights_finite_fn = tf.function(self.compute_weights_finite, autograph=False)
        self._others_finite_fn: tuple[int, Any] = (0, None)  # of so many variables
        self._generators: list[Any] | None = (
            None  # the states of random generators; found at the first evaluation
        )
        self._generator_snapshot: list[tuple[Any, tf.Tensor]] = []

    @property
    def other_variables(self) -> list[tf.Variable]:
        """The variables of the task and the training step besides model, optimizer and average."""
        sections = (*self._evaluation_sections.values(), self.step_state.variables)
        found = (section[name] for section in sections for name in sorted(section))
        return [one for one in found if isinstance(one, tf.Variable)]

    @functools.cached_property
    def weights_checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint of the weights alone, as the best checkpoint holds them; created at first use."""
        return create_weights_checkpoint(
            global_step=self._global_step,
            model=self._model,
            **self._items,
            **self._saved_with_weights,
        )

    def add_root(self, name: str, owner: Any) -> None:
        """Adds an object whose attributes are saved, under paths that begin with `name`; called before the restore."""
        self.step_state.roots[name] = owner

    def allow_partial_restore(self) -> None:
        """Leaves out variables of a checkpoint that this run lacks or that have another shape."""
        self.step_state.allow_partial = True

    def add_replica_states(self) -> None:
        """Adds each replica's local values, such as the averages of batch normalization, to checkpoints."""
        self.python_state.add("replicas", self.model_replicas.state, self.model_replicas.restore)
        others = ReplicaLocalState(lambda: self.other_variables, self._strategy)
        self.python_state.add("replicas of other variables", others.state, others.restore)
        if (
            generator := self.random_generator
        ):  # replicas draw unequally often where they take different branches
            draws = ReplicaLocalState(lambda: [generator.state], self._strategy)
            self.python_state.add("replicas of the random generator", draws.state, draws.restore)

    def after_restore(self, path: str | None) -> None:
        """Restores the state that is not in variables after a checkpoint was restored; runs eagerly, in strategy scope.

        Args:
          path: The checkpoint's prefix; None when there was none. State that it does not hold
            starts from the beginning: the moving average starts at the weights.
        """
        awaited = path is not None and find_uncreated_variables(
            self.checkpoint, path, self.optional_sections
        )
        self._partly_restored_path = path if awaited else None
        self._restore_evaluation_state(path)
        if path is None or not CheckpointGraph(path).has_section("run_state"):
            self.python_state.clear()
        else:
            self.python_state.load(path)
        if self._average is not None and path is None:
            self._average.initialize()
        else:
            self._reset_missing_averages(path)

    def restore_weights(self, path: str) -> None:
        """Restores the state that an evaluation uses from a checkpoint of a run; runs eagerly, in strategy scope.

        This is the global step, model, average, and state of the task and the training step, but no
        optimizer; of the run state only the task's part, which best weights lack.

        Raises:
          UsageError: when the checkpoint does not fit.
          StorageError: when the checkpoint is gone or damaged.
        """
        others = {**self._average_section(), **self._items}
        checkpoint = create_training_checkpoint(
            global_step=self._global_step, model=self._model, **others
        )
        restore(checkpoint, path, strict=False, optional_sections=self.optional_sections)
        self._restore_evaluation_state(path)
        self.python_state.load_part(path, "task")
        self._reset_missing_averages(path)

    def _reset_missing_averages(self, path: str | None) -> None:
        """Sets the averages that the checkpoint at `path` lacks to the weights.

        Best weights lack all averages. A restore in part may lack those of some variables.
        """
        if self._average is None or path is None:
            return
        if not self.has_averages(path):
            self._average.reset()
            return
        saved = CheckpointGraph(path).shapes_by_name(NAME_DEPTH)
        sections = {AVERAGE: (self._average.section, self._average.variables)}
        for name, more in self._average.more_variables.items():
            sections[name] = f"{self._average.more_section}/{name}", more
        for name, (section, averages) in sections.items():
            if not isinstance(
                averages, Mapping
            ):  # those of an optimizer that averages are restored with it
                continue
            lost = [
                key
                for key, one in averages.items()
                if saved.get(f"{section}/{key}") != tuple(one.shape)
            ]
            if lost:
                self._average.reset([name], lost)

    def has_averages(self, path: str) -> bool:
        """Whether the checkpoint at `path` holds the moving averages, if the run keeps any; best weights do not."""
        return self._average is None or CheckpointGraph(path).has_section(self._average.section)

    def track_attributes(self, exclude: Iterable[Any]) -> None:
        """Adds the variables in attributes of the task and the model to checkpoints, and restores them.

        Called after each restore, also of nothing, and before weights are written. Runs eagerly,
        from any thread.

        Args:
          exclude: Variables that need no saving, such as those of metrics that are reset.
        """
        with self.variables_lock, self._strategy.scope():
            self._after_variables_added(
                self.step_state.add_attributes(self._get_tracked_handles(exclude))
            )

    def before_save(self, exclude: Iterable[Any]) -> None:
        """Brings all state into variables that checkpoints contain, right before a save; runs eagerly, on the host.

        Args:
          exclude: See `track_attributes`.

        Raises:
          UsageError: when a part of the Python state cannot be saved.
        """
        self.track_attributes(exclude)
        self._after_variables_added(self.python_state.store())

    def track_step_state(self, graph: Any, exclude: Sequence[Any]) -> None:
        """Adds and restores all state of the training step, before the first step; runs eagerly.

        Args:
          graph: The graph of the traced loop or step; None when neither is compiled, so that its
            writes are not known.
          exclude: See `track_attributes`.

        Raises:
          UsageError: when the run lacks variables of the restored checkpoint, or state that an
            exact resume requires cannot be saved.
        """
        self.step_is_known = True
        self._step_is_traced = graph is not None
        self.track_attributes(exclude)
        if graph is not None:
            with self._strategy.scope():
                self._after_variables_added(
                    self.step_state.add_traced_writes(
                        graph, self._get_tracked_handles(exclude), self._require_exact
                    )
                )
            self.check_first_step()
        self.end_restore()

    def end_restore(self) -> None:
        """Ends the restore before the first step; see StepState. Runs eagerly, in strategy scope.

        Raises:
          UsageError: when the training step is traced and the run lacks variables of the
            checkpoint.
        """
        self._after_variables_added(self.step_state.end_restore(strict=self._step_is_traced))

    def check_first_step(self) -> None:
        """Checks, once after a restore, that optimizers inside the model have created all variables of the checkpoint.

        Raises:
          UsageError: when they have not.
        """
        if self._partly_restored_path is not None:
            path, self._partly_restored_path = self._partly_restored_path, None
            check_variables_created(self.checkpoint, path, self.optional_sections)

    def check_evaluation(self, graph: Any, exclude: Iterable[Any]) -> None:
        """Warns of variables that an evaluation changes and training uses, except for generators, which are put back.

        Called after each evaluation. It checks each graph once, when the training step is known.

        Args:
          graph: The graph of the evaluation; None when it is not compiled.
          exclude: See `track_attributes`.

        Raises:
          UsageError: when there is such a variable and an exact resume is required.
        """
        if graph is None or not self.step_is_known or graph in self._checked_graphs:
            return
        self._checked_graphs.add(graph)
        generators = self._generators or ()
        self.step_state.report_evaluation(
            graph, get_handle_ids([*_native(exclude), *generators]), self._require_exact
        )

    @contextlib.contextmanager
    def preserve_variables(self, *, everything: bool = False) -> Iterator[None]:
        """Restores the variables of the task and the training step, or everything, at the end of this context.

        Runs eagerly, on the host.
        """
        held = (
            tf.train.TrackableView(self.checkpoint).descendants()
            if everything
            else self.other_variables
        )
        parts = [
            part
            for one in held
            if isinstance(one, tf.Variable)
            for part in getattr(one, "values", None) or [one]
        ]
        before = [(part, part.read_value()) for part in parts]
        try:
            yield
        finally:
            for part, value in before:
                part.assign(value)

    def remember_generators(self) -> None:
        """Remembers the states of all random generators for `restore_generators`; runs eagerly, on the host.

        An evaluation that draws random numbers would change those of later training, and a resumed
        run does not repeat recorded evaluations.
        """
        if self._generators is None:
            checkpoint = self.checkpoint if self._optimizer is not None else self.weights_checkpoint
            items = tf.train.TrackableView(checkpoint).descendants()
            states = [
                one for one in items if isinstance(one, tf.Variable) and _GENERATOR.search(one.name)
            ]
            self._generators = [
                part for one in states for part in getattr(one, "values", None) or [one]
            ]
        self._generator_snapshot = [(part, part.read_value()) for part in self._generators]

    def restore_generators(self) -> None:
        """Restores the random generators to the states that were remembered last, once.

        Runs eagerly, from any thread.
        """
        before, self._generator_snapshot = self._generator_snapshot, []
        for part, value in before:
            part.assign(value)

    def _get_tracked_handles(self, exclude: Iterable[Any]) -> set[int]:
        """Returns the handles of all variables in other sections, and of `exclude`."""
        items = list(tf.train.TrackableView(self.checkpoint).descendants())
        variables = [one for one in items if isinstance(one, tf.Variable)]
        # TensorFlow saves the slots of a Keras 2 optimizer without showing them, those of a wrapped
        # one too.
        others = [one for one in items if not isinstance(one, tf.Variable)]
        _check_aggregations(items)
        optimizers = [self._optimizer, *(one for one in others if hasattr(one, "get_slot_names"))]
        slots = [slot for one in optimizers for slot in _get_optimizer_variables(one)]
        return get_handle_ids([*variables, *_native([*slots, *exclude])])

    def _after_variables_added(self, grown: bool) -> None:
        self._generators = None
        if grown:
            error = stop_async_saver(
                self.checkpoint
            )  # it knows only the variables of its first save
            if (
                error is not None
            ):  # the manager reports the failure at its next `sync`, but without the reason
                _LOG.warning("a checkpoint was not written: %s", error)

    def _restore_evaluation_state(self, path: str | None) -> None:
        """Restores the state that an evaluation uses besides weights and average, as far as both sides have it."""
        self._after_variables_added(self.step_state.restore(path))
        if self._optimizer is None:
            self.step_state.report_unrestored()
        if path is None:
            return
        graph = CheckpointGraph(path)
        for section, items in self._evaluation_sections.items():
            saved = {
                name: graph.shapes[key] for name, key in graph.get_section_keys(section).items()
            }
            fitting = {
                name: item for name, item in items.items() if saved.get(name) == tuple(item.shape)
            }
            if fitting:
                restore_section(path, section, fitting)

    def _average_section(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        more = (
            {self._average.more_section: self._average.more_variables}
            if self._average.more_variables
            else {}
        )
        return {self._average.section: self._average.variables, **more}

    def weights_are_finite(self) -> bool:
        """Whether all weights are finite; runs eagerly, on the host."""
        return bool(self._weights_finite_fn().numpy())

    def all_finite(self) -> bool:
        """Whether the weights, the optimizers' variables and the average are finite; runs eagerly, on the host."""
        sections = [
            section for section in self._average_section().values() if isinstance(section, Mapping)
        ]
        others = [
            *_get_optimizer_variables(self._optimizer),
            *(one for one in tf.nest.flatten(sections)),
        ]
        if self._others_finite_fn[0] != len(
            others
        ):  # some optimizers make theirs in the first step
            self._others_finite_fn = (
                len(others),
                tf.function(lambda: _all_finite(others), autograph=False),
            )
        return self.weights_are_finite() and bool(
            self._others_finite_fn[1]().numpy() if others else True
        )

    @tf.autograph.experimental.do_not_convert
    def compute_weights_finite(self) -> tf.Tensor:
        """Returns whether all floating-point variables of the model are finite, a bool scalar; runs in graph.

        A sum is finite only if all its terms are, and it reads each value once. (A sum that
        overflows float32 also belongs to a model that has diverged.)
        """
        return _all_finite(self._model.variables)


def _get_optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer of any kind, or of a dict of them."""
    if isinstance(optimizer, Mapping):
        return [
            variable for one in optimizer.values() for variable in _get_optimizer_variables(one)
        ]
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def _check_aggregations(items: Iterable[Any]) -> None:
    """Raises UsageError for variables on several replicas that are synchronized ON_READ and have no aggregation."""
    unsaved = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.NONE)
    for one in items:
        parts: Any = getattr(one, "values", None) or [one]
        if (
            isinstance(one, tf.Variable)
            and len(parts) > 1
            and (one.synchronization, one.aggregation) == unsaved
        ):
            raise UsageError(
                f"the variable {parts[0].name.partition(':')[0]} has synchronization ON_READ and"
                " aggregation NONE, and TensorFlow cannot save such a variable of several"
                " replicas; give it the aggregation SUM, MEAN or ONLY_FIRST_REPLICA (each replica"
                " still keeps its own value)"
            )


def _native(variables: Iterable[Any]) -> list[Any]:
    """Returns TensorFlow's variables, those of Keras 3 included."""
    return [one.value if isinstance(one, keras.Variable) else one for one in variables]


def _all_finite(variables: Iterable[Any]) -> tf.Tensor:
    alike: dict[
        Any, list[Any]
    ] = {}  # small ones are summed together: each operation has to be traced, for a ms or so
    for number, variable in enumerate(v for v in _native(variables) if v.dtype.is_floating):
        small = variable.shape.is_fully_defined() and variable.shape.num_elements() <= _SMALL
        alike.setdefault((tuple(variable.shape), variable.dtype) if small else number, []).append(
            variable
        )
    groups = (tf.stack(group) if len(group) > 1 else group[0] for group in alike.values())
    sums = [tf.reduce_sum(tf.cast(group, tf.float32)) for group in groups]
    return tf.reduce_all(tf.math.is_finite(tf.stack(sums))) if sums else tf.constant(True)

"""TrainState: the complete state of a training run, as its checkpoints contain it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.python_state import ARRAYS, PythonState
from trainer_kit.checkpoints.state.random_state import (
    prepare_process_generators,
    task_state,
    untracked_model_state,
)
from trainer_kit.checkpoints.state.step_state import (
    STEP_STATE,
    StepState,
    get_handle_ids,
    restore_section,
)
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
from trainer_kit.runtime.replica_values import ReplicaLocalState, native_variable
from trainer_kit.runtime.tensorflow_internals import stop_async_saver
from trainer_kit.typing import Model, Optimizer, Optimizers, TaskLike, Variable

# The elements of a variable that is summed together with others of its shape
_SMALL = 4096
# The names that TensorFlow and Keras give to the states of their generators
_GENERATOR = re.compile(r"(^|/)(StateVar|seed_generator_state)\b")

_LOG = logging.getLogger(__name__)


class WeightsAverage(Protocol):
    """The moving averages of the weights. See MovingAverage."""

    @property
    def section(self) -> str:
        """The section of checkpoints with the average."""

    @property
    def more_section(self) -> str:
        """The section of checkpoints with the averages of other decays."""

    @property
    def variables(self) -> Mapping[str, tf.Variable] | Optimizer:
        """The average by key, or the optimizer that averages itself."""

    @property
    def more_variables(self) -> Mapping[str, Mapping[str, tf.Variable]]:
        """The averages with other decays by name and key."""

    def initialize(self) -> None:
        """Sets the averages to the weights, for a run that starts from step 0."""

    def reset(self, names: Sequence[str] | None = None, keys: Sequence[str] | None = None) -> None:
        """Sets averages to the weights, those of `names` and `keys` or all."""


class TrainState:
    """The model, optimizers, global step, moving average, random state and run state of a run.

    Create it in strategy scope.

    Args:
      global_step: The step counter, an int64 scalar.
      model: A built Keras 3 model, tf_keras model or tf.Module.
      optimizer: A built optimizer or a dict of them. None for evaluation, which has no run state
        either.
      average: A MovingAverage, or an object with the same methods. None if there is none.
      task: The task, whose own variables and generators belong to the run. None if there is none.
      seed: The seed of the process's random generators.
      items: Further parts of every checkpoint, the best included, by name. They are restored as far
        as both sides have them.
      trainable: The variables that were trainable before some were frozen. Empty if none were.
      require_exact: Whether state that cannot be saved is an error.

    Attributes:
      checkpoint: The checkpoint of the complete state.
      python_state: The Python state, which takes further parts before the restore.
      step_state: The variables that training changes and that no other section contains.
      optional_sections: The names of the further parts.
      random_generator: The generator that random operations of training steps draw from. It is
        TensorFlow's global one, which checkpoints contain. None for evaluation.
      model_replicas: The model's values on each replica. An evaluation shares those that a
        checkpoint contains.
      variables_lock: A lock that is held while variables have other values for an evaluation, since
        a late save comes from another thread.
      is_step_tracked: Whether `track_step_state` was called, so that checkpoints contain what the
        training step writes.

    Raises:
      UsageError: when the name of a further part is already taken.
    """

    def __init__(
        self,
        global_step: tf.Variable,
        model: Model,
        optimizer: Optimizers | None,
        average: WeightsAverage | None,
        task: TaskLike | None,
        seed: int,
        items: Mapping[str, object] | None = None,
        trainable: Sequence[Variable] = (),
        require_exact: bool = False,
    ) -> None:
        self._global_step = global_step
        self._model = model
        self._average = average
        self._strategy = tf.distribute.get_strategy()
        self._require_exact = require_exact
        self.variables_lock = threading.RLock()
        self.python_state = PythonState()
        optimizers = [optimizer]
        if isinstance(optimizer, Mapping):
            optimizers = list(optimizer.values())
        roots = {"model": model, "task": task}
        self.step_state = StepState(roots, exclude=optimizers)

        # The sections that an evaluation restores, and best weights contain
        self._evaluation_sections = {
            "task": task_state(task, model),
            "random/model": untracked_model_state(model),
        }
        model_state = self._evaluation_sections["random/model"]
        random_items = {"model": model_state} if model_state else {}
        evaluation_items = {
            "task": self._evaluation_sections["task"],
            "random": random_items,
        }

        # The sections of the complete checkpoint besides the global step and the model
        sections: dict[str, Any] = {}
        self.random_generator: tf.random.Generator | None = None
        if optimizer is not None:
            process_generators = prepare_process_generators(seed)
            generators = {**process_generators, **random_items}
            self.random_generator = tf.random.get_global_generator()
            sections = {
                "run_state": self.python_state.variable,
                ARRAYS: self.python_state.arrays,
                "task": evaluation_items["task"],
                "random": generators,
            }

        self._items: dict[str, Any] = dict(items or {})
        self.optional_sections = frozenset(items or ())
        reserved_names = {
            *OMITTABLE_SECTIONS,
            ARRAYS,
            STEP_STATE,
            "global_step",
            "model",
            "optimizer",
        }
        if conflicts := self.optional_sections & reserved_names:
            names = ", ".join(sorted(conflicts))
            raise UsageError(
                f"every checkpoint already has a part named {names}; give your item another name"
            )

        sections |= {"optimizer": optimizer, **self._average_section(), **self._items}
        sections[STEP_STATE] = self.step_state.section
        evaluation_items[STEP_STATE] = self.step_state.section_of_weights
        self.checkpoint = create_training_checkpoint(
            global_step=global_step, model=model, trainable=trainable, **sections
        )
        self._saved_with_weights = evaluation_items
        self._optimizer = optimizer
        self.model_replicas = ReplicaLocalState(lambda: self._model.variables, self._strategy)

        self.is_step_tracked = False
        self._step_is_traced = False
        # The graphs of evaluations that are checked
        self._checked_graphs: set[tf.Graph] = set()
        # The checkpoint that was restored except for what the first step creates
        self._partly_restored_path: str | None = None
        self._weights_finite_fn = tf.function(self.compute_weights_finite, autograph=False)
        # The number of variables that the function checks, and the function
        self._others_finite_fn: tuple[int, Any] = (0, None)
        # The states of random generators, collected at the first evaluation
        self._generators: list[tf.Variable] | None = None
        self._generator_snapshot: list[tuple[tf.Variable, tf.Tensor]] = []

    @property
    def other_variables(self) -> list[tf.Variable]:
        """The variables of the task and the training step besides model, optimizer and average."""
        sections = (*self._evaluation_sections.values(), self.step_state.variables)
        variables = []
        for section in sections:
            for name in sorted(section):
                item = section[name]
                if isinstance(item, tf.Variable):
                    variables.append(item)
        return variables

    @functools.cached_property
    def weights_checkpoint(self) -> tf.train.Checkpoint:
        """The checkpoint of the weights alone, as the best checkpoint contains them.

        It is created at first use.
        """
        return create_weights_checkpoint(
            global_step=self._global_step,
            model=self._model,
            **self._items,
            **self._saved_with_weights,
        )

    def add_root(self, name: str, owner: object) -> None:
        """Adds an object whose attributes are saved, under paths that begin with `name`.

        Call it before the restore.
        """
        self.step_state.roots[name] = owner

    def allow_partial_restore(self) -> None:
        """Leaves out variables of a checkpoint that this run lacks or that have another shape."""
        self.step_state.allow_partial = True

    def add_replica_states(self) -> None:
        """Adds each replica's local values to checkpoints.

        Examples are the averages of batch normalization.
        """
        replicas = self.model_replicas
        self.python_state.add("replicas", replicas.state, replicas.restore)
        others = ReplicaLocalState(lambda: self.other_variables, self._strategy)
        self.python_state.add("replicas of other variables", others.state, others.restore)

        # Replicas draw unequally often where they take different branches.
        if generator := self.random_generator:
            draws = ReplicaLocalState(lambda: [generator.state], self._strategy)
            self.python_state.add("replicas of the random generator", draws.state, draws.restore)

    def after_restore(self, path: str | None) -> None:
        """Restores the state that is not in variables, after a checkpoint was restored.

        Runs eagerly, in strategy scope.

        Args:
          path: The checkpoint's prefix, or None when there was none. State that it does not contain
            starts from the beginning. The moving average starts at the weights.
        """
        graph = None if path is None else CheckpointGraph(path)
        has_uncreated_variables = graph is not None and find_uncreated_variables(
            self.checkpoint, graph, self.optional_sections
        )
        self._partly_restored_path = path if has_uncreated_variables else None

        self._restore_evaluation_state(graph)
        if graph is None or not graph.has_section("run_state"):
            self.python_state.clear()
        else:
            self.python_state.load(graph)

        if graph is not None:
            self._reset_missing_averages(graph)
        elif self._average is not None:
            self._average.initialize()

    def restore_weights(self, path: str) -> None:
        """Restores the state that an evaluation uses from a checkpoint of a run.

        This is the global step, the model, the average, and the state of the task and the training
        step, but no optimizer. Of the run state it is only the task's part, which best weights
        lack. Runs eagerly, in strategy scope.

        Args:
          path: The checkpoint's prefix.

        Raises:
          UsageError: when the checkpoint does not fit.
          StorageError: when the checkpoint is gone or damaged.
        """
        items = {**self._average_section(), **self._items}
        checkpoint = create_training_checkpoint(
            global_step=self._global_step, model=self._model, **items
        )
        restore(checkpoint, path, strict=False, optional_sections=self.optional_sections)
        graph = CheckpointGraph(path)
        self._restore_evaluation_state(graph)
        self.python_state.load_part(graph, "task")
        self._reset_missing_averages(graph)

    def _reset_missing_averages(self, graph: CheckpointGraph) -> None:
        """Sets the averages that a checkpoint lacks to the weights.

        Best weights lack all averages. A restore in part may lack those of some variables.
        """
        if self._average is None:
            return
        if not graph.has_section(self._average.section):
            self._average.reset()
            return

        saved_shapes = graph.shapes_by_name(NAME_DEPTH)
        sections: dict[str, tuple[str, Mapping[str, tf.Variable] | Optimizer]] = {
            AVERAGE: (self._average.section, self._average.variables)
        }
        for name, more_averages in self._average.more_variables.items():
            more_section = f"{self._average.more_section}/{name}"
            sections[name] = (more_section, more_averages)

        for name, (section, averages) in sections.items():
            # The averages of an optimizer that averages are restored with it.
            if not isinstance(averages, Mapping):
                continue
            missing_keys = []
            for key, variable in averages.items():
                saved_shape = saved_shapes.get(f"{section}/{key}")
                if saved_shape != tuple(variable.shape):
                    missing_keys.append(key)
            if missing_keys:
                self._average.reset([name], missing_keys)

    def has_averages(self, path: str) -> bool:
        """Whether the checkpoint at `path` contains the moving averages, if the run keeps any.

        Best weights do not.
        """
        if self._average is None:
            return True
        graph = CheckpointGraph(path)
        return graph.has_section(self._average.section)

    def track_attributes(self, exclude: Iterable[Variable]) -> None:
        """Adds the variables in attributes of the task and the model, and restores them.

        Called after each restore, also of nothing, and before weights are written. Runs eagerly,
        from any thread.

        Args:
          exclude: Variables that need no saving, such as those of metrics that are reset.
        """
        with self.variables_lock, self._strategy.scope():
            handles = self._get_tracked_handles(exclude)
            has_grown = self.step_state.add_attributes(handles)
            self._after_variables_added(has_grown)

    def before_save(self, exclude: Iterable[Variable]) -> None:
        """Brings all state into variables that checkpoints contain, right before a save.

        Runs eagerly, on the host.

        Args:
          exclude: See `track_attributes`.

        Raises:
          UsageError: when a part of the Python state cannot be saved.
        """
        self.track_attributes(exclude)
        self._after_variables_added(self.python_state.store())

    def track_step_state(self, graph: tf.Graph | None, exclude: Sequence[Variable]) -> None:
        """Adds and restores all state of the training step, before the first step. Runs eagerly.

        Args:
          graph: The graph of the traced loop or step. None when neither is compiled, so that its
            writes are not known.
          exclude: See `track_attributes`.

        Raises:
          UsageError: when the run lacks variables of the restored checkpoint, or state that an
            exact resume requires cannot be saved.
        """
        self.is_step_tracked = True
        self._step_is_traced = graph is not None
        self.track_attributes(exclude)
        if graph is not None:
            with self._strategy.scope():
                handles = self._get_tracked_handles(exclude)
                has_grown = self.step_state.add_traced_writes(graph, handles, self._require_exact)
                self._after_variables_added(has_grown)
            self.check_first_step()
        self.end_restore()

    def end_restore(self) -> None:
        """Ends the restore before the first step. See StepState. Runs eagerly, in strategy scope.

        Raises:
          UsageError: when the training step is traced and the run lacks variables of the
            checkpoint.
        """
        has_grown = self.step_state.end_restore(strict=self._step_is_traced)
        self._after_variables_added(has_grown)

    def check_first_step(self) -> None:
        """Checks once after a restore that optimizers inside the model are complete.

        They must have created all variables of the checkpoint.

        Raises:
          UsageError: when they have not.
        """
        if self._partly_restored_path is not None:
            path = self._partly_restored_path
            self._partly_restored_path = None
            check_variables_created(self.checkpoint, path, self.optional_sections)

    def check_evaluation(self, graph: tf.Graph | None, exclude: Iterable[Variable]) -> None:
        """Warns of variables that an evaluation changes and training uses.

        Generators are excepted, since they are restored. Called after each evaluation. It checks
        each graph once, when the training step is known.

        Args:
          graph: The graph of the evaluation. None when it is not compiled.
          exclude: See `track_attributes`.

        Raises:
          UsageError: when there is such a variable and an exact resume is required.
        """
        if graph is None or not self.is_step_tracked or graph in self._checked_graphs:
            return

        self._checked_graphs.add(graph)
        generators = self._generators or ()
        excluded = map(native_variable, exclude)
        handles = get_handle_ids([*excluded, *generators])
        self.step_state.report_evaluation(graph, handles, self._require_exact)

    @contextlib.contextmanager
    def preserve_variables(self, *, everything: bool = False) -> Iterator[None]:
        """Restores variables at the end of this context. Runs eagerly, on the host.

        Args:
          everything: Whether to restore all variables of the checkpoint. Otherwise those of the
            task and the training step are restored.
        """
        if everything:
            view = tf.train.TrackableView(self.checkpoint)
            items = view.descendants()
            variables = [item for item in items if isinstance(item, tf.Variable)]
        else:
            variables = self.other_variables
        parts = _get_replica_variables(variables)
        snapshot = [(part, part.read_value()) for part in parts]
        try:
            yield
        finally:
            for part, value in snapshot:
                part.assign(value)

    def remember_generators(self) -> None:
        """Remembers the states of all random generators for `restore_generators`.

        An evaluation that draws random numbers would change those of later training, and a resumed
        run does not repeat recorded evaluations. Runs eagerly, on the host.
        """
        if self._generators is None:
            trains = self._optimizer is not None
            checkpoint = self.checkpoint if trains else self.weights_checkpoint
            view = tf.train.TrackableView(checkpoint)
            states = []
            for item in view.descendants():
                if isinstance(item, tf.Variable) and _GENERATOR.search(item.name):
                    states.append(item)
            self._generators = _get_replica_variables(states)
        self._generator_snapshot = [(state, state.read_value()) for state in self._generators]

    def restore_generators(self) -> None:
        """Restores the random generators to the states that were remembered last, once.

        Runs eagerly, from any thread.
        """
        snapshot = self._generator_snapshot
        self._generator_snapshot = []
        for state, value in snapshot:
            state.assign(value)

    def _get_tracked_handles(self, exclude: Iterable[Variable]) -> set[int]:
        """Returns the handles of all variables in other sections, and of `exclude`."""
        view = tf.train.TrackableView(self.checkpoint)
        items = list(view.descendants())
        variables = [item for item in items if isinstance(item, tf.Variable)]

        # What TensorFlow cannot save is reported before anything runs.
        unsupported = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.NONE)
        for variable in variables:
            parts: Any = getattr(variable, "values", None) or [variable]
            is_unsupported = (variable.synchronization, variable.aggregation) == unsupported
            if len(parts) > 1 and is_unsupported:
                name = parts[0].name.partition(":")[0]
                raise UsageError(
                    f"the variable {name} has synchronization ON_READ and aggregation NONE, "
                    "and TensorFlow cannot save such a variable of several replicas; "
                    "give it the aggregation SUM, MEAN or ONLY_FIRST_REPLICA "
                    "(each replica still keeps its own value)"
                )

        # TensorFlow saves the slots of a Keras 2 optimizer without showing them, also those of a
        # wrapped optimizer.
        optimizers = [self._optimizer]
        for item in items:
            is_variable = isinstance(item, tf.Variable)
            if not is_variable and hasattr(item, "get_slot_names"):
                optimizers.append(item)
        slots: list[Variable] = []
        for owner in optimizers:
            slots += list_optimizer_variables(owner)
        others = map(native_variable, [*slots, *exclude])
        return get_handle_ids([*variables, *others])

    def _after_variables_added(self, grown: bool) -> None:
        self._generators = None
        if grown:
            # The saver knows only the variables of its first save.
            error = stop_async_saver(self.checkpoint)
            # The manager reports the failure at its next `sync`, but without the reason.
            if error is not None:
                _LOG.warning("a checkpoint was not written: %s", error)

    def _restore_evaluation_state(self, graph: CheckpointGraph | None) -> None:
        """Restores the state that an evaluation uses besides weights and average.

        It is restored as far as both sides have it. None stands for a run without a checkpoint.
        """
        has_grown = self.step_state.restore(graph)
        self._after_variables_added(has_grown)
        if self._optimizer is None:
            self.step_state.report_unrestored()
        if graph is None:
            return

        for section, items in self._evaluation_sections.items():
            keys = graph.get_section_keys(section)
            saved_shapes = {name: graph.shapes[key] for name, key in keys.items()}
            matching_items = {}
            for name, item in items.items():
                shape = tuple(item.shape)
                if saved_shapes.get(name) == shape:
                    matching_items[name] = item
            if matching_items:
                restore_section(graph.prefix, section, matching_items)

    def _average_section(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        sections = {self._average.section: self._average.variables}
        if self._average.more_variables:
            sections[self._average.more_section] = self._average.more_variables
        return sections

    def weights_are_finite(self) -> bool:
        """Whether all weights are finite. Runs eagerly, on the host."""
        is_finite = self._weights_finite_fn()
        return bool(is_finite.numpy())

    def all_finite(self) -> bool:
        """Whether the weights, the optimizers' variables and the average are finite.

        Runs eagerly, on the host.
        """
        others = list_optimizer_variables(self._optimizer)
        sections = self._average_section()
        for section in sections.values():
            # The averages of an optimizer that averages are among its variables.
            if isinstance(section, Mapping):
                others += tf.nest.flatten(section)

        # Some optimizers create their variables in the first step.
        count, others_finite_fn = self._others_finite_fn
        if count != len(others):
            others_finite_fn = tf.function(lambda: _all_finite(others), autograph=False)
            self._others_finite_fn = (len(others), others_finite_fn)

        if not self.weights_are_finite():
            return False
        if not others:
            return True
        is_finite = others_finite_fn()
        return bool(is_finite.numpy())

    @tf.autograph.experimental.do_not_convert
    def compute_weights_finite(self) -> tf.Tensor:
        """Returns whether all floating-point variables of the model are finite.

        A sum is finite only if all its terms are, and it reads each value once. A sum that
        overflows float32 also belongs to a model that has diverged. Runs in graph.

        Returns:
          A bool scalar.
        """
        return _all_finite(self._model.variables)


def list_optimizer_variables(
    optimizer: Optimizers | None,
) -> list[Variable]:
    """Returns the variables of an optimizer of any kind, or of a dict of them."""
    if isinstance(optimizer, Mapping):
        all_variables: list[Variable] = []
        for item in optimizer.values():
            all_variables += list_optimizer_variables(item)
        return all_variables
    # It is a method of the optimizers of tf_keras.optimizers.legacy.
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def _get_replica_variables(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the variable of each replica for mirrored variables, and other variables as is."""
    replica_variables: list[tf.Variable] = []
    for variable in variables:
        replica_variables += getattr(variable, "values", None) or [variable]
    return replica_variables


def _all_finite(variables: Iterable[Variable]) -> tf.Tensor:
    """Returns whether all floating-point variables are finite, a bool scalar."""
    # Small variables of one shape and dtype are summed together, since each operation has to be
    # traced, which takes about a millisecond.
    groups: dict[Any, list[tf.Variable]] = {}
    native_variables = [native_variable(variable) for variable in variables]
    floating = [variable for variable in native_variables if variable.dtype.is_floating]
    for number, variable in enumerate(floating):
        shape = variable.shape
        is_small = shape.is_fully_defined() and shape.num_elements() <= _SMALL
        key = (tuple(shape), variable.dtype) if is_small else number
        group = groups.setdefault(key, [])
        group.append(variable)

    sums = []
    for group in groups.values():
        values = tf.stack(group) if len(group) > 1 else group[0]
        values = tf.cast(values, tf.float32)
        sums.append(tf.reduce_sum(values))
    if not sums:
        return tf.constant(True)
    are_finite = tf.math.is_finite(tf.stack(sums))
    return tf.reduce_all(are_finite)

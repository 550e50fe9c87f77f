"""The section `step_state` of a checkpoint.

It contains the variables that training changes and that no other section contains. It has two
sources. A variable in the attributes of the task, the model or the trainer is named by the path of
these attributes, `task/critic/_layers/0/_kernel`. Any other variable that the traced training loop
writes, such as one of a closure, is named by its place in the graph, its dtype and its shape,
`written/0 float32 [3, 4]`, since names that Keras or TensorFlow give depend on what the process did
before. A variable that the loop only reads, and that no attribute leads to, is in no checkpoint.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph, create_read_error
from trainer_kit.checkpoints.state.random_state import TRACKED_BY_TASKS, variables_below
from trainer_kit.checkpoints.state.traced_writes import (
    describe_handle,
    find_captured_handles,
    find_written_handles,
    variables_by_handle,
)
from trainer_kit.errors import UsageError
from trainer_kit.runtime.tensorflow_internals import get_trackable_class

STEP_STATE = "step_state"
_WRITTEN_PREFIX = "written/"
# The counters of the loops of a tf_keras model, which are unused here
_COUNTERS = ("_train_counter", "_test_counter", "_predict_counter")
_TRACKABLE = (
    *TRACKED_BY_TASKS,
    get_trackable_class(),
    keras.Metric,
    keras.Optimizer,
    keras.Variable,
)
_LOG = logging.getLogger(__name__)


class StepState:
    """The variables of the section, which grows as they are created.

    Use it eagerly, in strategy scope.

    Args:
      roots: The objects whose attributes are saved, by the first part of their paths. The model
        comes before the task.
      exclude: Objects whose attributes are not saved here, such as the optimizers of the run.

    Attributes:
      variables: The variables by name.
      section: The section of checkpoints, which contains the variables as attributes.
      section_of_weights: The section of best weights. It lacks what only the training step leads
        to, since best weights may be saved before the training step is traced.
      allow_partial: Whether to leave out variables of a checkpoint that this run lacks or that have
        another shape.
    """

    def __init__(self, roots: Mapping[str, object], exclude: Sequence[object] = ()) -> None:
        self.roots = dict(roots)
        self.variables: dict[str, tf.Variable] = {}
        self.section = tf.Module()
        self.section_of_weights = tf.Module()
        self.allow_partial = False
        self._exclude = exclude
        self._restore_path: str | None = None
        # The shapes in the checkpoint that was restored last
        self._saved_shapes: dict[str, tuple[int, ...]] = {}
        self._restored_names: set[str] = set()
        # The checkpoint's values of variables that do not exist yet
        self._pending_variables: dict[str, tf.Variable] = {}
        self._used_handles: set[int] = set()
        self._reported_texts: set[str] = set()

    @property
    def needs_trace(self) -> bool:
        """Whether the restored checkpoint has variables that only a trace can find and restore.

        They are not in attributes, but in the graph of the training loop.
        """
        unrestored = self._saved_shapes.keys() - self._restored_names
        return any(name.startswith(_WRITTEN_PREFIX) for name in unrestored)

    def restore(self, graph: CheckpointGraph | None) -> bool:
        """Restores the variables that exist.

        Variables that are added before the first step are restored as they are added.

        Args:
          graph: What the restored checkpoint contains, or None when there was none.

        Returns:
          Whether variables were added.

        Raises:
          StorageError: when the checkpoint cannot be read.
        """
        self._restore_path = None if graph is None else graph.prefix
        # Values of an earlier checkpoint that no variable took
        for name in self._pending_variables:
            del self.variables[name]
            delattr(self.section, name)
            delattr(self.section_of_weights, name)
        self._pending_variables = {}

        self._saved_shapes = {}
        if graph is not None:
            keys = graph.get_section_keys(STEP_STATE)
            self._saved_shapes = {name: graph.shapes[key] for name, key in keys.items()}

        self._restored_names = set()
        attributes: dict[str, tf.Variable] = {}
        if self._saved_shapes.keys() - self.variables.keys():
            attributes = self._attributes()
        new = {
            name: variable
            for name, variable in attributes.items()
            if name in self._saved_shapes and name not in self.variables
        }
        self._add(new)
        self._restore_variables(self.variables)
        return bool(new)

    def add_attributes(self, tracked_handles: set[int]) -> bool:
        """Adds the variables in attributes that no section contains.

        Args:
          tracked_handles: The `id` of each handle that other sections contain or that needs no
            saving.

        Returns:
          Whether there are any.
        """
        tracked_handles = tracked_handles | get_handle_ids(self.variables.values())
        new = {
            name: variable
            for name, variable in self._attributes().items()
            if not get_handle_ids([variable]) & tracked_handles
        }
        self._add(new)
        self._restore_variables(new)
        return bool(new)

    def add_traced_writes(self, graph: tf.Graph, tracked_handles: set[int], required: bool) -> bool:
        """Adds the variables that a training loop writes and no section contains.

        Args:
          graph: The graph of the traced loop or step.
          tracked_handles: See `add_attributes`.
          required: Whether state that cannot be saved, or was not saved, is an error.

        Returns:
          Whether there are any.

        Raises:
          UsageError: if `required`, when the loop changes a table or a queue, or the checkpoint
            lacks a variable.
        """
        self._used_handles = {id(handle) for handle in find_captured_handles(graph)}
        tracked_handles = tracked_handles | get_handle_ids(self.variables.values())
        variables = variables_by_handle(graph)
        new: dict[str, tf.Variable] = {}
        for handle in find_written_handles(graph):
            if id(handle) in tracked_handles:
                continue
            variable = variables.get(id(handle))
            if variable is None:
                self._report(
                    f"the training step changes {describe_handle(handle)}, "
                    "which no checkpoint contains: "
                    "a resumed run will differ from one that was never stopped; "
                    "keep such state in tf.Variables",
                    required,
                )
                continue

            dtype = variable.dtype.name
            shape = variable.shape.as_list()
            new[f"{_WRITTEN_PREFIX}{len(new)} {dtype} {shape}"] = variable

        self._add(new)
        self._restore_variables(new, required)
        return bool(new)

    def end_restore(self, strict: bool) -> bool:
        """Ends the restore before the first step.

        Attributes may get variables later, as when a callback or an evaluation creates them.
        Checkpoints keep the values of missing variables, which are restored when the variables
        appear. Variables that the checkpoint lacks begin with their initial values.

        Args:
          strict: Whether a variable of another shape, or one that the loop no longer writes, is an
            error.

        Returns:
          Whether variables were added to the section.

        Raises:
          UsageError: if `strict` and not `allow_partial`, when there is such a variable.
        """
        if self._restore_path is None:
            return False

        unrestored = sorted(self._saved_shapes.keys() - self._restored_names)
        late_names: list[str] = []
        if not self.allow_partial:
            late_names = [
                name
                for name in unrestored
                if name not in self.variables and self._may_appear_later(name)
            ]
        unusable_names = [name for name in unrestored if name not in late_names]

        if unusable_names:
            text = (
                f"{self._restore_path} contains {', '.join(unusable_names)}, "
                "which this run does not have in that shape before its first step; "
                "use the code and the trainer_kit that saved it, "
                "start again with --from_step=0, or leave it out with allow_partial_restore"
            )
            if strict and not self.allow_partial:
                raise UsageError(text)
            self._report(text)

        if late_names:
            self._report(
                f"{self._restore_path} contains {', '.join(late_names)}, "
                "which this run does not have yet; checkpoints keep the values, "
                "which are restored when the attributes get these variables"
            )
            graph = CheckpointGraph(self._restore_path)
            keys = graph.get_section_keys(STEP_STATE)
            self._pending_variables = {
                name: tf.Variable(graph.value(keys[name]), trainable=False) for name in late_names
            }
            self._add(self._pending_variables)

        self._restore_path = None
        return bool(self._pending_variables)

    def report_unrestored(self) -> None:
        """Warns of variables that an evaluation does not restore.

        Only the training step leads to these variables.
        """
        unrestored = sorted(self._saved_shapes.keys() - self._restored_names)
        names = [
            name
            for name in unrestored
            if name in self.variables or name.startswith(_WRITTEN_PREFIX)
        ]
        if names:
            self._report(
                f"{self._restore_path} contains {', '.join(names)}, "
                "which this evaluation does not restore; "
                "keep it in an attribute of the task or the model, in the same shape"
            )

    def report_evaluation(self, graph: tf.Graph, exclude: set[int], required: bool) -> None:
        """Reports what an evaluation changes and the training step uses.

        An example is the state of a recurrent layer. A resumed run does not repeat recorded
        evaluations, and begins with the values from before them.

        Args:
          graph: The graph of the evaluation.
          exclude: The `id` of each handle that needs no saving or is restored afterwards.
          required: Whether such a change is an error.

        Raises:
          UsageError: if `required`, when there is such a change.
        """
        variables = variables_by_handle(graph)
        # Training uses these, and nothing restores them after the evaluation.
        shared_handles = self._used_handles - exclude
        changed_handles = [
            handle for handle in find_written_handles(graph) if id(handle) in shared_handles
        ]
        names = []
        for handle in changed_handles:
            # Tables, queues and iterators have no variable.
            variable = variables.get(id(handle))
            names.append(getattr(variable, "name", describe_handle(handle)))
        names.sort()

        if names:
            self._report(
                f"the evaluation changes {', '.join(names)}, which training uses: "
                "a resumed run does not repeat recorded evaluations, "
                "so it will differ from one that was never stopped; "
                "use a separate variable for evaluation, or restore the value in validation_step",
                required,
            )

    def _may_appear_later(self, name: str) -> bool:
        """Whether an attribute may still get the variable `name`."""
        for root, item in self.roots.items():
            if name.startswith(f"{root}/"):
                # Earlier versions followed functions, too.
                attribute = name.removeprefix(f"{root}/").partition("/")[0]
                return not inspect.isroutine(getattr(item, attribute, None))
        return False

    def _attributes(self) -> dict[str, tf.Variable]:
        """Returns the variables in the attributes of the roots by name, each once."""
        variables: dict[str, tf.Variable] = {}
        visited = list(self._exclude)
        for root, item in self.roots.items():
            below = variables_below(item, exclude=visited, kinds=_TRACKABLE, nearest_first=True)
            for path, variable in below.items():
                if not path.endswith(_COUNTERS):
                    variables[f"{root}/{path}"] = variable
            visited += [item, *below.values()]
        return variables

    def _add(self, new: Mapping[str, tf.Variable]) -> None:
        self.variables.update(new)
        for name, variable in new.items():
            setattr(self.section, name, variable)
            if not name.startswith(_WRITTEN_PREFIX):
                setattr(self.section_of_weights, name, variable)

    def _restore_variables(
        self, variables: Mapping[str, tf.Variable], required: bool = False
    ) -> None:
        """Restores variables from the checkpoint, if one is being restored.

        It reports those that the checkpoint lacks.
        """
        for name in variables.keys() & self._pending_variables.keys():
            value = self._pending_variables.pop(name)
            if value.shape == variables[name].shape:
                variables[name].assign(value)
                self._report(
                    f"{name} was created after the restore, "
                    "and has the value of the checkpoint from now on; "
                    "an evaluation that created it used its initial value: create it in build_model"
                )

        if self._restore_path is None:
            return
        missing = sorted(variables.keys() - self._saved_shapes.keys())
        if missing:
            self._report(
                f"{self._restore_path} does not contain {', '.join(missing)}, "
                "which keeps its current value",
                required,
            )

        # A variable of another shape counts as not restored, which `end_restore` reports.
        matching = {
            name: variable
            for name, variable in variables.items()
            if self._saved_shapes.get(name) == tuple(variable.shape)
        }
        self._restored_names |= matching.keys()
        if matching:
            restore_section(self._restore_path, STEP_STATE, matching)

    def _report(self, text: str, required: bool = False) -> None:
        """Warns once.

        Raises:
          UsageError: if `required`.
        """
        if required:
            raise UsageError(f"trainer.require_exact_resume: {text}")
        if text not in self._reported_texts:
            self._reported_texts.add(text)
            _LOG.warning("%s", text)


def get_handle_ids(variables: Iterable[tf.Variable]) -> set[int]:
    """Returns the `id` of each resource handle of variables.

    A mirrored variable has one handle per replica.
    """
    handle_ids = set()
    for variable in variables:
        for part in getattr(variable, "values", None) or [variable]:
            handle_ids.add(id(part.handle))
    return handle_ids


def restore_section(path: str, section: str, items: Mapping[str, tf.Variable]) -> None:
    """Restores items of a section. Runs eagerly, in strategy scope.

    Args:
      path: The prefix of the checkpoint.
      section: The section, or a part of one, "a/b".
      items: The items to restore by name. The checkpoint must contain them in the same shape.

    Raises:
      StorageError: when the checkpoint cannot be read.
    """
    root, _, below = section.partition("/")
    contents = {below: dict(items)} if below else dict(items)
    target = tf.train.Checkpoint(**{root: contents})
    try:
        target.read(path).expect_partial().assert_existing_objects_matched()
    except (tf.errors.OpError, IndexError) as error:
        raise create_read_error(path, error) from error

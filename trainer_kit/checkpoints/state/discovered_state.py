"""The section `step_state` of a checkpoint: state that training changes and that no other section holds.

A module, a second model or optimizer, a generator or a hash table that a task, a model or a function holds is found
when the step is traced: every variable that its graph writes to, and that the checkpoint does not hold yet, is added
under the path that leads to it. A resumed run restores it as soon as it is found, before the first step.

No graph shows what actions, callbacks or `initialize` write to, such as a target network. Such values are compared
before the first step and before each save, and added once they have changed, so no checkpoint holds a frozen model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer_kit.checkpoints.state.attribute_paths import reachable
from trainer_kit.checkpoints.state.fingerprints import Fingerprints
from trainer_kit.checkpoints.state.object_graph import readable
from trainer_kit.checkpoints.state.traced_writes import described, variable_of, variables_used, written
from trainer_kit.errors import StorageError, UsageError

SECTION = "step_state"
_ADVICE = "store it in an attribute of the task or the model, where trainer_kit finds and saves it"
_LOG = logging.getLogger(__name__)


class DiscoveredState:
    """Variables and hash tables by the path that leads to them.

    Args:
      roots: The task, model and trainer, by the first part of the paths.
      partial: Whether to skip items with another shape in a checkpoint, with a warning.

    Attributes:
      items: A dict from path to variable or table, as a checkpoint holds them.
      section: The section of the checkpoint, which holds the items as attributes named by their paths.
    """

    def __init__(self, roots: Mapping[str, Any], partial: bool = False) -> None:
        self.roots, self.partial = dict(roots), partial
        self.items: dict[str, Any] = {}
        self.section = tf.Module()
        self._path: str | None = None
        self._saved: dict[str, Any] = {}  # path -> shape, of the checkpoint that was restored last
        self._reported: set[str] = set()
        self._watched = Fingerprints()  # by path: what the training step does not write to, as far as is known
        self._hidden = Fingerprints()  # by description: what it reads and no path leads to
        self._used: set[int] = set()  # the `id` of each handle that the training step reads or writes

    def restored(self, path: str | None) -> bool:
        """Restores this section from the checkpoint at `path`, as far as its items can be found already.

        Args:
          path: The prefix of the restored checkpoint; None when there was none.

        Returns:
          Whether items were added.

        Raises:
          UsageError: when an item has another shape in the checkpoint.
          StorageError: when the checkpoint cannot be read.
        """
        self._path, self._saved = path, saved_section(path, SECTION) if path else {}
        known = reachable(self.roots) if self._saved.keys() - self.items.keys() else {}
        # In the order of a run that was never stopped, so that both write the same bytes; that of a file differs.
        new = {name: item for name, item in known.items() if name in self._saved and name not in self.items}
        if late := sorted(self.items.keys() - self._saved.keys()) if path else []:
            self._report(f"{path} does not hold {', '.join(late)}, which keeps its current value", False)
        self._hold(new)
        self._restore(self.items)
        return bool(new)

    def watch(self, found: Mapping[str, Any], held: set[int]) -> None:
        """Remembers the values of items that no section holds, for `add_changed`.

        Called before the task initializes the model, and after each restore; values remembered earlier stay.

        Args:
          found: The result of `reachable`.
          held: See `add_written`.
        """
        self._watched.watch(self._not_held(found, held))

    def add_changed(self, apart: set[int] | None = None, required: bool = False) -> bool:
        """Adds watched items whose values have changed; to be called before a save.

        Args:
          apart: None if `add_written` or `add_reachable` was called. Otherwise `held` of `add_written`; then items that
            were created since `watch` are added too.
          required: See `add_written`.

        Returns:
          Whether items were added.

        Raises:
          UsageError: if `required`, when changed state cannot be saved or was not restored.
        """
        new = {name: item for name, item in self._watched.take_changed().items() if name not in self.items}
        if apart is not None:
            made = self._not_held(reachable(self.roots), apart | handles(self._watched.items()))
            self._report_late(made, required)
            new |= made
        self._hold(new)
        if hidden := sorted(self._hidden.take_changed()):
            self._report(
                f"{', '.join(hidden)} changes between training steps and they use it, but no checkpoint holds it: a "
                f"resumed run will differ from one that was never stopped; {_ADVICE}",
                required,
            )
        return bool(new)

    def add_written(self, graph: Any, held: set[int], required: bool = False) -> bool:
        """Adds the variables that the training step writes to, and restores them from the resumed checkpoint.

        Args:
          graph: The graph of the traced training loop or step.
          held: The `id` of each handle that other sections hold or that needs no saving.
          required: Whether state that cannot be saved is an error.

        Returns:
          Whether items were added.

        Raises:
          UsageError: if `required`, when state cannot be saved or was not saved; see also `restored`.
        """
        held = held | handles(self.items.values())
        self._used = {id(outer) for outer, _ in graph.captures}
        left = {id(handle): handle for handle in written(graph) if id(handle) not in held}
        known = held | left.keys() | handles(self._watched.items())
        read = {id(handle): handle for handle in variables_used(graph) if id(handle) not in known}
        found = reachable(self.roots) if left or read else {}
        self._watch_read(graph, read, found)
        new = {name: item for name, item in found.items() if handles([item]) & left.keys()}
        named = handles(new.values())
        if lost := [described(graph, handle) for number, handle in left.items() if number not in named]:
            self._report(
                f"the training step changes {', '.join(sorted(lost))}, which no checkpoint holds: a resumed run will "
                f"differ from one that was never stopped; {_ADVICE}",
                required,
            )
        return self._add(new, required)

    def add_reachable(self, held: set[int], required: bool = False, begun: bool = False) -> bool:
        """Adds all reachable items that are not held: steps that are not compiled have no graph to show their writes.

        Args:
          held: See `add_written`.
          required: See `add_written`.
          begun: Whether steps were taken since the restore; items that they created started from initial values.
        """
        new = self._not_held(reachable(self.roots), held)
        if begun:
            self._report_late(new, required)
        return self._add(new, required)

    def report_evaluation(self, graph: Any, apart: set[int], required: bool = False) -> None:
        """Warns of variables that an evaluation changes and the training step uses.

        An example is the state of a recurrent layer with stateful=True: the checkpoint of a step holds its value from
        before the evaluation, and a resumed run does not repeat recorded evaluations.

        Args:
          graph: The graph of the evaluation.
          apart: The `id` of each handle that needs no saving or is restored afterwards.
          required: Whether such a variable is an error.

        Raises:
          UsageError: if `required`, when there is such a variable.
        """
        changed = {described(graph, one) for one in written(graph) if id(one) in self._used - apart}
        if changed:
            self._report(
                f"the evaluation changes {', '.join(sorted(changed))}, which training uses: a resumed run does not "
                "repeat recorded evaluations, so it will differ from one that was never stopped; use a separate "
                "variable for evaluation, or restore the value in validation_step",
                required,
            )

    def _not_held(self, found: Mapping[str, Any], held: set[int]) -> dict[str, Any]:
        ours = held | handles(self.items.values())
        return {name: item for name, item in found.items() if not handles([item]) & ours}

    def _watch_read(self, graph: Any, read: Mapping[int, Any], found: Mapping[str, Any]) -> None:
        """Watches variables that the training step only reads, by path, or by description if there is no path."""
        there = {name: item for name, item in found.items() if handles([item]) & read.keys()}
        self._watched.watch(there)
        named = handles(there.values())
        hidden = {described(graph, one): variable_of(graph, one) for key, one in read.items() if key not in named}
        self._hidden.watch({what: variable for what, variable in hidden.items() if variable is not None})

    def _report_late(self, new: Mapping[str, Any], required: bool) -> None:
        if late := sorted(new.keys() & self._saved.keys()):
            self._report(
                f"{', '.join(late)}: created in the first step, which is not compiled, so its value was not restored "
                "before that step; create it in build_model, or compile the step (trainer.train_tf_function=true)",
                required,
            )

    def _add(self, new: Mapping[str, Any], required: bool) -> bool:
        self._hold(new)
        if self._path is None:
            return bool(new)
        if missing := sorted(name for name in new if name not in self._saved):
            self._report(
                f"{self._path} does not hold {', '.join(missing)}, which the training step changes: it keeps its "
                "initial value (earlier versions did not save it)",
                required,
            )
        self._restore(new)
        if unknown := sorted(self._saved.keys() - self.items.keys()):
            self._report(f"{self._path} holds {', '.join(unknown)}, which this run does not have", False)
        return bool(new)

    def _hold(self, new: Mapping[str, Any]) -> None:
        self.items.update(new)
        for name, item in new.items():
            setattr(self.section, name, item)

    def _restore(self, items: Mapping[str, Any]) -> None:
        there = {name: item for name, item in items.items() if name in self._saved}
        misfits = [name for name, item in there.items() if _shape(item) not in (None, self._saved[name])]
        if misfits:
            text = ", ".join(f"{name} {list(self._saved[name])}, here {_shape(there[name])}" for name in misfits)
            if not self.partial:
                raise UsageError(f"{self._path} does not fit this run; it holds {text}")
            self._report(f"{self._path} is restored in part; the following keep their initial value: {text}", False)
        there = {name: item for name, item in there.items() if name not in misfits}
        if there and self._path is not None:
            restore_section(self._path, SECTION, there)

    def _report(self, text: str, required: bool) -> None:
        if required:
            raise UsageError(f"trainer.require_exact_resume: {text}")
        if text not in self._reported:
            self._reported.add(text)
            _LOG.warning("%s", text)


def handles(items: Iterable[Any]) -> set[int]:
    """Returns the `id` of each resource handle of variables and tables; a mirrored variable has one per replica."""
    parts = [part for item in items for part in (getattr(item, "values", None) or [item])]
    found = (getattr(part, "resource_handle", None) for part in parts)
    return {id(part.handle if handle is None else handle) for part, handle in zip(parts, found, strict=True)}


def saved_section(path: str, section: str) -> dict[str, tuple[int, ...] | None]:
    """Returns a dict from name to shape for a section of a checkpoint; the shape of a table is None.

    Args:
      path: The checkpoint's prefix.
      section: The section's name, or `section/subsection`.

    Raises:
      StorageError: when the checkpoint cannot be read.
    """
    try:
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError, IndexError) as error:
        raise StorageError(f"{path} is gone or damaged: {error}") from error
    found: dict[str, tuple[int, ...] | None] = {}
    for key, shape in shapes.items():
        name, _, attribute = key.partition("/.ATTRIBUTES/")
        if name.startswith(f"{section}/"):
            found[readable(name[len(section) + 1 :])] = tuple(shape) if attribute == "VARIABLE_VALUE" else None
    return found


def restore_section(path: str, section: str, items: Mapping[str, Any]) -> None:
    """Restores items of a section that the checkpoint holds in the same shape; runs eagerly, in strategy scope.

    Raises:
      StorageError: when the checkpoint cannot be read.
    """
    root, _, below = section.partition("/")
    target = tf.train.Checkpoint(**{root: {below: dict(items)} if below else dict(items)})
    try:
        target.read(path).expect_partial().assert_existing_objects_matched()
    except (tf.errors.OpError, IndexError) as error:
        raise StorageError(f"{path} is gone or damaged: {error}") from error


def _shape(item: Any) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, tf.Variable) else None

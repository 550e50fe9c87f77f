"""The section `step_state` of a checkpoint: what changes while a run trains and no other section holds.

A module, a second model or optimizer, a generator or a hash table that a task, a model or a function holds is found
when the step has been traced: whatever its graph writes to, and the checkpoint does not hold yet, is added under the
path that leads to it. A run that is resumed restores it as soon as it is known, before the first step.

What actions, callbacks or `initialize` write to, such as a target network, no graph tells. Its values are looked at
before the first step and before each save, and it is added once they have changed: no checkpoint holds a frozen model.
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
_ADVICE = "keep it in an attribute of the task or of the model, where it is found and saved"
_LOG = logging.getLogger(__name__)


class DiscoveredState:
    """Variables and hash tables by the path that leads to them.

    Args:
      roots: task, model and trainer, by the first part of the paths.
      partial: leave out what has another shape in a checkpoint, with a warning.

    Attributes:
      items: path -> variable or table, as a checkpoint holds them.
      section: of a checkpoint, which holds the items as attributes by their paths.
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
        """Restores what the checkpoint at `path` holds of this section, as far as it can be found already.

        Args:
          path: of the checkpoint that was restored; None when there was none.

        Returns:
          Whether there are more items than before.

        Raises:
          UsageError: when an item has another shape in the checkpoint.
          StorageError: when the checkpoint cannot be read.
        """
        self._path, self._saved = path, saved_section(path, SECTION) if path else {}
        known = reachable(self.roots) if self._saved.keys() - self.items.keys() else {}
        new = {name: known[name] for name in self._saved if name in known and name not in self.items}
        if late := sorted(self.items.keys() - self._saved.keys()) if path else []:
            self._report(f"{path} does not hold {', '.join(late)}: it keeps the value that it has", False)
        self._hold(new)
        self._restore(self.items)
        return bool(new)

    def watch(self, found: Mapping[str, Any], held: set[int]) -> None:
        """Remembers the values of what no section holds, for `add_changed`.

        Called before the task initializes the model, and after each restore; what is remembered already stays so.

        Args:
          found: of `reachable`.
          held: as of `add_written`.
        """
        self._watched.watch(self._not_held(found, held))

    def add_changed(self, apart: set[int] | None = None, required: bool = False) -> bool:
        """Adds what was watched and has changed since; before a save.

        Args:
          apart: None if `add_written` or `add_reachable` was called. Else as `held` of `add_written`: then what has
            come into being since `watch` is added too.
          required: as of `add_written`.

        Returns:
          Whether there are more items than before.

        Raises:
          UsageError: if `required`, when something has changed that cannot be saved, or was not restored.
        """
        new = {name: item for name, item in self._watched.take_changed().items() if name not in self.items}
        if apart is not None:
            made = self._not_held(reachable(self.roots), apart | handles(self._watched.items()))
            self._report_late(made, required)
            new |= made
        self._hold(new)
        if hidden := sorted(self._hidden.take_changed()):
            self._report(
                f"{', '.join(hidden)} changes between training steps, which use it, and no checkpoint holds it: a "
                f"resumed run will not be the same as one that was never stopped; {_ADVICE}",
                required,
            )
        return bool(new)

    def add_written(self, graph: Any, held: set[int], required: bool = False) -> bool:
        """Adds what the training step writes to, and restores it from the checkpoint that the run goes on from.

        Args:
          graph: of the training loop or step, traced.
          held: `id` of the handles of what other sections hold, and of what needs no saving.
          required: whether state that cannot be saved is an error.

        Returns:
          Whether there are more items than before.

        Raises:
          UsageError: if `required`, when something cannot be saved or was not saved; see `restored` too.
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
                f"not be the same as one that was never stopped; {_ADVICE}",
                required,
            )
        return self._add(new, required)

    def add_reachable(self, held: set[int], required: bool = False, begun: bool = False) -> bool:
        """Adds all that can be reached and is not held: of steps that are not compiled no graph tells what they write.

        Args:
          held: as of `add_written`.
          required: as of `add_written`.
          begun: whether steps were taken since the restore; what came into being in them had its initial value there.
        """
        new = self._not_held(reachable(self.roots), held)
        if begun:
            self._report_late(new, required)
        return self._add(new, required)

    def report_evaluation(self, graph: Any, apart: set[int], required: bool = False) -> None:
        """Warns of what an evaluation changes and the training step uses.

        Such as the state of a recurrent layer with stateful=True: the checkpoint of a step holds what it was before the
        evaluation, and a resumed run does not repeat the evaluations on record.

        Args:
          graph: of the evaluation.
          apart: `id` of the handles of what needs no saving or is put back.
          required: whether it is an error.

        Raises:
          UsageError: if `required`, when there is something.
        """
        changed = {described(graph, one) for one in written(graph) if id(one) in self._used - apart}
        if changed:
            self._report(
                f"the evaluation changes {', '.join(sorted(changed))}, which training uses: a resumed run does not "
                "repeat the evaluations on record, so it will not be the same as one that was never stopped; evaluate "
                "with a variable of its own, or put the value back in validation_step",
                required,
            )

    def _not_held(self, found: Mapping[str, Any], held: set[int]) -> dict[str, Any]:
        ours = held | handles(self.items.values())
        return {name: item for name, item in found.items() if not handles([item]) & ours}

    def _watch_read(self, graph: Any, read: Mapping[int, Any], found: Mapping[str, Any]) -> None:
        """Watches what the training step only reads, by its path, or else by what it is."""
        there = {name: item for name, item in found.items() if handles([item]) & read.keys()}
        self._watched.watch(there)
        named = handles(there.values())
        hidden = {described(graph, one): variable_of(graph, one) for key, one in read.items() if key not in named}
        self._hidden.watch({what: variable for what, variable in hidden.items() if variable is not None})

    def _report_late(self, new: Mapping[str, Any], required: bool) -> None:
        if late := sorted(new.keys() & self._saved.keys()):
            self._report(
                f"{', '.join(late)}: made in the first step, of which no graph is known beforehand, so that it was "
                "not restored before; make it in build_model, or compile the step (trainer.train_tf_function=true)",
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
            self._report(f"{self._path} is restored in part; what follows keeps its initial value: {text}", False)
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
    """Returns the `id` of each resource handle of variables and tables; a mirrored variable has one a replica."""
    parts = [part for item in items for part in (getattr(item, "values", None) or [item])]
    found = (getattr(part, "resource_handle", None) for part in parts)
    return {id(part.handle if handle is None else handle) for part, handle in zip(parts, found, strict=True)}


def saved_section(path: str, section: str) -> dict[str, tuple[int, ...] | None]:
    """Returns name -> shape of what a checkpoint holds of a section; of a table the shape is None.

    Args:
      path: of the checkpoint.
      section: its name, or `section/subsection`.

    Raises:
      StorageError: when it cannot be read.
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
    """Restores some items of a section, all of which the checkpoint holds in the same shape; eager, in scope.

    Raises:
      StorageError: when it cannot be read.
    """
    root, _, below = section.partition("/")
    target = tf.train.Checkpoint(**{root: {below: dict(items)} if below else dict(items)})
    try:
        target.read(path).expect_partial().assert_existing_objects_matched()
    except (tf.errors.OpError, IndexError) as error:
        raise StorageError(f"{path} is gone or damaged: {error}") from error


def _shape(item: Any) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, tf.Variable) else None

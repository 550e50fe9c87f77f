"""Decides how a run resumes in the middle of a plain tf.data.Dataset, which has no position.

A Source begins at its position. A plain dataset on one replica continues from its saved iterator if
it is a chain of transformations for which that is exact. tests/engine/inputs/test_dataset_resume.py
saves and restores each of them at every position. Any other dataset is read from its start, and the
batches that were used are dropped. That is exact, too, unless the dataset has a state that no
checkpoint contains: Python, stateful random operations, or a variable that it changes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_structure import (
    get_transformation_kind,
    iterate_transformations,
    parse_transformation_kind,
)
from trainer_kit.inputs.op_definitions import find_op_definition
from trainer_kit.inputs.sources.batch_function import get_function_label
from trainer_kit.inputs.stateful_ops import find_unsaved_state, iterate_nodes
from trainer_kit.runtime.tensorflow_internals import (
    get_dataset_functions,
    get_input_datasets,
    is_nondeterministic,
    is_reshuffled_each_iteration,
    is_unseeded,
)

if TYPE_CHECKING:
    from trainer_kit.inputs.sources.source_protocol import Source

ResumeMethod = Literal["iterator", "skip", "inexact"]
_LOG = logging.getLogger(__name__)

# Chains of these continue exactly from a saved iterator, at every position.
_SAFE = {
    "AssertCardinality",
    "Batch",
    "Filter",
    "FlatMap",
    "Interleave",
    "Map",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Range",
    "Repeat",
    "Restructured",
    "Shard",
    "Shuffle",
    "Skip",
    "TFRecord",
    "Take",
    "Tensor",
    "TensorSlice",
    "TextLine",
    "Unbatch",
}
# The same for datasets that the functions of such a chain make.
_SAFE_INSIDE = {"FlatMap", "Map", "ParallelMap", "TFRecord", "TensorSlice", "TextLine"}
# A shuffle draws a new order for each pass of a repeat above it. Transformations other than these
# may drop the shuffle, or begin the next pass, before the last element of a pass is passed on. A
# saved iterator then continues with a wrong order.
_PASS_ON_AT_ONCE = {"AssertCardinality", "Map", "Options", "Repeat"}
# Stateful by TensorFlow's definitions, but they change nothing that a later element depends on.
_HARMLESS = re.compile(
    r"^Assert$|^Print|^LookupTable(Find|Size)|HashTable|^StatefulPartitionedCall$"
    r"|^If$|^While$|^Case$"
    r"|^(Anonymous|Dummy|Delete)(MemoryCache|SeedGenerator|RandomSeedGenerator)"
    r"|^DatasetToSingleElement$"
)
_READS_A_VARIABLE = re.compile(
    r"^ReadVariableOp$|^VarHandleOp$|^ResourceGather|^VarIsInitializedOp$"
)
_DATASET = re.compile(r"Dataset(V\d)?$")
# The number of names in one line.
_LISTED = 8
_TRAIN_DATA = "task.train_data"


@dataclass(frozen=True)
class Examination:
    """The facts about a dataset that matter for resuming. Entries read like "map(): RandomUniform".

    Attributes:
      python_functions: Python functions, whose state is not known.
      random_ops: Stateful random operations, whose state is not saved.
      stateful_ops: Other operations with a state, such as those that change a variable.
      nondeterministic_orders: Transformations whose order may differ from process to process.
      iterator_obstacles: Transformations and states that keep a saved iterator from being exact.
      reshuffled_each_iteration: Shuffles that draw another order each time that an iterator of the
        same dataset is made.
    """

    python_functions: tuple[str, ...]
    random_ops: tuple[str, ...]
    stateful_ops: tuple[str, ...]
    nondeterministic_orders: tuple[str, ...]
    iterator_obstacles: tuple[str, ...]
    reshuffled_each_iteration: tuple[str, ...]


@dataclass(frozen=True)
class Resumption:
    """How a resumed run gets back to its position in the data.

    Attributes:
      method: "iterator" restores the saved state of the iterator. "skip" reads from the start.
        "inexact" means that no method is known to be exact, and that reading from the start is the
        nearest.
      reasons: Lines of text that say why this method is used and how to get a better one. Empty for
        "iterator".
    """

    method: ResumeMethod
    reasons: tuple[str, ...] = ()


def examine_dataset(dataset: tf.data.Dataset) -> Examination:
    """Returns the facts about a dataset that matter for resuming.

    Reads no element, only the objects and graphs of the dataset. Runs on the host.
    """
    facts: dict[str, dict[str, None]] = {field: {} for field in Examination.__dataclass_fields__}
    in_any_order = dataset.options().deterministic is False

    for part in iterate_transformations(dataset):
        kind = get_transformation_kind(part)
        name = get_function_label(part) or _format_transformation(kind)
        is_parallel = kind.startswith("Parallel")
        if is_nondeterministic(part) or (in_any_order and is_parallel):
            facts["nondeterministic_orders"][f"{name}: deterministic=False"] = None
        if is_unseeded(part):
            facts["nondeterministic_orders"][f"{name} without a seed"] = None
        if is_reshuffled_each_iteration(part):
            facts["reshuffled_each_iteration"][name] = None
        for graph in get_dataset_functions(part):
            for field, operation in _find_stateful_operations(graph):
                facts[field][f"{name}: {operation}"] = None

    facts["iterator_obstacles"] |= dict.fromkeys(_find_iterator_obstacles(dataset))
    return Examination(**{field: tuple(texts) for field, texts in facts.items()})


def choose_resume_method(
    examination: Examination,
    *,
    iterator_obstacle: str = "",
    deterministic_ops: bool,
    section: str = _TRAIN_DATA,
) -> Resumption:
    """Returns how to resume, with reasons for the user.

    Args:
      examination: The examination of the dataset.
      iterator_obstacle: Why an iterator of any dataset could not be saved here. "" if it can be.
      deterministic_ops: Whether TensorFlow's op determinism is on, with which tf.data keeps every
        map in order.
      section: The section of the config, with which each line begins.
    """
    unsaved = [*examination.python_functions, *examination.stateful_ops]
    if not deterministic_ops:
        unsaved += [*examination.random_ops, *examination.nondeterministic_orders]
    if unsaved:
        return Resumption("inexact", (_describe_inexact_resume(unsaved, section),))

    obstacles = [*examination.random_ops, *examination.iterator_obstacles]
    if iterator_obstacle:
        obstacles = [iterator_obstacle]
    if obstacles:
        text = (
            f"{section}: a resumed run reads the data from its start and drops the batches that"
            f" were used, because of {_format_list(obstacles)}; the results are the same. A Source,"
            " such as ArraySource or TFRecordSource, starts at the right batch at once"
        )
        return Resumption("skip", (text,))
    return Resumption("iterator")


class ResumePolicy:
    """Decides how a run gets back to its position in the training data.

    It logs each reason for a slow or inexact resume once.

    Args:
      require_exact: Whether a resume that cannot be exact is refused.
      has_single_iterator: Whether plain datasets are read on one replica, so that their iterators
        can be saved.
      deterministic_ops: Whether TensorFlow's op determinism is on.
      repeats_datasets: Whether a tf.data.Dataset that ends starts again, with new orders of its
        shuffles.

    Attributes:
      repeats_datasets: The argument of this name.
      reasons: The reasons so far that a resume is slow or not exact.
    """

    def __init__(
        self,
        *,
        require_exact: bool = False,
        has_single_iterator: bool = False,
        deterministic_ops: bool = False,
        repeats_datasets: bool = False,
    ) -> None:
        self._require_exact = require_exact
        self._has_single_iterator = has_single_iterator
        self._deterministic_ops = deterministic_ops
        self.repeats_datasets = repeats_datasets
        self.reasons: set[str] = set()

    def can_save_iterator(self, examination: Examination, position: Position) -> bool:
        """Whether a plain dataset gets to a position by its iterator's saved state.

        Reports the reasons if not.
        """
        obstacle = ""
        if not self._has_single_iterator:
            obstacle = "an iterator over several replicas cannot be saved"
        if position.skipped_batches:
            obstacle = "a batch is left out, which the state of an iterator does not record"
        resumption = choose_resume_method(
            examination, iterator_obstacle=obstacle, deterministic_ops=self._deterministic_ops
        )
        self.report(resumption, _get_log_level(resumption))
        return resumption.method == "iterator"

    def report_source(self, source: Source, dataset: tf.data.Dataset) -> None:
        """Reports why the dataset of a Source cannot be resumed exactly, if it cannot.

        What users gave to ArraySource and TFRecordSource has to be a pure function of the batch and
        its seeds. A Source of another class may have Python that begins at the position, and random
        operations that are read from the start, or has a method that returns how it resumes.

        Args:
          source: The Source.
          dataset: What its `at` returned.
        """
        find_resumption = getattr(source, "resumption", None)
        if find_resumption is not None:
            resumption = find_resumption(deterministic_ops=self._deterministic_ops)
            if resumption is not None:
                self.report(resumption, _get_log_level(resumption))
            return

        examination = examine_dataset(dataset)
        labels = tuple(
            label
            for part in iterate_transformations(dataset)
            if (label := get_function_label(part))
        )
        user_facts = (*examination.python_functions, *examination.random_ops)
        unsaved = [text for text in user_facts if text.startswith(labels)]
        unsaved += examination.stateful_ops
        if not self._deterministic_ops:
            order_facts = (*examination.random_ops, *examination.nondeterministic_orders)
            unsaved += [text for text in order_facts if text not in unsaved]
        if unsaved:
            self.report(Resumption("inexact", (_describe_inexact_resume(unsaved, _TRAIN_DATA),)))

    def report(self, resumption: Resumption, level: int = logging.WARNING) -> None:
        """Logs the reasons that are new.

        Raises:
          UsageError: when the resume cannot be exact, and require_exact is set.
        """
        if resumption.method == "inexact" and self._require_exact:
            raise UsageError("\n  ".join(("trainer.require_exact_resume:", *resumption.reasons)))
        for reason in resumption.reasons:
            if reason not in self.reasons:
                self.reasons.add(reason)
                _LOG.log(level, "%s", reason)


def _get_log_level(resumption: Resumption) -> int:
    """Returns the log level of a report. Reading from the start is exact and mostly fast enough."""
    return logging.INFO if resumption.method == "skip" else logging.WARNING


def skip_batches(
    dataset: tf.data.Dataset, batches: int, local_replicas: int = 1
) -> tf.data.Dataset:
    """Returns `dataset` without its first global batches.

    Args:
      dataset: A dataset whose elements are batches for one replica.
      batches: The number of global batches to leave out.
      local_replicas: The number of replicas that this dataset is for.
    """
    if batches:
        return dataset.skip(batches * local_replicas)
    return dataset


def _find_iterator_obstacles(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yields the first transformation, from the end of a dataset, that makes its chain unsafe."""
    part = dataset
    # A transformation between a repeat and the parts below it that may hold a pass back.
    below_repeat = ""
    is_repeated = False
    while True:
        kind = get_transformation_kind(part)
        inputs = get_input_datasets(part)
        if kind not in _SAFE or len(inputs) > 1:
            yield _format_transformation(kind)
            return

        if below_repeat and is_reshuffled_each_iteration(part):
            yield f"{_format_transformation(kind)} below {below_repeat} and repeat()"
            return
        if kind == "Repeat":
            is_repeated = True
        elif is_repeated and kind not in _PASS_ON_AT_ONCE:
            below_repeat = below_repeat or _format_transformation(kind)
        if not inputs:
            return
        (part,) = inputs


def _find_stateful_operations(graph: tf.Graph) -> Iterator[tuple[str, str]]:
    """Yields (field of Examination, operation) for the stateful operations of a function.

    The operations of the functions that it calls are included.
    """
    for node in iterate_nodes(graph.as_graph_def()):
        definition = find_op_definition(node.op)
        state = find_unsaved_state(node.op, definition)
        if state is not None:
            field = "python_functions" if state == "python" else "random_ops"
            yield field, node.op
        elif _DATASET.search(node.op):
            kind = parse_transformation_kind(node.op)
            if kind not in _SAFE_INSIDE:
                yield "iterator_obstacles", _format_transformation(kind)
        elif definition is not None and definition.is_stateful and not _HARMLESS.search(node.op):
            reads_variable = _READS_A_VARIABLE.search(node.op)
            yield "iterator_obstacles" if reads_variable else "stateful_ops", node.op


def _describe_inexact_resume(unsaved: Sequence[str], section: str) -> str:
    return (
        f"{section}: resume is not exact: no checkpoint contains the state of"
        f" {_format_list(unsaved)};"
        " use TensorFlow's operations without a state, such as tf.random.stateless_uniform with a"
        " seed made from the example's index, or train on a Source, such as ArraySource, whose"
        " functions get such a seed as a second parameter named `seed`"
    )


def _format_list(texts: Sequence[str]) -> str:
    """Returns the first texts, and the number of the others."""
    text = ", ".join(texts[:_LISTED])
    num_others = len(texts) - _LISTED
    return f"{text} and {num_others} more" if num_others > 0 else text


def _format_transformation(kind: str) -> str:
    """Returns "flat_map()" for FlatMap."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.removeprefix("Parallel"))
    return f"{words.lower()}()"

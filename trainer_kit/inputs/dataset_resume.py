"""Decides how a run resumes in the middle of a plain tf.data.Dataset, which has no position of its own.

The statements here were tested on TensorFlow 2.20: tests/engine/inputs/test_dataset_resume.py saves, restores and skips
pipelines of every kind. In short:

- A saved iterator continues exactly, but it cannot be saved on several replicas, with any stateful op (random numbers,
  Python, variables), or with a shuffle inside the function of an interleave or flat_map. It holds every buffer, and
  a cache.
- A shuffle below a `repeat` draws a new order for each pass. What is between the two, such as a batch, may drop the
  shuffle when its pass has been read, and one pass may follow another in the background. An iterator that is saved
  then has lost its place among the orders, and continues inexactly without a warning. So only transformations that
  pass each element on at once may be between; `repeat` before `shuffle`, or directly after it, is right.
- Reading from the start and dropping what was used (`skipped`) is exact for all of these but Python with a state,
  variables, and whatever is allowed to change its order. Random numbers in a parallel map come in another order in
  each run, unless TensorFlow's op determinism is on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import (
    functions_of,
    inputs_of,
    is_nondeterministic,
    is_unseeded,
    reshuffles,
)
from trainer_kit.inputs.dataset_graph import graph_of
from trainer_kit.inputs.dataset_structure import kind_named, kind_of, transformations
from trainer_kit.inputs.op_definitions import op_definition
from trainer_kit.inputs.sources.batch_function import label_of
from trainer_kit.inputs.stateful_ops import nodes, unsaved_state

Method = Literal["iterator", "skip", "inexact"]

# Transformations whose iterators were saved and restored in the middle, in the first pass and later ones, bit by bit.
_SAVABLE = {
    "AssertCardinality", "Batch", "DenseToRagged", "DirectedInterleave", "Filter", "FlatMap", "GroupByWindow",
    "IgnoreErrors", "Interleave", "Map", "Options", "PaddedBatch", "ParallelBatch", "ParallelInterleave",
    "ParallelMap", "Prefetch", "Random", "Range", "Rebatch", "Repeat", "Restructured", "Scan", "Shard", "Shuffle",
    "Skip", "TFRecord", "Take",
    "TakeWhile", "Tensor", "TensorSlice", "TextLine", "Unbatch", "Unique", "Window", "Zip",
}  # fmt: skip
# Those that come the same again when they are read from the start.
_REPEATABLE = {
    *_SAVABLE, "CSV", "Cache", "Concatenate", "DenseToSparseBatch", "FixedLengthRecord", "Generator", "GroupByReducer",
    "List", "MapAndBatch", "MatchingFiles", "ParallelFilter", "ParseExample", "ShuffleAndRepeat", "Snapshot",
    "SparseTensorSlice", "Sql", "WeightedFlatMap",
}  # fmt: skip
# What users call them, where it is not the name in small letters.
_SPELLED = {
    "DatasetV1Adapter": "tf.compat.v1.data.Dataset",
    "DirectedInterleave": "sample_from_datasets", "FixedLengthRecord": "FixedLengthRecordDataset",
    "Generator": "from_generator", "ParallelInterleave": "interleave", "ParallelMap": "map", "Random": "Dataset.random",
    "TFRecord": "TFRecordDataset", "Tensor": "from_tensors", "TensorSlice": "from_tensor_slices",
    "TextLine": "TextLineDataset",
}  # fmt: skip
# Between a shuffle and a repeat these keep the shuffle until the next pass begins.
_HAND_ON = {"AssertCardinality", "Map", "Options", "Repeat"}
# Stateful by TensorFlow's book, but they change nothing that a later element depends on.
_HARMLESS = re.compile(
    r"^_Retval$|^_Arg$|^Assert$|^Print|^LookupTable(Find|Size)|HashTable|^StatefulPartitionedCall$|^If$|^While$|^Case$"
    r"|^(Anonymous|Dummy|Delete)(MemoryCache|SeedGenerator|RandomSeedGenerator)|^DatasetToSingleElement$"
)
_CHANGES_A_VARIABLE = re.compile(r"^Assign|^ResourceScatter|^Stateful(?!PartitionedCall)|^Rng")
_AGAINST_SOURCE = {
    "random_ops": (
        "draws random numbers from a state that is not saved; give the function a second parameter named `seed`, int32 "
        "[batch, 2], one row for each example, and use ops such as tf.random.stateless_uniform"
    ),
    "python": (
        "runs Python, whose state is not saved; use TensorFlow's ops instead, or for a function without state "
        "tf.numpy_function(..., stateful=False)"
    ),
    "state": (
        "keeps a state that is not saved; compute from the batch instead, and from the seeds that a second parameter "
        "named `seed` gets"
    ),
    "own_state": (
        "keeps a state that is not saved; compute from the position that `at` gets and the example's index instead, "
        "with ops such as tf.random.stateless_uniform"
    ),
    "any_order": "may change the order from run to run; remove deterministic=False",
}
_FIRST_LOOK = 8  # names in one line


@dataclass(frozen=True)
class Examination:
    """The facts about a dataset's transformations that matter for resuming. Entries read like "map(): RandomUniform".

    Attributes:
      random_ops: stateful random ops, whose state no one saves.
      python: Python functions and generators, whose state no one knows.
      state: other stateful ops, such as those that change a variable.
      variables: reads of variables and other ops that keep an iterator from being saved, but change nothing.
      caches: `cache`, whose elements would all be in a saved iterator.
      not_savable: further transformations whose iterator does not resume exactly.
      any_order: transformations that may change the order from run to run.
      unseeded: transformations that no seed fixes, neither their own nor the global one.
      unknown: transformations that were never tried.
      new_orders: transformations that draw another order each time that an iterator of the same dataset is made.
    """

    random_ops: tuple[str, ...] = ()
    python: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    not_savable: tuple[str, ...] = ()
    any_order: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    new_orders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resumption:
    """How a resumed run gets back to its position in the data.

    Attributes:
      method: iterator: by its saved state; skip: by reading from the start; inexact: no way is known to be exact,
        and reading from the start is the nearest.
      reasons: Lines of text that say why this method is used and how to get a better one; none for "iterator".
    """

    method: Method
    reasons: tuple[str, ...] = ()


def examine(dataset: tf.data.Dataset) -> Examination:
    """Returns what matters for resuming a plain dataset; reads no element, only its objects and graphs.

    Runs on the host.
    """
    found: dict[str, list[str]] = {field: [] for field in Examination.__dataclass_fields__}
    if dataset.options().deterministic is False:
        found["any_order"].append("options(): deterministic=False")
    for part in transformations(dataset):
        for field, text in (*_of_transformation(part), *_of_functions(part), *_of_passes(part)):
            if text not in found[field]:
                found[field].append(text)
    return Examination(**{field: tuple(texts) for field, texts in found.items()})


def resume_method(
    examination: Examination,
    *,
    no_iterator: str = "",
    deterministic_ops: bool,
    section: str = "task.train_data",
    made_before: bool = False,
) -> Resumption:
    """Returns how to resume, with reasons for the user.

    Args:
      examination: The examination of the dataset.
      no_iterator: why an iterator of any dataset could not be saved here, or would not fit; "" if it can.
      deterministic_ops: whether TensorFlow's op determinism is on, with which tf.data keeps every map in order.
      section: of the config, to begin each line with.
      made_before: whether the dataset was made before the run, so that no setting of the run changes it.
    """
    seen = replace(examination, any_order=()) if deterministic_ops else examination
    against_skip = list(_against_skip(seen, deterministic_ops, made_before))
    if against_skip:
        advice = "a resumed run may not be the same as one that was never stopped"
        if not made_before:
            advice += "; to make it the same, train on a Source, such as ArraySource or TFRecordSource"
        return Resumption("inexact", tuple(f"{section}: {line}" for line in (*against_skip, advice)))
    against_saving = list(_against_saving(seen, no_iterator))
    if against_saving:
        advice = (
            "a resumed run reads the data from its start and drops the batches that were used, which takes longer at "
            "later steps; a Source, such as ArraySource or TFRecordSource, starts at the right batch at once"
        )
        return Resumption("skip", tuple(f"{section}: {line}" for line in (*against_saving, advice)))
    return Resumption("iterator")


def source_resumption(
    dataset: tf.data.Dataset, *, deterministic_ops: bool, section: str = "task.train_data"
) -> Resumption | None:
    """Returns why the dataset of a Source cannot be resumed exactly, with reasons for the user; None if it can.

    What users gave to ArraySource and TFRecordSource has to be a pure function of the batch and its seeds. A Source of
    another class may have Python that begins at the position: of what its `at` does, only random ops and changes of
    variables are reported.

    Args:
      dataset: what `at` returned.
      deterministic_ops: whether TensorFlow's op determinism is on, with which tf.data keeps every map in order. Random
        ops of another class are not reported then: they are exact if it reads from its start.
      section: of the config, to begin each line with.
    """
    found: dict[str, list[str]] = {field: [] for field in ("random_ops", "python", "state", "own_state", "any_order")}
    for field, text in _of_source(dataset, deterministic_ops):
        if text not in found[field]:
            found[field].append(text)
    reasons = tuple(
        f"{section}: resume is not exact: {_listed(tuple(texts))} {_AGAINST_SOURCE[field]}"
        for field, texts in found.items()
        if texts
    )
    return Resumption("inexact", reasons) if reasons else None


def skipped(dataset: tf.data.Dataset, batches: int, replicas_here: int = 1) -> tf.data.Dataset:
    """Returns `dataset`, whose elements are batches for one replica, without its first global batches."""
    return dataset.skip(batches * replicas_here) if batches else dataset


def _of_source(dataset: tf.data.Dataset, deterministic_ops: bool) -> Iterator[tuple[str, str]]:
    """Yields (key of _AGAINST_SOURCE, text) for what keeps the dataset of a Source from being resumed exactly."""
    in_any_order = dataset.options().deterministic is False
    for part in transformations(dataset):
        name = _spelled(kind_of(part))
        set_here = is_nondeterministic(part)
        if not deterministic_ops and (set_here or in_any_order) and kind_of(part).startswith("Parallel"):
            yield "any_order", f"{name}: deterministic=False"
        label = label_of(part)
        for graph in functions_of(part):
            for node in nodes(graph.as_graph_def()):
                changes = _CHANGES_A_VARIABLE.search(node.op)
                for field, text in _of_op(node, label or name):
                    if label and field in ("random_ops", "python", "state"):
                        yield field, text
                    elif (field == "state" and changes) or (field == "random_ops" and not deterministic_ops):
                        yield "own_state", text


def _against_skip(seen: Examination, deterministic_ops: bool, made_before: bool) -> Iterator[str]:
    if seen.random_ops and not deterministic_ops:
        advice = "set runtime.deterministic_ops=true"
        if made_before:
            advice = "call tf.config.experimental.enable_op_determinism() before the dataset is made"
        yield (
            f"{_listed(seen.random_ops)} draws random numbers from a state that is not saved; use "
            "tf.random.stateless_uniform or its like with a seed made from the example's index, or "
            f"{advice}, with which the data can be read again from its start"
        )
    if seen.python:
        yield f"{_listed(seen.python)} runs Python, whose state is not saved; use TensorFlow's ops instead"
    if seen.state:
        yield f"{_listed(seen.state)} keeps a state that is not saved; compute from the example's index instead"
    if seen.any_order:
        yield f"{_listed(seen.any_order)} may change the order from run to run; remove deterministic=False"
    if seen.unseeded:
        yield f"{_listed(seen.unseeded)} has no seed; set one, or runtime.random_seed"
    if seen.unknown:
        yield f"{_listed(seen.unknown)} is not known to give the same elements again"


def _against_saving(seen: Examination, no_iterator: str) -> Iterator[str]:
    if no_iterator:
        yield no_iterator
    if seen.caches:
        yield f"{_listed(seen.caches)} would be saved with all its elements in every checkpoint"
    others = (*seen.random_ops, *seen.variables, *seen.not_savable)
    if others:
        yield f"{_listed(others)} keeps the iterator from being saved, or from being restored exactly"


def _listed(texts: tuple[str, ...]) -> str:
    more = f" and {len(texts) - _FIRST_LOOK} more" if len(texts) > _FIRST_LOOK else ""
    return ", ".join(texts[:_FIRST_LOOK]) + more


def _spelled(kind: str) -> str:
    name = _SPELLED.get(kind, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower())
    return f"{name}()"


def _of_transformation(part: Any) -> Iterator[tuple[str, str]]:
    """Yields (field of Examination, text) for one transformation."""
    kind = kind_of(part)
    name = _spelled(kind)
    if kind == "Variant":  # TensorFlow made it from another one, such as the numbers of enumerate
        yield from _of_graph(part, "a dataset inside another")
        return
    yield from _of_kind(kind, name)
    if kind == "ParallelInterleave":  # only the op knows
        yield from (found for found in _of_graph(part, name) if found[0] in ("any_order", "unknown"))
    elif is_nondeterministic(part):
        yield "any_order", f"{name}: deterministic=False"
    if is_unseeded(part):
        yield "unseeded", name
    if _draws_new_orders(part):
        yield "new_orders", name


def _draws_new_orders(part: Any) -> bool:
    """Whether each iterator draws another order or other numbers; of Dataset.random only its graph tells."""
    if kind_of(part) != "Random":
        return reshuffles(part)
    return any(node.attr["rerandomize_each_iteration"].b for node in graph_of(part).node)


def _of_passes(part: Any) -> Iterator[tuple[str, str]]:
    """Yields (field of Examination, text) for each shuffle below a repeat, unless all between hand on at once."""
    if kind_of(part) != "Repeat":
        return
    waiting = [(below, "") for below in inputs_of(part)]
    seen = set()
    while waiting:
        below, between = waiting.pop()
        if (id(below), bool(between)) in seen:
            continue
        seen.add((id(below), bool(between)))
        kind = kind_of(below)
        if between and _draws_new_orders(below):
            yield "not_savable", f"{_spelled(kind)}, {between}, repeat()"
        if kind not in _HAND_ON:
            between = between or _spelled(kind)
        waiting += [(input, between) for input in inputs_of(below)]


def _of_graph(part: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yields (field of Examination, text) for a dataset and what it is made from, as the graph that TensorFlow has."""
    try:
        graph = graph_of(part)
    except tf.errors.OpError:
        yield "unknown", name
        return
    for node in nodes(graph):
        yield from _of_op(node, name)
        if node.op.startswith("Shuffle"):
            yield "new_orders", f"{name}: {_spelled(kind_named(node.op))}"


def _of_kind(kind: str, name: str) -> Iterator[tuple[str, str]]:
    if kind not in _REPEATABLE:
        yield "unknown", name
    elif kind == "Cache":
        yield "caches", name
    elif kind == "Generator":
        yield "python", name
    elif kind not in _SAVABLE:
        yield "not_savable", name


def _of_functions(part: Any) -> Iterator[tuple[str, str]]:
    """Yields (field of Examination, text) for the ops in a transformation's functions, and in their functions."""
    name = label_of(part) or _spelled(kind_of(part))
    for graph in functions_of(part):
        for node in nodes(graph.as_graph_def()):
            yield from _of_op(node, name)


def _of_op(node: Any, name: str) -> Iterator[tuple[str, str]]:
    definition = op_definition(node.op)
    hidden, text = unsaved_state(node.op, definition), f"{name}: {node.op}"
    if hidden == "python":
        yield "python", text
    elif hidden == "random":
        yield "random_ops", text
        if not (node.attr["seed"].i or node.attr["seed2"].i):
            yield "unseeded", text
    elif re.search(r"Dataset(V\d)?$", node.op):
        yield from _of_inner_dataset(node, name)
    elif definition is None or not definition.is_stateful or _HARMLESS.search(node.op):
        return
    elif node.op in ("ReadVariableOp", "VarHandleOp", "ResourceGather", "VarIsInitializedOp"):
        yield "variables", text
    else:
        yield "state", text


def _of_inner_dataset(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """The same for a dataset that is made inside a function, as by interleave."""
    kind = kind_named(node.op)
    inner = name if name == _spelled(kind) else f"{name}: {_spelled(kind)}"
    yield from _of_kind(kind, inner)
    if kind.startswith("Shuffle"):
        yield "not_savable", inner
    setting = node.attr["deterministic"].s if "deterministic" in node.attr else b""
    if setting == b"false":
        yield "any_order", f"{inner}: deterministic=False"

"""Finds the values of a model's variables in a file of weights, by names or by structure.

In a checkpoint of TensorFlow 2, names of attributes lead to values. A model has several sets of
such names: those that trainer_kit gives variables, those that TensorFlow finds in the objects, and
those that Keras 2 wrote. Each set is tried on each object of the checkpoint that may be the model,
and the best match is used.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.object_graph import ROOT, CheckpointGraph
from trainer_kit.checkpoints.state.variable_names import layer_names, make_distinct, model_variables
from trainer_kit.checkpoints.weight_files.keras_file import KerasFile
from trainer_kit.checkpoints.weight_files.tensorflow_file import TensorFlowFile
from trainer_kit.checkpoints.weight_files.weight_file import (
    MODEL,
    WeightFile,
    replace_numbers_by_ranks,
)
from trainer_kit.config.schema.optimization import AVERAGE, WEIGHTS, EMAConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.optimizers.moving_average import average_keys, select_averaged_variables
from trainer_kit.optimizers.per_variable import check_patterns, variable_path
from trainer_kit.process.run_directory import read_layer_names
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.typing import Model

# The attributes between the root and the model.
_DEPTH = 3

# A function that returns the children of an object by name.
Children = Callable[[object], Mapping[str, object]]
# How many variables a set of names finds. The largest one is the best.
Fit = Callable[[Mapping[str, str]], tuple[int, int, int]]
Shape = tuple[int, ...]


def weights_by_path(model: Model) -> dict[str, tf.Variable]:
    """Returns the weights of a built model by path, without the states of random generators.

    The paths are those that Keras gives, in which all patterns of variables are searched. The
    second and later variables of a path get `#1`, `#2`. Runs eagerly.
    """
    weights = getattr(model, "weights", None) or model.variables
    paths = [variable_path(weight) for weight in weights]
    distinct_paths = make_distinct(paths)
    variables = [native_variable(weight) for weight in weights]
    return dict(zip(distinct_paths, variables, strict=True))


def names_in_file(
    model: Model,
    chosen: Mapping[str, tf.Variable],
    file: WeightFile,
    new_names: Mapping[str, str] | None,
) -> tuple[dict[str, str], list[str]]:
    """Returns the names in a file of those chosen weights of a model that the file has.

    Runs eagerly. A weight counts in whatever shape the file has it.

    A checkpoint with a graph of objects is compared by the objects that lead to variables, unless
    there are replacements. All files are compared by names. The first part of the names may differ,
    if it is the same in all names.

    Ranks in place of the numbers of layers count if they find more variables, and each name that is
    equal without them leads to the same variable. They also count if the file has ranks itself.
    They do not count if the file has the user's own numbers. The comparison that finds most
    variables of the right shape counts.

    Args:
      model: A built model.
      chosen: The weights to find, by path.
      file: The file of weights.
      new_names: A dict from new name to name in the file, where names of the file are replaced.
        With None, they are not.

    Returns:
      The names in the file by path, and the paths of those that were found by the rank of a layer's
      number, and not by the number itself.
    """

    def fit(names: Mapping[str, str]) -> tuple[int, int, int]:
        # Names that find most variables of the right shape are the best.
        paths = names.keys() & chosen.keys()
        num_fitting = 0
        for path in paths:
            saved = file.shapes[names[path]]
            num_fitting += saved == tuple(chosen[path].shape)
        return num_fitting, len(paths), len(names)

    # The names as they are.
    file_names = new_names
    if file_names is None:
        file_names = {name: name for name in file.shapes}
    namings = _namings(model, file)
    exact = _equal_names(namings, chosen, file_names, fit)

    # The names with ranks in place of the numbers of layers.
    ranked_namings = [replace_numbers_by_ranks(naming) for naming in namings]
    ranked_file_names = replace_numbers_by_ranks(file_names)
    ranked = _equal_names(ranked_namings, chosen, ranked_file_names, fit)

    names = exact
    checkpoint = None
    if isinstance(file, TensorFlowFile) and file.has_graph:
        checkpoint = file
    if not file.has_user_numbers:
        ranks_agree = exact.items() <= ranked.items()
        if ranks_agree or (checkpoint and checkpoint.has_ranks):
            names = max(exact, ranked, key=fit)

    # Replaced names do not lead to the objects of a checkpoint.
    if checkpoint and new_names is None:
        identities = {id(variable) for variable in chosen.values()}
        keys = keys_by_structure(model, checkpoint.graph, identities)
        name_by_key = {key: name for name, key in checkpoint.keys.items()}

        structural = {}
        for path, variable in chosen.items():
            identity = id(variable)
            key = keys.get(identity, "")
            name = name_by_key.get(key)
            if name is not None:
                structural[path] = name
        names = max(structural, names, key=fit)

    by_rank = []
    for path, name in names.items():
        is_ranked = ranked.get(path) == name
        is_exact = exact.get(path) == name
        if is_ranked and not is_exact:
            by_rank.append(path)
    chosen_names = {path: name for path, name in names.items() if path in chosen}
    return chosen_names, by_rank


def apply_renames(
    file: WeightFile, rename: Iterable[tuple[str, str]], option: str
) -> dict[str, str]:
    """Returns a dict from new name to name in a file, after replacements in order.

    Args:
      file: The file of weights.
      rename: Pairs of a regular expression and a replacement.
      option: The flag or the path of the config value that gives them, for messages.

    Raises:
      UsageError: when a pattern matches no name, or two variables get one name.
    """
    new_names = list(file.shapes)
    for pattern, replacement in rename:
        check_patterns(option, [pattern], new_names, owner=file.path)
        new_names = [re.sub(pattern, replacement, name) for name in new_names]

    names: dict[str, str] = {}
    for new, name in zip(new_names, file.shapes, strict=True):
        if new in names:
            raise UsageError(
                f"{option}: {names[new]} and {name} would both be {new}; change the patterns"
            )
        names[new] = name
    return names


def _namings(model: Model, file: WeightFile) -> list[dict[str, str]]:
    """Returns each naming that a file may have for the weights of a model.

    A naming is a dict from name to variable path.
    """
    weights = weights_by_path(model)
    path_by_id = {id(variable): path for path, variable in weights.items()}

    # The user's numbers of layers count, and ranks for those of Keras.
    own = layer_names(model)
    if file.has_user_numbers and own is not None:
        named = {}
        for name, variable in model_variables(model).items():
            user_name = own.get(name, name)
            named[user_name] = id(variable)

        # Weights are only a part of the variables.
        naming = {}
        for name, identity in named.items():
            if identity in path_by_id:
                naming[name] = path_by_id[identity]
        return [naming]

    namings = [{path: path for path in weights}]
    is_numbered = isinstance(file, KerasFile) and file.has_numbered_variables
    if is_numbered and isinstance(model, keras.Layer):
        # The file may be that of a part of the model.
        for part in (model, *inner_models(model)):
            naming = {}
            for name, variable in _list_numbered_variables(part):
                naming[name] = path_by_id[id(variable)]
            namings.append(naming)
    return namings


def _equal_names(
    ours: Sequence[Mapping[str, str]],
    chosen: Collection[str],
    theirs: Mapping[str, str],
    fit: Fit,
) -> dict[str, str]:
    """Returns the equal names in the file, by path of a weight. The form that fits best counts.

    The names of the whole model are compared, and those that are chosen alone, which may have a
    common first part.
    """
    chosen_namings = []
    for naming in ours:
        chosen_naming = {name: path for name, path in naming.items() if path in chosen}
        chosen_namings.append(chosen_naming)

    our_forms: list[Mapping[str, str]] = []
    for naming in (*ours, *chosen_namings):
        our_forms += _forms(naming)
    their_forms = list(_forms(theirs))

    # Each form of the model's names is compared with each form of the file's names.
    candidates = []
    for our in our_forms:
        for their in their_forms:
            equal_names = {path: their[name] for name, path in our.items() if name in their}
            candidates.append(equal_names)
    return max(candidates, key=fit)


def _forms(names: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yields the forms of names that are compared.

    These are the names as they are, without the section of the model, and without their common
    first part.
    """
    yield names
    unprefixed = {name.removeprefix(MODEL): value for name, value in names.items()}
    yield unprefixed

    first_parts = set()
    inner = {}
    for name, value in unprefixed.items():
        first_part, _, rest = name.partition("/")
        first_parts.add(first_part)
        inner[rest] = value

    # Where the first parts differ, or nothing follows them, they are layers.
    has_inner_parts = any("/" in name for name in inner)
    if len(first_parts) == 1 and has_inner_parts:
        yield inner


def _list_numbered_variables(model: keras.Layer) -> Iterator[tuple[str, tf.Variable]]:
    """Yields pairs of a name and a variable, with the names that a file of Keras 3 has.

    A name consists of the names of layers and a number.
    """
    pending = [("", model)]
    visited = {id(model)}

    while pending:
        outer, layer = pending.pop(0)
        children = get_child_layers(layer)
        unvisited = [child for child in children if id(child) not in visited]
        unvisited_ids = {id(child) for child in unvisited}
        visited |= unvisited_ids

        # A layer numbers only those variables that are not of a layer below it.
        below: set[int] = set()
        for child in children:
            child_ids = {id(variable) for variable in child.weights}
            below |= child_ids
        own = [variable for variable in layer.weights if id(variable) not in below]
        for number, variable in enumerate(own):
            yield f"{outer}{number}", native_variable(variable)

        for child in unvisited:
            child_prefix = f"{outer}{child.name}/"
            pending.append((child_prefix, child))


def get_child_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers in the attributes of a Keras layer, each once.

    Layers in lists and dicts that are attributes count too.
    """
    layers = _layers_in(vars(layer).values())
    return list({id(child): child for child in layers}.values())


def _layers_in(values: Iterable[object]) -> Iterator[keras.Layer]:
    for value in values:
        if isinstance(value, keras.Layer):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _layers_in(value)
        elif isinstance(value, Mapping):
            yield from _layers_in(value.values())


@dataclass(frozen=True)
class Match:
    """The match between one object of a checkpoint and a model.

    Attributes:
      part: The attributes that lead to the object. "" is the root.
      node: The object's node.
      pairs: (variable, key of its value) for each variable with a value, in whatever shape.
      misfits: (name, what is wrong, shape in the file, shape here) of the variables without a value
        of their shape.
      is_averaged: Whether the values are moving averages, as far as there are any.
    """

    part: str
    node: int
    pairs: list[tuple[tf.Variable, str]]
    misfits: list[tuple[str, str, Shape | None, Shape]]
    is_averaged: bool = False


def find_best_match(
    model: Model, graph: CheckpointGraph, part: str | None = None, averaged: bool | str = True
) -> Match:
    """Returns the match that leaves the fewest variables without a value.

    Args:
      model: The built model.
      graph: The graph of the checkpoint.
      part: The attributes that lead to the model in the checkpoint, such as "net". With None, it is
        searched for.
      averaged: Whether to use the moving averages of a run instead of its weights, if there are
        any, or the name of one of several averages.

    Raises:
      UsageError: when no such part or average exists, or several parts fit.
    """
    nodes = graph.nodes(_DEPTH)
    if part is not None:
        if part not in nodes:
            suggestion = suggest_names(part, list(nodes))
            raise UsageError(f"part: {graph.prefix} has no {part!r}; {suggestion}")
        nodes = {part: nodes[part]}

    def rate(match: Match) -> tuple[int, bool]:
        # Among equal matches, the one of the attribute "model" counts.
        is_model = match.part == "model"
        return -len(match.misfits), is_model

    matches = list(_list_matches(model, graph, nodes))
    best = max(matches, key=rate)

    # A node fits if all weights have a value of their shape in one of its matches.
    fitting_parts: dict[int, str] = {}
    for match in matches:
        if not match.misfits:
            fitting_parts[match.node] = match.part or "the root"
    if part is None and best.part != "model" and len(fitting_parts) > 1:
        names = ", ".join(sorted(fitting_parts.values()))
        raise UsageError(
            f"{graph.prefix} has several parts that fit: {names}; give one of them as part="
        )

    if averaged is False or averaged == WEIGHTS:
        return best

    # By default, averages are used where the run has them, and only for its model.
    root = graph.children(ROOT)
    more_node = root.get("more_averages")
    more_averages = graph.children(more_node)
    averages = {AVERAGE: root.get(AVERAGE), **more_averages}
    has_average = averages[AVERAGE] is not None
    is_run_model = best.part == "model"
    if averaged is True and not (has_average and is_run_model):
        return best

    name = AVERAGE if averaged is True else averaged
    if averages.get(name) is None:
        suggestion = suggest_names(name, [WEIGHTS, *averages])
        raise UsageError(f"averaged: {graph.prefix} has no average {name!r}; {suggestion}")
    average_nodes = graph.children(averages[name])
    return _with_averages(model, graph, best, average_nodes)


def inner_models(model: Model) -> list[keras.Model]:
    """Returns the Keras models that are layers of a model, such as a separate backbone."""
    layers = getattr(model, "layers", ())
    return [layer for layer in layers if isinstance(layer, keras.Model)]


def keys_by_structure(
    model: Model, graph: CheckpointGraph, variable_ids: Collection[int]
) -> dict[int, str]:
    """Returns the key of the value of each variable, by id(tf.Variable).

    The objects of a checkpoint and of a model that fit best lead to the values. The checkpoint may
    contain a part of the model, such as a Keras model inside of it, and values of other shapes.

    Args:
      model: A built model.
      graph: The graph of the checkpoint.
      variable_ids: id(tf.Variable) of the variables to find. The objects that have most of them fit
        best.
    """

    def rate(match: Match) -> tuple[int, int, bool]:
        num_fitting = 0
        for variable, key in match.pairs:
            has_shape = graph.shapes[key] == tuple(variable.shape)
            num_fitting += has_shape and id(variable) in variable_ids
        is_model = match.part == "model"
        return num_fitting, -len(match.misfits), is_model

    nodes = graph.nodes(_DEPTH)
    matches: list[Match] = []
    for part in (model, *inner_models(model)):
        matches += _list_matches(part, graph, nodes)
    best = max(matches, key=rate)
    return {id(variable): key for variable, key in best.pairs}


def _list_matches(
    model: Model, graph: CheckpointGraph, nodes: Mapping[str, int]
) -> Iterator[Match]:
    """Yields the matches of a model with nodes of a checkpoint.

    These are the nodes that have a name of the model's children, and the first node.
    """
    for children_of in _views(model, graph):
        names = {name.lstrip("_") for name in children_of(model)}
        for number, (part, node) in enumerate(nodes.items()):
            node_names = {name.lstrip("_") for name in graph.children(node)}
            if number == 0 or names & node_names:
                yield _match_node(model, graph, part, node, children_of)


def _match_node(
    model: Model, graph: CheckpointGraph, part: str, node: int, children_of: Children
) -> Match:
    """Walks model and checkpoint together, and matches variables with values by the same names."""
    entries: dict[int, tuple[str, tf.Variable, str | None]] = {}

    # The visited objects stay alive, so that no other one gets their id.
    visited: dict[tuple[int, int | None], object] = {}
    pending: deque[tuple[str, int | None, object]] = deque([("", node, model)])
    while pending:
        path, current, item = pending.popleft()
        if isinstance(item, (tf.Variable, keras.Variable)):
            variable = native_variable(item)

            # Of several paths to a variable, the first one that has a value counts.
            identity = id(variable)
            if identity not in entries or entries[identity][2] is None:
                entries[identity] = (path, variable, graph.key(current))
        elif (id(item), current) not in visited:
            visited[id(item), current] = item
            edges = graph.children(current)
            for name, child in children_of(item).items():
                child_path = f"{path}/{name}".lstrip("/")
                public_node = edges.get(name.lstrip("_"))
                child_node = edges.get(name, public_node)
                pending.append((child_path, child_node, child))

    # The weights that have no value, or one of another shape.
    model_weights = getattr(model, "weights", None) or model.variables
    weights = {id(native_variable(weight)): weight for weight in model_weights}
    misfits = []
    for identity, weight in weights.items():
        no_entry = (variable_path(weight), weight, None)
        path, _, key = entries.get(identity, no_entry)
        saved = graph.shapes[key] if key else None
        shape = tuple(weight.shape)
        if saved != shape:
            problem = "another shape" if key else "missing in the checkpoint"
            misfits.append((path, problem, saved, shape))

    # A weight counts in whatever shape, and any other variable only in its own.
    pairs = []
    for identity, (_, variable, key) in entries.items():
        if not key:
            continue
        has_shape = graph.shapes[key] == tuple(variable.shape)
        if identity in weights or has_shape:
            pairs.append((variable, key))
    return Match(part, node, pairs, misfits)


def _views(model: Model, graph: CheckpointGraph) -> list[Children]:
    """Returns the sets of names that a model's variables may have.

    Each is a function that maps an object to its children. In a checkpoint of a run that has
    recorded the user's numbers of layers, only names with these numbers count.
    """
    named = model_variables(model)
    recorded = read_layer_names(graph.prefix)
    own = layer_names(model)
    if named is model or own is None:
        return [_get_tracked_children]
    if recorded is None:
        return [lambda item: named if item is model else {}, _get_tracked_children]

    # The variables get the names of the checkpoint, where the user's numbers are the same.
    model_node = graph.children(ROOT).get("model")
    saved = {}
    for name in graph.children(model_node):
        user_name = recorded.get(name, name)
        saved[user_name] = name

    same = {}
    for name, variable in named.items():
        user_name = own.get(name, name)
        if user_name in saved:
            saved_name = saved[user_name]
            same[saved_name] = variable
    return [lambda item: same if item is model else {}]


def _get_tracked_children(item: object) -> dict[str, object]:
    """Returns what TensorFlow tracks, and layers by number, as in Keras 2's TensorFlow format."""
    children = dict(tf.train.TrackableView.children(item))
    if not isinstance(item, keras.Model):
        return children

    # Keras 2 counted only the layers that have weights.
    weighted = [layer for layer in item.layers if layer.weights]
    for number, layer in enumerate(weighted):
        children[f"layer_with_weights-{number}"] = layer
    return children


def _with_averages(
    model: Model, graph: CheckpointGraph, match: Match, nodes: Mapping[str, int]
) -> Match:
    """Replaces the weights in a match by moving averages.

    Variables without an average keep their weights.

    Args:
      model: The built model.
      graph: The graph of the checkpoint.
      match: The match.
      nodes: The nodes of the averages by path.
    """
    # The averages are those of the trainable weights, or of all weights.
    for trainable_only in (True, False):
        options = EMAConfig(trainable_weights_only=trainable_only)
        variables = select_averaged_variables(model, options)
        average_paths = average_keys(variables)
        variable_by_path = dict(zip(average_paths, variables, strict=True))
        if not nodes.keys() <= variable_by_path.keys():
            continue

        keys = {}
        for name, node in nodes.items():
            variable = native_variable(variable_by_path[name])
            keys[id(variable)] = graph.key(node)
        pairs = []
        for variable, key in match.pairs:
            average_key = keys.get(id(variable))
            pairs.append((variable, average_key or key))
        return replace(match, pairs=pairs, is_averaged=True)
    raise UsageError(
        f"the moving averages in {graph.prefix} belong to other variables "
        "than those of this model; "
        "use load_model, or give averaged=False to load the weights themselves"
    )

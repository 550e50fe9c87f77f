"""Finds variables and hash tables by the path of attributes that leads to them.

A path such as `task/critic/_layers/0/_kernel` depends only on names in the user's code: neither on TensorFlow's and
Keras' counters nor on the order in which a process creates objects.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import owner_of, trackable_class
from trainer_kit.errors.user_frames import is_framework

_LARGEST = 10_000  # items of a container that is searched: a larger one is data
_COUNTERS = {"_train_counter", "_test_counter", "_predict_counter"}  # of the loops of a tf_keras model, unused here
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}  # data in lists may be millions of such
_HOLDERS = (trackable_class(), keras.Layer, keras.Optimizer, keras.Metric)
_TABLES = (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)


def reachable(roots: Mapping[str, Any], apart_from: Iterable[Any] = ()) -> dict[str, Any]:
    """Returns a dict from path to tf.Variable or mutable hash table, each once, by its shortest path. Runs eagerly.

    Searches attributes, lists, tuples, dicts, and the closures, defaults and used module globals of functions. Of
    TensorFlow, Keras and this package it searches only objects that hold variables.

    Args:
      roots: The objects to start from, by the first part of their paths.
      apart_from: Objects to skip, for example a large model that takes long to search.
    """
    found: dict[str, Any] = {}
    seen = {id(one): one for one in apart_from}  # the objects too, so that no other takes the id of one that is gone
    waiting = deque(roots.items())
    while waiting:
        path, item = waiting.popleft()
        leaf = _leaf(item)
        item = item if leaf is None else leaf
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if leaf is not None:
            found[path] = leaf
        else:
            children = [pair for pair in _children(item) if type(pair[1]) not in _PLAIN]
            children.sort(key=lambda pair: (pair[0].startswith("_"), pair[0]))
            waiting.extend((f"{path}/{name}", child) for name, child in children)
    return found


def is_state(item: Any) -> bool:
    """Whether `item` is a variable or a mutable hash table."""
    return isinstance(item, (tf.Variable, *_TABLES))


def _leaf(item: Any) -> Any:
    """Returns the variable or table that `item` is or wraps; None if there is none."""
    if isinstance(item, (keras.random.SeedGenerator, tf.random.Generator)):
        item = item.state
    if isinstance(item, keras.Variable):
        item = item.value
    return item if is_state(item) else None


def _children(item: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(item, (str, bytes, tf.Tensor, tf.data.Dataset, tf.data.Iterator)):
        return ()
    if isinstance(item, (dict, types.MappingProxyType)):  # another mapping may read a file for each key
        keys = enumerate(item.items()) if len(item) <= _LARGEST else ()
        return [(_of_key(key, number), value) for number, (key, value) in keys]
    if isinstance(item, (list, tuple)):
        return [(str(number), value) for number, value in enumerate(item)] if len(item) <= _LARGEST else ()
    if isinstance(item, functools.partial):
        return [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    if isinstance(item, types.MethodType):
        return [("self", owner_of(item)), ("func", item.__func__)]
    if isinstance(item, types.FunctionType):
        return _of_function(item)
    if isinstance(item, (property, staticmethod, classmethod, functools.cached_property)):
        functions = (getattr(item, name, None) for name in ("fget", "__func__", "func"))
        return [("func", function) for function in functions if function is not None]
    if isinstance(item, tf.types.experimental.PolymorphicFunction):
        return [("func", item.python_function)]
    if isinstance(item, (type, types.ModuleType)):
        return ()
    return _of_object(item)


def _of_key(key: Any, number: int) -> str:
    """Returns a dict's key as a name that is the same in the next process; a large integer may be an id: numbered."""
    return str(key) if isinstance(key, str) or (isinstance(key, int) and abs(key) <= _LARGEST) else f"#{number}"


def _of_object(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object, including those of user classes and `__slots__`."""
    own = not is_framework(type(item).__module__)
    if not own and not isinstance(item, (_HOLDERS, types.SimpleNamespace)):
        return
    attributes = dict(getattr(item, "__dict__", None) or {})
    for kind in type(item).__mro__ if own else ():
        if not is_framework(kind.__module__):
            attributes = {**vars(kind), **attributes}
    for name, value in attributes.items():
        if isinstance(value, types.MemberDescriptorType):  # of __slots__
            value = getattr(item, name, None)
        if name not in _COUNTERS and (not name.startswith("__") or name == "__call__"):
            yield name, value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the closure, the defaults and the used module globals of a user's function."""
    if is_framework(function.__module__):
        if inspect.unwrap(function) is not function:  # such as by tf.autograph.experimental.do_not_convert
            yield "func", inspect.unwrap(function)
        return
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one has no contents
            yield name, cell.cell_contents
    yield from _numbered("defaults", function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    used = set(_names_in(function.__code__))
    for name in used:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and not is_framework(value.__name__):
            yield from ((f"{name}.{one}", vars(value)[one]) for one in used if one in vars(value))
        elif value is not None:
            yield name, value
    yield from vars(function).items()


def _numbered(name: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields each value with a numbered name."""
    return ((f"{name}.{number}", value) for number, value in enumerate(values))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that a function and its inner functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)

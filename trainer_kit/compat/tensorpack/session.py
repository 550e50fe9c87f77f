"""Session and HookedSession: `run` on the graph of a program, with the names of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.program_graph import (
    ProgramGraph,
    current_program_graph,
    get_program_graph,
)

_v1: Any = tf.compat.v1


class Session(_v1.Session):
    """A session on the graph of a program.

    Its variables are those of the graph: two sessions on one graph share them.

    Args:
      target: Not used.
      graph: The graph. None: the default one.
      config: Not used. Devices and threads are those of TensorFlow 2.
    """

    def __init__(self, target: str = "", graph: tf.Graph | None = None, config: Any = None) -> None:
        self.program: ProgramGraph
        if graph is None:
            self.program = current_program_graph()
        else:
            self.program = get_program_graph(graph)
        self._contexts: list[Any] = []

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self.program.graph

    @property
    def graph_def(self) -> Any:
        """The definition of the graph."""
        return self.program.graph.as_graph_def()

    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Runs a part of the graph. Runs on the host, eagerly or while a graph is built.

        Args:
          fetches: Tensors, operations, variables or their names, in any nested structure.
          feed_dict: Values of tensors, which are given by themselves or by name.
          options, run_metadata: Not used.

        Returns:
          The values as NumPy arrays, in the same structure. The value of an operation is None.

        Raises:
          UsageError: When a name is unknown, or a placeholder has no value.
        """
        elements = [self.program.get_element(fetch) for fetch in flatten_fetches(fetches)]
        feeds: dict[Any, Any] = {}
        for key, value in (feed_dict or {}).items():
            element = self.program.get_element(key)
            if isinstance(element, tf.SparseTensor):
                parts = (element.indices, element.values, element.dense_shape)
                feeds.update(zip(parts, value, strict=True))
            else:
                feeds[element] = value
        results = self.program.run(elements, feeds)
        return pack_results(fetches, results)

    def make_callable(
        self, fetches: Any, feed_list: Sequence[Any] | None = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """Returns a function of the values of `feed_list` that runs the fetches."""
        feeds = [self.program.get_element(feed) for feed in feed_list or ()]
        elements = [self.program.get_element(fetch) for fetch in flatten_fetches(fetches)]

        def call(*values: Any) -> Any:
            # A predictor takes no data of a training for an input that its caller has left out.
            self.program.cut(feeds, elements).check_placeholders()
            results = self.program.run(elements, dict(zip(feeds, values, strict=True)))
            return pack_results(fetches, results)

        return call

    def list_devices(self) -> list[Any]:
        """Returns the devices of TensorFlow."""
        with tf.init_scope():
            return list(tf.config.list_logical_devices())

    def close(self) -> None:
        """Does nothing: the variables belong to the graph."""

    def __enter__(self) -> Session:
        graph = self.graph.as_default()
        session = self.as_default()
        self._contexts.append((graph, session))
        graph.__enter__()
        session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        graph, session = self._contexts.pop()
        session.__exit__(*error)
        graph.__exit__(*error)

    def __del__(self) -> None:
        """Does nothing: there is no session of TensorFlow 1 to delete."""


class HookedSession:
    """A session that runs what its hooks ask for along with each call, as MonitoredSession does.

    Args:
      session_creator: An object with a method `create_session`.
      hooks: Objects with the methods of tf.train.SessionRunHook.
      stop_grace_period_secs: Not used.
    """

    def __init__(
        self,
        session_creator: Any = None,
        hooks: Sequence[Any] | None = None,
        stop_grace_period_secs: int = 120,
    ) -> None:
        self._session = session_creator.create_session() if session_creator else Session()
        self._hooks = list(hooks or ())
        self._is_stop_requested = False

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self._session.graph

    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Runs the fetches and those of the hooks in one call. See Session.run."""
        arguments = _v1.train.SessionRunArgs(fetches, feed_dict)
        context = _v1.train.SessionRunContext(arguments, self._session)
        all_fetches: list[Any] = [fetches]
        feeds = dict(feed_dict or {})
        requests = []
        for hook in self._hooks:
            request = hook.before_run(context)
            requests.append(request)
            if request is not None:
                all_fetches.append(request.fetches)
                feeds.update(request.feed_dict or {})

        results = iter(self._session.run(all_fetches, feeds))
        result = next(results)
        for hook, request in zip(self._hooks, requests, strict=True):
            values = None if request is None else next(results)
            hook.after_run(context, _v1.train.SessionRunValues(values, None, run_metadata))
        self._is_stop_requested = self._is_stop_requested or context.stop_requested
        return result

    def should_stop(self) -> bool:
        """Whether a hook has asked for a stop."""
        return self._is_stop_requested

    def close(self) -> None:
        """Does nothing. The trainer calls the callbacks."""

    def __enter__(self) -> HookedSession:
        return self

    def __exit__(self, *error: Any) -> None:
        """Does nothing."""


def flatten_fetches(fetches: Any) -> list[Any]:
    """Returns the single fetches of nested lists, tuples and dicts. None has no fetch."""
    if fetches is None:
        return []
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if not isinstance(fetches, (list, tuple)):
        return [fetches]
    return [fetch for part in fetches for fetch in flatten_fetches(part)]


def pack_results(fetches: Any, results: Sequence[Any]) -> Any:
    """Returns the results in the structure of the fetches."""
    return _pack(fetches, iter(results))


def _pack(fetches: Any, results: Iterator[Any]) -> Any:
    if fetches is None:
        return None
    if isinstance(fetches, Mapping):
        # The keys of a dict may be of any type, such as the hooks of TensorFlow's sessions.
        return {key: _pack(part, results) for key, part in fetches.items()}
    if not isinstance(fetches, (list, tuple)):
        return next(results)
    values = [_pack(part, results) for part in fetches]
    if hasattr(fetches, "_fields"):
        return type(fetches)(*values)
    return type(fetches)(values)

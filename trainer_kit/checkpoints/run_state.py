"""RunState: what a run has to remember beside its variables, as one string variable of its checkpoint.

TensorFlow serialises Python state in the thread of the save, later than it copies the variables. So the parts are
turned into JSON on the caller's thread, just before a save, and travel as a variable. No part may hold a wall-clock
value: a run that was killed and one that was not have equal checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

_LOG = logging.getLogger(__name__)


class RunState:
    """Named parts, each with a function that returns its value and one that takes it back.

    Attributes:
      variable: string scalar, on the host; what a checkpoint holds.
    """

    def __init__(self) -> None:
        # Not tf.Variable: a strategy of several workers would broadcast its value, and cannot broadcast a string.
        with tf.device("CPU:0"), tf.init_scope():
            self.variable = ResourceVariable("", trainable=False, name="run_state")
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def add(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Adds a part.

        Args:
          name: its key; one that is there already is replaced.
          get: returns what JSON can hold.
          put: takes what `get` returned when the checkpoint was made; None when the checkpoint has no such part.
        """
        self._parts[name] = (get, put)

    def store(self) -> None:
        """Puts all parts into the variable; eager, on the host, right before a save."""
        values = {name: get() for name, (get, _) in self._parts.items()}
        self.variable.assign(json.dumps(values, sort_keys=True))

    def load(self) -> None:
        """Hands all parts what the variable holds; eager, on the host, after a restore."""
        text = self.variable.numpy()
        values = json.loads(text) if text else {}
        if unknown := sorted(values.keys() - self._parts.keys()):
            _LOG.warning("the checkpoint holds the state of what this run does not have: %s", ", ".join(unknown))
        for name, (_, put) in self._parts.items():
            put(values.get(name))

    def clear(self) -> None:
        """Forgets what was loaded, for a run that starts anew."""
        self.variable.assign("")
        self.load()

"""Loads values of variables by name: from checkpoints, .npz files and dicts.

A checkpoint is one of TensorFlow 1, which Tensorpack writes, or of the engine. Variables of the
graph that a source lacks keep their initial values, as in Tensorpack.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.checkpoints.state.strict_restore import format_differences
from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.tfutils.common import get_op_tensor_name
from trainer_kit.compat.tensorpack.tfutils.varmanip import (
    SessionUpdate,
    get_checkpoint_path,
    get_savename_from_varname,
    is_training_name,
    load_checkpoint_vars,
)
from trainer_kit.compat.tensorpack.utils import logger

__all__ = [
    *("SessionInit", "ChainInit", "SaverRestore", "SaverRestoreRelaxed", "DictRestore"),
    *("JustCurrentSession", "get_model_loader", "SmartInit"),
]


class SessionInit:
    """Gives variables of the graph their values in a new run. Runs on the host."""

    def init(self, sess: Any) -> None:
        """Loads the values."""
        self._setup_graph()
        self._run_init(sess)

    def _setup_graph(self) -> None:
        """Adds to the graph what loading needs."""

    def _run_init(self, sess: Any) -> None:
        """Loads the values."""


class JustCurrentSession(SessionInit):
    """Loads nothing."""


class DictRestore(SessionInit):
    """Loads the values of a dict.

    Args:
      variable_dict: The values by name.
      ignore_mismatch: Whether values of another size are left out with a warning.
    """

    def __init__(self, variable_dict: Mapping[str, Any], ignore_mismatch: bool = False) -> None:
        self._values = {get_op_tensor_name(name)[0]: variable_dict[name] for name in variable_dict}
        self._ignore_mismatch = ignore_mismatch

    def _run_init(self, sess: Any) -> None:
        load_values(
            sess, self._values, "the dict", can_reshape=True, ignore_mismatch=self._ignore_mismatch
        )


class SaverRestore(SessionInit):
    """Loads a checkpoint.

    Args:
      model_path: The prefix of a checkpoint, the file `checkpoint` of its folder, or the folder.
      prefix: A scope of the graph whose variables the checkpoint has without it.
      ignore: The names of variables in the checkpoint that are not loaded.

    Attributes:
      path: The prefix of the checkpoint, or the folder.
    """

    is_relaxed = False

    def __init__(
        self, model_path: str, prefix: str | None = None, ignore: Sequence[str] = ()
    ) -> None:
        self.path: str = get_checkpoint_path(model_path)
        self.prefix = prefix
        self.ignore = [get_op_tensor_name(name)[0] for name in ignore]

    def _run_init(self, sess: Any) -> None:
        logger.info(f"Restoring checkpoint from {self.path} ...")
        values = load_checkpoint_vars(self.path)
        load_values(
            sess,
            values,
            self.path,
            can_reshape=self.is_relaxed,
            ignore_mismatch=self.is_relaxed,
            prefix=self.prefix,
            ignore=self.ignore,
        )


class SaverRestoreRelaxed(SaverRestore):
    """Loads a checkpoint. Values of another size are left out with a warning. See SaverRestore."""

    is_relaxed = True


class ChainInit(SessionInit):
    """Loads from several sources, one after the other.

    Args:
      sess_inits: The sources.
    """

    def __init__(self, sess_inits: Sequence[SessionInit]) -> None:
        self.inits = sess_inits

    def _setup_graph(self) -> None:
        for session_init in self.inits:
            session_init._setup_graph()

    def _run_init(self, sess: Any) -> None:
        for session_init in self.inits:
            session_init._run_init(sess)


def SmartInit(obj: Any, *, ignore_mismatch: bool = False) -> SessionInit:
    """Returns the SessionInit of a source.

    Args:
      obj: A checkpoint (see SaverRestore), a .npz or .npy file, a dict of values, a list of these,
        or "" or None for nothing.
      ignore_mismatch: Whether values of another size are left out with a warning.

    Raises:
      UsageError: When it is none of these, or the file does not exist.
    """
    if isinstance(obj, Mapping):
        return DictRestore(obj, ignore_mismatch)
    if not obj:
        return JustCurrentSession()
    if isinstance(obj, (list, tuple)):
        return ChainInit([SmartInit(item, ignore_mismatch=ignore_mismatch) for item in obj])
    if not isinstance(obj, (str, os.PathLike)):
        raise ProgramError(
            f"SmartInit({obj!r:.60}): give the path of a checkpoint or of a .npz file, a dict of"
            " arrays, or a list of these"
        )

    path = os.path.expanduser(os.fspath(obj))
    if not tf.io.gfile.glob(f"{path}*"):
        raise ProgramError(f"SmartInit({path!r}): there is no such checkpoint or file")
    if path.endswith(".npz"):
        return DictRestore(dict(np.load(path)), ignore_mismatch)
    if path.endswith(".npy"):
        values = np.load(path, encoding="latin1", allow_pickle=True).item()
        return DictRestore(values, ignore_mismatch)
    if ignore_mismatch:
        return SaverRestoreRelaxed(path)
    return SaverRestore(path)


get_model_loader = SmartInit


def load_values(
    sess: Any,
    values: Mapping[str, Any],
    source: str,
    *,
    can_reshape: bool,
    ignore_mismatch: bool,
    prefix: str | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Loads values into the variables of the default graph. Runs on the host.

    Args:
      sess: The session.
      values: The values by name.
      source: Where they come from.
      can_reshape: Whether a value of the same size and another shape fits.
      ignore_mismatch: Whether values of another shape are left out with a warning.
      prefix: See SaverRestore.
      ignore: See SaverRestore.

    Raises:
      UsageError: When a value has another shape, or no value fits.
    """
    variables = tf.compat.v1.global_variables()
    matches: list[tuple[tf.Variable, Any]] = []
    rows: list[tuple[str, str, Any, Any]] = []
    unused_names = set(values)
    mismatches = 0
    for variable in variables:
        name = get_savename_from_varname(variable.op.name, prefix)
        shape = tuple(variable.shape.as_list())
        if name not in values:
            rows.append((variable.op.name, "missing in the source", None, shape))
            continue

        unused_names.discard(name)
        if name in ignore:
            logger.info(f"The variable {name} is not loaded, as ignore= says")
            continue
        saved_shape = np.shape(values[name])
        is_same_size = np.prod(saved_shape) == np.prod(shape)
        if saved_shape == shape or (can_reshape and is_same_size):
            matches.append((variable, values[name]))
        else:
            mismatches += 1
            rows.append((variable.op.name, "another shape", saved_shape, shape))

    for name in unused_names:
        saved_shape = np.shape(values[name])
        rows.append((name, "not in the graph", saved_shape, None))
    # As in Tensorpack, the variables of optimizers and averages are not listed.
    rows = [row for row in rows if not is_training_name(row[0])]
    rows.sort(key=lambda row: row[0].rpartition("/"))
    has_no_match = bool(values and variables) and not matches
    if not ignore_mismatch and (mismatches or has_no_match):
        raise ProgramError(
            f"{source} does not fit the graph of the program:\n{format_differences(rows)}\n  Load"
            " one of the same model, or give SmartInit(..., ignore_mismatch=True), which leaves out"
            " values of another size"
        )

    if rows:
        logger.warn(f"{source} differs from the graph:\n{format_differences(rows)}")
    for variable, value in matches:
        variable.load(SessionUpdate.relaxed_value_for_var(value, variable), sess)

"""A folder of best weights that programs of Model Garden can read.

The best weights are `ckpt-<step>.*`, which TensorFlow's pointer file `checkpoint` names: Model Garden finds them by it.
`best_ckpt-1.*` is a second name, for programs that give the name themselves. info.json holds what Model Garden writes
there: nested metrics and `best_ckpt_global_step`. Best weights that Model Garden has left in the folder are taken over
if they can be trusted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.commit import problem
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.info_json import GARDEN_STEP, read_info
from trainer_kit.evals.best.kept_weights import info_of
from trainer_kit.telemetry.scalars import flat_scalars

_SECOND_NAME = "best_ckpt-1"
_COUNTER = "global_step/.ATTRIBUTES/VARIABLE_VALUE"
_LOG = logging.getLogger(__name__)


class GardenBestFolder(BestFolder):
    """A BestFolder whose info.json has the form of Model Garden, and whose best weights have a second name.

    Args:
      path: of the folder; local.
      writes: False where another process writes: then nothing is changed.
    """

    def adopt(self, metric: str) -> None:
        """Takes over the best weights that Model Garden has left here, if its info.json belongs to them.

        Raises:
          StorageError: when a file cannot be written.
        """
        info = self._of_model_garden(metric, quiet=False) if self.writes else None
        if info is None:
            return
        source, target = str(tf.train.latest_checkpoint(self.path)), self.prefix(info["step"])
        _link(source, target)
        self.note(info)
        self.name(info)
        if source not in (target, self._second):
            _remove(source)
        _LOG.info("%s was taken over: %s %s at step %d", source, metric, info["value"], info["step"])

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns what is noted of weights that are whole; for workers, also what the chief is about to take over."""
        found = super().infos(metric)
        info = None if self.writes else self._of_model_garden(metric)
        return found if info is None else dict(sorted({info["step"]: info, **found}.items()))

    def told(self) -> dict[str, Any] | None:
        """Returns what is noted of the weights that info.json names."""
        return read_info(self.path, quiet=True)

    def name(self, info: dict[str, Any]) -> bool:
        """Makes info.json, the pointer file and the second name be of weights that are there; see BestFolder."""
        changed = super().name(info)
        if self.writes:
            _link(self.prefix(info["step"]), self._second)
        return changed

    def name_none(self) -> None:
        """Removes info.json, the pointer file and the second name."""
        super().name_none()
        if self.writes and os.path.isdir(self.path):
            _remove(self._second)

    def written_form(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of info.json for weights, given what is noted of them."""
        return {**nested(info["metrics"]), GARDEN_STEP: float(info["step"])}

    @property
    def _second(self) -> str:
        return os.path.join(self.path, _SECOND_NAME)

    def _of_model_garden(self, metric: str, quiet: bool = True) -> dict[str, Any] | None:
        """Returns what to note of weights that Model Garden has left here; None if there are none to be trusted."""
        written, noted = files.read_json(self.info_path), self.told()
        if (
            written is None
            or not isinstance(written.get(GARDEN_STEP), float)
            or not math.isfinite(written[GARDEN_STEP])
        ):
            return None
        if noted is not None and json.dumps(self.written_form(noted)) == json.dumps(written):
            return None
        step, prefix = int(written.pop(GARDEN_STEP)), tf.train.latest_checkpoint(self.path)
        finite = math.isfinite(flat_scalars(written, "|").get(metric, math.nan))
        wrong = _mismatch(prefix, step) if finite else "it is not finite, or missing"
        if wrong and not quiet:
            _LOG.warning("%s names %s at step %d: %s; nothing is taken over", self.info_path, metric, step, wrong)
        return None if wrong else info_of(step, written, metric)


def nested(flat: Mapping[str, float]) -> dict[str, Any]:
    """Returns metrics nested as they were before their names were joined by `|`."""
    outer: dict[str, Any] = {}
    for joined, value in flat.items():
        *groups, name = joined.split("|")
        inner = outer
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return outer


def _mismatch(prefix: str | None, step: int) -> str:
    """Returns why the weights at `prefix` are not those of `step`; "" if they are, as far as can be known."""
    if prefix is None:
        return "there are no weights"
    if wrong := problem(prefix):
        return f"{os.path.basename(prefix)} is damaged ({wrong})"
    reader = tf.train.load_checkpoint(prefix)
    held = int(reader.get_tensor(_COUNTER)) if reader.has_tensor(_COUNTER) else step
    return "" if held == step else f"{os.path.basename(prefix)} holds the weights of step {held}"


def _suffixes(prefix: str) -> list[str]:
    """Returns the suffixes of a checkpoint's files, that of the index last."""
    folder, name = os.path.split(prefix)
    matches = (re.fullmatch(re.escape(name) + r"(\.index|\.data-\d{5}-of-\d{5})", one) for one in os.listdir(folder))
    return sorted(match.group(1) for match in matches if match)


def _link(source: str, target: str) -> None:
    """Gives a checkpoint another name, by links where the file system has them.

    A reader finds whole files only: each one is made under a temporary name first and then renamed, the index last.
    """
    renames: dict[str, str] = {}
    try:
        for suffix in _suffixes(source):
            one, other = source + suffix, target + suffix
            if not (os.path.exists(other) and os.path.samefile(one, other)):  # such a rename would leave both names
                temporary = os.path.join(os.path.dirname(other), f".{os.path.basename(other)}.tmp")
                renames[temporary] = other
                _link_or_copy(one, temporary)
        for temporary, other in renames.items():
            os.replace(temporary, other)
    except BaseException:
        for temporary in renames:
            _remove_file(temporary)
        raise
    files.flush_folder(os.path.dirname(target))


def _link_or_copy(source: str, target: str) -> None:
    """Makes the file `target`, in the place of one that a kill has left: a link to `source`, or a copy on the disk."""
    _remove_file(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb+") as copied:
            os.fsync(copied.fileno())


def _remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _remove(prefix: str) -> None:
    for suffix in _suffixes(prefix):
        os.remove(prefix + suffix)

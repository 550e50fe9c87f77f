"""A folder of best weights that programs of Model Garden can read.

The best weights are `ckpt-<step>.*`, which TensorFlow's pointer file `checkpoint` names: Model Garden finds them by it.
`best_ckpt-1.*` are links to them, where the file system has links, for programs that know the name of Model Garden's
first best weights, as its own tests do. info.json holds what Model Garden writes there: nested metrics and
`best_ckpt_global_step`. Best weights that Model Garden has left in the folder are taken over if they can be trusted.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
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
from trainer_kit.checkpoints.startup_scan import not_written
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.info_json import GARDEN_STEP, read_info
from trainer_kit.evals.best.kept_weights import info_of
from trainer_kit.telemetry.scalars import flat_scalars

_LINKED = "best_ckpt-1"
_SUFFIX = r"(\.index|\.data-\d{5}-of-\d{5})"
_COUNTER = "global_step/.ATTRIBUTES/VARIABLE_VALUE"
_LOG = logging.getLogger(__name__)


class GardenBestFolder(BestFolder):
    """A BestFolder whose info.json has the form of Model Garden.

    Args:
      path: The local path of the folder.
      writes: Whether this process writes the folder; if not, it changes nothing.
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
        try:
            if source != target:
                _link(source, target)
        except OSError as error:
            raise not_written(
                f"the best checkpoint {source} cannot be renamed to {target}", self.path, error
            ) from error
        self.note(info)
        self.name(info)
        _LOG.info("Model Garden's %s was taken over: %s %s at step %d", source, metric, info["value"], info["step"])

    def remove_second_names(self) -> None:
        """Removes files `best_ckpt-<n>.*` whose content equals the weights that the pointer file names.

        They come from Model Garden, whose weights were taken over, or from a run of an earlier trainer_kit.

        Raises:
          StorageError: when a file cannot be removed.
        """
        named = (tf.train.latest_checkpoint(self.path) or "") if self.writes else ""
        try:
            for name in os.listdir(self.path) if named else ():
                match = re.fullmatch(rf"(best_ckpt-\d+){_SUFFIX}", name)
                if match and match.group(1) not in (_LINKED, os.path.basename(named)):
                    path, kept = os.path.join(self.path, name), named + match.group(2)
                    if os.path.exists(kept) and filecmp.cmp(path, kept, shallow=False):
                        os.remove(path)
        except OSError as error:
            raise not_written(f"copies of {named} under other names cannot be removed", self.path, error) from error

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns the noted info of whole weights by step; on workers, also of those that the chief will take over."""
        found = super().infos(metric)
        info = None if self.writes else self._of_model_garden(metric)
        return found if info is None else dict(sorted({info["step"]: info, **found}.items()))

    def told(self) -> dict[str, Any] | None:
        """Returns the noted info of the weights that info.json names."""
        return read_info(self.path, quiet=True)

    def name(self, info: dict[str, Any]) -> bool:
        """Makes info.json, the pointer file and the links name weights that exist; see BestFolder."""
        changed = super().name(info)
        self._link_to(self.prefix(info["step"]))
        return changed

    def name_none(self) -> None:
        """Removes info.json, the pointer file and the links."""
        super().name_none()
        self._link_to("")

    def _link_to(self, prefix: str) -> None:
        """Links to the weights at `prefix`; "" removes the links. Errors are ignored: the links are not essential."""
        linked = os.path.join(self.path, _LINKED)
        with contextlib.suppress(OSError):
            if self.writes:
                _remove(linked)
                for suffix in _suffixes(prefix) if prefix else ():
                    os.link(prefix + suffix, linked + suffix)

    def written_form(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of info.json for weights with the noted `info`."""
        return {**nested(info["metrics"]), GARDEN_STEP: float(info["step"])}

    def _of_model_garden(self, metric: str, quiet: bool = True) -> dict[str, Any] | None:
        """Returns the info of best weights that Model Garden left here; None if none of them can be trusted."""
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
        wrong = _mismatch(prefix, step) if finite else "the metric is missing or not finite"
        if wrong and not quiet:
            _LOG.warning(
                "Model Garden's best checkpoint (%s: %s at step %d) was not taken over: %s",
                self.info_path, metric, step, wrong,
            )  # fmt: skip
        return None if wrong else info_of(step, written, metric)


def nested(flat: Mapping[str, float]) -> dict[str, Any]:
    """Returns nested metrics for names joined by `|`; a name stays joined if one of its groups is itself a metric."""
    outer: dict[str, Any] = {}
    for joined, value in flat.items():
        *groups, name = joined.split("|")
        if any(group in flat for group in itertools.accumulate(groups, "{}|{}".format)):
            groups, name = [], joined
        inner = outer
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return outer


def _mismatch(prefix: str | None, step: int) -> str:
    """Returns why the weights at `prefix` are not those of `step`; "" if nothing contradicts it."""
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
    matches = (re.fullmatch(re.escape(name) + _SUFFIX, one) for one in os.listdir(folder))
    return sorted(match.group(1) for match in matches if match)


def _link(source: str, target: str) -> None:
    """Gives a checkpoint another name, by links where the file system supports them.

    The index is written last, and an old index is removed first, so that a reader finds complete weights or none.
    """
    _remove(target)
    for suffix in _suffixes(source):
        try:
            os.link(source + suffix, target + suffix)
        except OSError:
            shutil.copyfile(source + suffix, target + suffix)
            with open(target + suffix, "rb+") as copied:
                os.fsync(copied.fileno())
    files.flush_folder(os.path.dirname(target))


def _remove(prefix: str) -> None:
    for suffix in reversed(_suffixes(prefix)):
        os.remove(prefix + suffix)

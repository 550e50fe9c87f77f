"""A folder of best weights that Model Garden's programs can read as well as ours.

Beside `ckpt-<step>.*` with its record, the best weights are there as `best_ckpt-<n>.*`, the same files under a second
name, which TensorFlow's pointer file `checkpoint` names; and info.json holds what theirs holds: the metrics as they
were nested, and `best_ckpt_global_step`. What Model Garden has left in the folder is taken over, if it can be trusted.
"""

from __future__ import annotations

import contextlib
import filecmp
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
from trainer_kit.evals.best.folder import BestFolder
from trainer_kit.evals.best.info import GARDEN_STEP, read_info
from trainer_kit.evals.best.kept_weights import info_of
from trainer_kit.telemetry.scalars import flat_scalars

_PUBLISHED = re.compile(r"best_ckpt-(\d+)\.(index|data-\d{5}-of-\d{5})")
_COUNTER = "global_step/.ATTRIBUTES/VARIABLE_VALUE"
_LOG = logging.getLogger(__name__)


class GardenBestFolder(BestFolder):
    """A BestFolder whose best weights and info.json Model Garden understands.

    Args:
      path: of the folder; local.
      writes: False where another process writes: then nothing is changed.

    Attributes:
      tells: whether info.json is written at all.
      renumber: whether the next second name is `best_ckpt-1` again, in the place of the one that is there.
    """

    def __init__(self, path: str, writes: bool = True) -> None:
        super().__init__(path, writes)
        self.tells, self.renumber = True, False

    def adopt(self, metric: str) -> None:
        """Takes over the best weights that Model Garden has left here, if info.json is theirs and tells of them.

        Raises:
          StorageError: when a file cannot be written.
        """
        info = self._theirs(metric, quiet=False) if self.writes else None
        if info is None:
            return
        source = str(tf.train.latest_checkpoint(self.path))
        if not _same(source, self.prefix(info["step"])):
            _link_all(source, self.prefix(info["step"]))
        self.note(info)
        self.name(info)
        _LOG.info("%s was taken over: %s %s at step %d", source, metric, info["value"], info["step"])

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns what is noted of weights that are whole; for workers, also what the chief is about to take over."""
        found = super().infos(metric)
        info = None if self.writes else self._theirs(metric)
        return found if info is None else dict(sorted({info["step"]: info, **found}.items()))

    def told(self) -> dict[str, Any] | None:
        """Returns what info.json tells; it is theirs in form."""
        return read_info(self.path, quiet=True)

    def name(self, info: dict[str, Any]) -> bool:
        """Makes pointer and info.json name weights that are there; returns whether they did not say the same before.

        Other second names go last.

        Raises:
          StorageError: when a file cannot be written.
        """
        if not self.writes:
            return False
        changed = self._publish(info["step"])
        changed = (self.tells and self.write_info(info)) or changed
        self._remove_published(self._number())
        return changed

    def write_info(self, info: Mapping[str, Any]) -> bool:
        """Writes info.json, unless it says the same already; returns whether it did not."""
        text = json.dumps(in_their_form(info), indent=4) + "\n"
        with contextlib.suppress(OSError, UnicodeDecodeError), open(self.info_path, encoding="utf-8") as stream:
            if stream.read() == text:
                return False
        files.write_text(self.info_path, text, point="best.info")
        return True

    def name_none(self) -> None:
        """Removes info.json, the pointer and what it names."""
        super().name_none()
        if self.writes:
            self._remove_published(-1)

    def _theirs(self, metric: str, quiet: bool = True) -> dict[str, Any] | None:
        """What is to be noted of the weights that Model Garden has left here; None if it left none to be trusted."""
        told, ours = files.read_json(self.info_path), self.told()
        if told is None or not isinstance(told.get(GARDEN_STEP), float) or not math.isfinite(told[GARDEN_STEP]):
            return None
        if ours is not None and json.dumps(in_their_form(ours)) == json.dumps(told):
            return None
        step, prefix = int(told.pop(GARDEN_STEP)), tf.train.latest_checkpoint(self.path)
        finite = math.isfinite(flat_scalars(told, "|").get(metric, math.nan))
        wrong = _mismatch(prefix, step) if finite else "it is not finite, or missing"
        if wrong and not quiet:
            _LOG.warning("%s names %s at step %d: %s; nothing is taken over", self.info_path, metric, step, wrong)
        return None if wrong else info_of(step, told, metric)

    def _publish(self, step: int) -> bool:
        """Gives the weights of `step` their second name; the pointer moves when that is there."""
        number = self._number()
        if number >= 0 and _same(self.prefix(step), self._published(number)):
            return False
        target = self._published(1 if self.renumber else max(number, 0) + 1)
        _link_all(self.prefix(step), target)
        self._point_to(os.path.basename(target))
        return True

    def _published(self, number: int) -> str:
        return os.path.join(self.path, f"best_ckpt-{number}")

    def _number(self) -> int:
        """The number of the second name that the pointer names; -1 if it names none."""
        with contextlib.suppress(OSError, ValueError, tf.errors.OpError):
            state = tf.train.get_checkpoint_state(self.path)
            match = re.fullmatch(r"best_ckpt-(\d+)", os.path.basename(state.model_checkpoint_path)) if state else None
            return int(match.group(1)) if match else -1
        return -1

    def _remove_published(self, but: int) -> None:
        for name in sorted(os.listdir(self.path)) if os.path.isdir(self.path) else ():
            if (match := _PUBLISHED.fullmatch(name)) and int(match.group(1)) != but:
                os.remove(os.path.join(self.path, name))


def in_their_form(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what info.json says of weights, given what is noted of them."""
    return {**nested(info["metrics"]), GARDEN_STEP: float(info["step"])}


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


def _parts(prefix: str) -> list[str]:
    """The files of a checkpoint, the index last."""
    folder, name = os.path.split(prefix)
    kinds = (re.fullmatch(re.escape(name) + r"(\.index|\.data-\d{5}-of-\d{5})", one) for one in os.listdir(folder))
    return sorted(match.group(1) for match in kinds if match)


def _link_all(source: str, target: str) -> None:
    """Gives a checkpoint another name, by links where the file system has them; the index comes last."""
    for kind in _parts(source):
        folder, name = os.path.split(target + kind)
        temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")  # a name that is removed as debris
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        try:
            os.link(source + kind, temporary)
        except OSError:
            shutil.copyfile(source + kind, temporary)
        os.replace(temporary, target + kind)
    files.flush_folder(os.path.dirname(target))


def _same(one: str, other: str) -> bool:
    """Whether two names are of one checkpoint: by links, or, where there are only copies, by what is in them."""
    try:
        kinds = _parts(one)
        if not kinds or kinds != _parts(other):
            return False
        pairs = [(one + kind, other + kind) for kind in reversed(kinds)]  # the index, which is small, first
        return all(os.path.samefile(*pair) or filecmp.cmp(*pair, shallow=False) for pair in pairs)
    except OSError:
        return False

"""Reads and writes the files of a folder of best weights and its info.json; imports TensorFlow only if needed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Container
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import (
    POINTER,
    RECORD,
    complete_checkpoints,
    owner,
    pointer_text,
    step_of,
)
from trainer_kit.checkpoints.commit import commit, problem, read_record, remove_checkpoint
from trainer_kit.evals.best.info_json import INFO, is_info, read_info


class BestFolder:
    """A folder with `ckpt-<step>.*`, whose commit records hold the metrics, and info.json, which names the best.

    TensorFlow's pointer file `checkpoint` names the best one too, so that `tf.train.latest_checkpoint` finds it.

    Args:
      path: The local folder.
      writes: Whether this process may change the folder; False where another process writes it.
    """

    def __init__(self, path: str, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.info_path = os.path.join(path, INFO)

    def prefix(self, step: int) -> str:
        """Returns the path of the weights of `step`, without suffixes."""
        return os.path.join(self.path, f"ckpt-{step}")

    def steps(self) -> list[int]:
        """Returns the steps of the weights that have an index, in order."""
        return list(complete_checkpoints(self.path))

    def whole(self, known: Container[int] = ()) -> set[int]:
        """Returns the steps whose weights are whole; weights of `known` steps are not read again."""
        return {step for step in self.steps() if step in known or not problem(self.prefix(step))}

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns a dict from step to info of whole weights that were kept by `metric`, in the order of steps."""
        told = self.told()
        found: dict[int, dict[str, Any]] = {}
        for step in self.steps():
            noted: Any = (read_record(self.prefix(step)) or {}).get("info")
            info = noted if is_info(noted) and noted["step"] == step else told
            if info is not None and info["step"] == step and info["metric"] == metric:
                if not problem(self.prefix(step)):
                    found[step] = info
        return found

    def told(self) -> dict[str, Any] | None:
        """Returns the content of info.json; None if it is missing or not in the form that `name` writes."""
        return read_info(self.path, quiet=True, either_form=False)

    def written_form(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of info.json for the info of the best weights."""
        return info

    def has_info(self) -> bool:
        """Whether there is an info.json."""
        return os.path.exists(self.info_path)

    def wrong_with_info(self, whole: Container[int]) -> str:
        """Returns what is wrong with info.json; "" if nothing is. `whole` holds steps with whole weights."""
        if not self.has_info():
            return "is missing"
        told = self.told()
        if told is None:
            return "is damaged"
        sound = told["step"] in whole or not problem(self.prefix(told["step"]))
        return "" if sound else "names weights that are not whole"

    def name(self, info: dict[str, Any]) -> bool:
        """Writes info.json, then the pointer file, to name existing weights; returns whether info.json has changed.

        Raises:
          StorageError: when a file cannot be written. The pointer file then still names whole weights.
        """
        if not self.writes:
            return False
        content = self.written_form(info)
        before = files.read_json(self.info_path)
        changed = json.dumps(before) != json.dumps(content)  # as text, since NaN has to equal NaN
        if changed:
            files.write_json(self.info_path, content, point="best.info")
        self._point_to(f"ckpt-{info['step']}")
        return changed

    def name_none(self) -> None:
        """Removes info.json and the pointer file."""
        for path in (self.info_path, os.path.join(self.path, POINTER)) if self.writes else ():
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def note(self, info: dict[str, Any]) -> None:
        """Writes the commit record of whole weights, with their info.

        Raises:
          StorageError: when the record cannot be written.
        """
        if self.writes:
            commit(self.prefix(info["step"]), point="best.record", info=info)

    def remove_others(self, steps: Collection[int]) -> None:
        """Removes weights that have a record, except those of `steps`; the record goes first. Others are not ours.

        Raises:
          OSError: when a file cannot be removed.
        """
        names = sorted(os.listdir(self.path)) if self.writes and os.path.isdir(self.path) else []
        others = {str(owner(name)) for name in names if name.endswith(RECORD) and owner(name)}
        for prefix in (os.path.join(self.path, other) for other in sorted(others) if step_of(other) not in steps):
            files.reach("best.remove", prefix)
            remove_checkpoint(prefix)

    def _point_to(self, name: str) -> None:
        """Makes TensorFlow's pointer file name only these weights; writes it only if needed."""
        path, text = os.path.join(self.path, POINTER), pointer_text([name])
        with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as stream:
            if stream.read() == text:
                return
        files.write_text(path, text, point="best.pointer")

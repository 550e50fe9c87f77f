"""The files of a folder of best weights: what is there, what is whole, and info.json. TensorFlow at need only."""

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
    own_files,
    owner,
    pointer_text,
    step_of,
)
from trainer_kit.checkpoints.commit import commit, problem, read_record
from trainer_kit.checkpoints.unfinished import mark, unmark
from trainer_kit.evals.best.info_json import INFO, is_info, read_info
from trainer_kit.folder_identity import check_held


class BestFolder:
    """`ckpt-<step>.*`, whose commit records tell the metrics of the weights, and info.json, which names the best.

    TensorFlow's pointer file `checkpoint` names the best one too, so that `tf.train.latest_checkpoint` finds it.

    Args:
      path: of the folder; local.
      writes: False where another process writes: then nothing is changed.
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
        """Returns the steps whose weights are whole; those of `known` are not read again."""
        return {step for step in self.steps() if step in known or not problem(self.prefix(step))}

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns step -> what is noted of weights that are whole and were kept by `metric`, in the order of steps."""
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
        """Returns what info.json tells, in the form that `name` gives it; None if there is none or it is not that."""
        return read_info(self.path, quiet=True, either_form=False)

    def written_form(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of info.json for weights, given what is noted of them."""
        return info

    def has_info(self) -> bool:
        """Whether there is an info.json."""
        return os.path.exists(self.info_path)

    def wrong_with_info(self, whole: Container[int]) -> str:
        """Returns what is wrong with info.json, given steps whose weights are whole; "" if nothing is."""
        if not self.has_info():
            return "is missing"
        told = self.told()
        if told is None:
            return "is damaged"
        sound = told["step"] in whole or not problem(self.prefix(told["step"]))
        return "" if sound else "names weights that are not whole"

    def name(self, info: dict[str, Any]) -> bool:
        """Makes info.json, then the pointer file, name weights that are there; returns whether info.json has changed.

        Raises:
          StorageError: when one of them cannot be written. The pointer file names weights that are whole all the same.
        """
        if not self.writes:
            return False
        content = self.written_form(info)
        before = files.read_json(self.info_path)
        changed = json.dumps(before) != json.dumps(content)  # as text: NaN is no other than NaN
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
        """Writes the commit record of weights that are whole, and in it what they are.

        Raises:
          StorageError: when it cannot be written.
        """
        if self.writes:
            commit(self.prefix(info["step"]), point="best.record", info=info)

    def remove_others(self, steps: Collection[int]) -> None:
        """Removes all weights with a record but those of `steps`, the record first; what has none is not ours.

        Raises:
          OSError: when a file cannot be removed.
        """
        check_held(self.path)
        names = sorted(os.listdir(self.path)) if self.writes and os.path.isdir(self.path) else []
        others = {str(owner(name)) for name in names if name.endswith(RECORD) and owner(name)}
        for prefix in (os.path.join(self.path, other) for other in sorted(others) if step_of(other) not in steps):
            mark([prefix])
            for path in own_files(prefix):
                files.reach("best.remove", path)
                os.remove(path)
            unmark([prefix])

    def _point_to(self, name: str) -> None:
        """Makes TensorFlow's pointer file name these weights only, unless it does."""
        path, text = os.path.join(self.path, POINTER), pointer_text([name])
        with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as stream:
            if stream.read() == text:
                return
        files.write_text(path, text, point="best.pointer")

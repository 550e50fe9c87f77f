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
from trainer_kit.checkpoints.commit import commit, problem, remove_checkpoint
from trainer_kit.evals.best.info_json import INFO, read_info, recorded_info


class BestFolder:
    """A folder with `ckpt-<step>.*`, whose commit records hold the metrics, and info.json, which names the best.

    TensorFlow's pointer file `checkpoint` names the best one too, so that `tf.train.latest_checkpoint` finds it.

    Args:
      path: The local folder.
      writes: Whether this process may change the folder; False where another process writes it.
    """

    def __init__(self, path: str, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self.info_path = os.path.join(path, INFO)

    def prefix(self, step: int) -> str:
        """Returns the path of the weights of `step`, without suffixes."""
        return os.path.join(self.path, f"ckpt-{step}")

    def steps(self) -> list[int]:
        """Returns the steps of the weights that have an index, in order."""
        return list(complete_checkpoints(self.path))

    def infos(self, metric: str) -> dict[int, dict[str, Any]]:
        """Returns a dict from step to info of whole weights that were kept by `metric`, in the order of steps."""
        named = self.told()
        infos: dict[int, dict[str, Any]] = {}
        for step in self.steps():
            info = recorded_info(self.path, step)
            if info is None and named is not None and named["step"] == step:
                info = named
            if info is not None and info["metric"] == metric and not problem(self.prefix(step)):
                infos[step] = info
        return infos

    def whole_steps(self, known: Container[int]) -> set[int]:
        """Returns the steps whose weights are whole; weights of `known` steps are not read again."""
        return {step for step in self.steps() if step in known or not problem(self.prefix(step))}

    def told(self) -> dict[str, Any] | None:
        """Returns the content of info.json; None if it is missing or, with a warning, cannot be read."""
        return read_info(self.path)

    def written_form(self, info: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of info.json for the info of the best weights."""
        return info

    def name(self, info: dict[str, Any]) -> None:
        """Writes info.json, then the pointer file, to name existing weights; unchanged files are not written.

        Raises:
          StorageError: when a file cannot be written. The pointer file then still names whole weights.
        """
        if not self.writes:
            return
        content = self.written_form(info)
        before = files.read_json(self.info_path)
        if json.dumps(before) != json.dumps(content):  # as text, since NaN has to equal NaN
            files.write_json(self.info_path, content, point="best.info")

        path = os.path.join(self.path, POINTER)
        text = pointer_text([f"ckpt-{info['step']}"])
        with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as stream:
            if stream.read() == text:
                return
        files.write_text(path, text, point="best.pointer")

    def name_none(self) -> None:
        """Removes info.json and the pointer file."""
        if not self.writes:
            return
        for path in (self.info_path, os.path.join(self.path, POINTER)):
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

        Does nothing if `steps` is empty: weights stay until there are others to keep.

        Raises:
          OSError: when a file cannot be removed.
        """
        if not self.writes or not steps:
            return
        for name in sorted(os.listdir(self.path)):
            checkpoint = owner(name)
            if checkpoint is not None and name.endswith(RECORD) and step_of(checkpoint) not in steps:
                prefix = os.path.join(self.path, checkpoint)
                files.reach("best.remove", prefix)
                remove_checkpoint(prefix)

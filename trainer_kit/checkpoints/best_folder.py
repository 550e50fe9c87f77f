"""The files of a folder of best weights: what is there, what is whole, and info.json. TensorFlow at need only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Container
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoints.best_info import INFO, is_info, read_info
from trainer_kit.checkpoints.commit import commit, problem, read_record
from trainer_kit.checkpoints.names import complete_checkpoints, owner, step_of


class BestFolder:
    """`ckpt-<step>.*`, whose commit records tell the metrics of the weights, and info.json, which names the best.

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
        """Makes info.json name weights that are there; returns whether it did not say the same before.

        Raises:
          StorageError: when it cannot be written.
        """
        if json.dumps(self.told()) == json.dumps(info):  # as text: NaN is no other than NaN
            return False
        if self.writes:
            files.write_json(self.info_path, info, point="best.info")
        return self.writes

    def name_none(self) -> None:
        """Removes info.json."""
        if self.writes:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.info_path)

    def note(self, info: dict[str, Any]) -> None:
        """Writes the commit record of weights that are whole, and in it what they are.

        Raises:
          StorageError: when it cannot be written.
        """
        if self.writes:
            commit(self.prefix(info["step"]), point="best.record", info=info)

    def remove_others(self, steps: Collection[int]) -> None:
        """Removes all weights but those of `steps`, each with its record first.

        Raises:
          OSError: when a file cannot be removed.
        """
        for name in sorted(os.listdir(self.path)) if self.writes and os.path.isdir(self.path) else ():
            checkpoint = owner(name)
            if checkpoint is not None and step_of(checkpoint) not in steps:
                path = os.path.join(self.path, name)
                files.reach("best.remove", path)
                os.remove(path)

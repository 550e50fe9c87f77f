"""BestFolder: a folder of best weights with info.json, which names the best of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from trainer_kit import files
from trainer_kit.checkpoints.commit import describe_damage, write_commit_record
from trainer_kit.checkpoints.pointer_file import write_pointer
from trainer_kit.checkpoints.retention import remove_checkpoints_except
from trainer_kit.checkpoints.weights_folder import WeightsFolder
from trainer_kit.evals.best.info_json import INFO, BestInfo, read_info, read_recorded_info


class BestFolder(WeightsFolder):
    """A folder of best weights `ckpt-<step>.*`, with info.json, which names the best.

    The commit records contain the metrics. TensorFlow's pointer file `checkpoint` names the best
    one too, so that `tf.train.latest_checkpoint` finds it.

    Args:
      path: The local folder.
      is_writer: Whether this process may change the folder. False where another process writes it.
    """

    def __init__(self, path: str, is_writer: bool = True) -> None:
        super().__init__(path, is_writer)
        self.info_path = os.path.join(path, INFO)

    def read_infos(self, metric: str) -> dict[int, BestInfo]:
        """Returns the infos, by step, of whole weights that were kept by `metric`.

        They are in the order of steps.
        """
        best_info = self.read_best_info()
        infos: dict[int, BestInfo] = {}
        for step in self.steps():
            info = read_recorded_info(self.path, step)
            # A record of the weights may lack the info that info.json has.
            is_best = best_info is not None and best_info["step"] == step
            if info is None and is_best:
                info = best_info
            if info is None or info["metric"] != metric:
                continue
            prefix = self.prefix(step)
            if not describe_damage(prefix):
                infos[step] = info
        return infos

    def read_best_info(self) -> BestInfo | None:
        """Returns the content of info.json.

        Returns None if it is missing or, with a warning, if it cannot be read.
        """
        return read_info(self.path)

    def format_info(self, info: BestInfo) -> Mapping[str, object]:
        """Returns the content of info.json for the info of the best weights."""
        return info

    def write_best(self, info: BestInfo) -> None:
        """Writes info.json, then the pointer file, to name existing weights.

        Unchanged files are not written.

        Raises:
          StorageError: when a file cannot be written. The pointer file then still names whole
            weights.
        """
        if not self.is_writer:
            return
        content = self.format_info(info)
        old_content = files.read_json(self.info_path)
        # Contents are compared as text, since NaN has to equal NaN.
        old_text = json.dumps(old_content)
        if old_text != json.dumps(content):
            files.write_json(self.info_path, content, point="best.info")
        prefix = self.prefix(info["step"])
        write_pointer(self.path, [prefix], point="best.pointer")

    def update_best(self, ranked_steps: Sequence[int]) -> None:
        """Names the first of the steps `ranked_steps` whose weights somebody has not removed."""
        existing_steps = self.steps() if self.is_writer else []
        for step in ranked_steps:
            if step in existing_steps:
                info = read_recorded_info(self.path, step)
                if info is not None:
                    self.write_best(info)
                return

    def rotate(self, keep: Sequence[int]) -> None:
        """Names the best of the steps `keep`, the first, then removes other weights with a record.

        Does nothing if `keep` is empty, so that weights stay until there are others to keep.
        """
        if self.is_writer and keep:
            self.update_best(keep)
            remove_checkpoints_except(self.path, keep)

    def clear_best(self) -> None:
        """Removes info.json, then the pointer file."""
        if self.is_writer:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.info_path)
            write_pointer(self.path, [])

    def write_info_record(self, info: BestInfo) -> None:
        """Writes the commit record of whole weights, with their info.

        Raises:
          StorageError: when the record cannot be written.
        """
        if self.is_writer:
            prefix = self.prefix(info["step"])
            write_commit_record(prefix, point="best.record", info=info)

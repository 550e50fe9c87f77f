"""The best checkpoint exporter with Model Garden's names, and with files that its programs read.

The best weights are `ckpt-<step>.*`, which TensorFlow's pointer file `checkpoint` names: Model
Garden finds them by it. `best_ckpt-1.*` are links to them, where the file system has links, for
programs that know the name of Model Garden's first best weights, as its own tests do. info.json
contains what Model Garden writes there: nested metrics and `best_ckpt_global_step`. Best weights
that Model Garden has left in the folder are taken over.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.commit import create_write_error, describe_damage
from trainer_kit.errors import ConfigError, Mistake, UsageError, suggest_names
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.best.info_json import GARDEN_STEP, INFO, BestInfo, build_info, read_info
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.training.metric_set import to_numpy
from trainer_kit.typing import IntLike

if TYPE_CHECKING:
    from trainer_kit.compat.model_garden.garden_types import ExperimentParams

_LOG = logging.getLogger(__name__)
_LINK_NAME = "best_ckpt-1"
_COUNTER = "global_step/.ATTRIBUTES/VARIABLE_VALUE"
_SUFFIX = r"(\.index|\.data-\d{5}-of-\d{5})"
_OPTION = "trainer.best_checkpoint_metric_comp"


class BestCheckpointExporter(BestWeightsExporter):
    """Exports the weights of each evaluation that is better than all earlier ones, across restarts.

    The weights are written before the record that names them, a value that is not finite is never
    best, and a damaged info.json is rebuilt. trainer_kit's runner resumes and rewinds this exporter
    like its own.

    Args:
      export_dir: The local folder of the weights and of info.json. The first export creates it.
      metric_name: A metric in the evaluation logs. `a|b` is the entry b of the nested logs a.
      metric_comp: "higher" or "lower": which value is better.
      is_chief: Whether this process keeps files in the folder. None: if it is the chief of the
        current strategy.

    Raises:
      UsageError: (a ValueError) For an unknown comparison, or a folder that is not local.
      StorageError: When Model Garden's best weights cannot be taken over.
    """

    def __init__(
        self, export_dir: str, metric_name: str, metric_comp: str, *, is_chief: bool | None = None
    ) -> None:
        if metric_comp not in ("higher", "lower"):
            advice = suggest_names(str(metric_comp), ("higher", "lower"))
            problem = (
                f"best checkpoint metric comp must be one of higher, lower. Got: {metric_comp!r}"
            )
            raise ConfigError([Mistake(_OPTION, problem, advice)])
        if files.is_remote(export_dir):
            raise UsageError(
                f"the best checkpoint has to be in a local folder, not in {export_dir}"
            )

        if is_chief is None:
            is_chief = bool(tf.distribute.get_strategy().extended.should_checkpoint)
        folder = GardenBestFolder(export_dir, is_chief)
        folder.import_garden_weights(metric_name)
        super().__init__(export_dir, metric_name, metric_comp, is_chief=is_chief, folder=folder)
        self._last_logs: dict[str, Any] | None = None

    def maybe_export_checkpoint(
        self,
        checkpoint: tf.train.Checkpoint,
        eval_logs: Mapping[str, Any],
        global_step: IntLike,
        write_logs: bool = True,
    ) -> bool:
        """Exports `checkpoint` if its evaluation is the best so far.

        Runs eagerly, on every worker.

        Args:
          checkpoint: The checkpoint of the evaluated weights.
          eval_logs: The evaluation's metrics, which may be nested. Values that are not single
            numbers are left out.
          global_step: The step of the weights.
          write_logs: Whether to call a subclass's own `export_best_eval_metric`. info.json is
            written in any case.

        Returns:
          Whether the checkpoint was exported.

        Raises:
          UsageError: (a ValueError) When the metric is not in the logs, or is not a single number.
          StorageError: When the weights or the record cannot be written.
        """
        logs = extract_scalars(eval_logs)
        step = int(to_numpy(global_step))
        exported = super().maybe_export_checkpoint(checkpoint, logs, step)

        # The method of this class would write info.json a second time.
        is_overridden = (
            type(self).export_best_eval_metric is not BestCheckpointExporter.export_best_eval_metric
        )
        if exported and write_logs and is_overridden:
            self.export_best_eval_metric(logs, step)

        # Model Garden's Trainer looks the metric up by its joined name.
        value = flatten_scalars(logs, "|").get(self.metric_name)
        if value is not None:
            self._last_logs = {**logs, GARDEN_STEP: float(step), self.metric_name: value}
        return exported

    def export_best_eval_metric(self, eval_logs: Mapping[str, Any], global_step: IntLike) -> None:
        """Writes info.json: the step, and the metrics that are single numbers.

        If a subclass overrides this method, the override is called after each export. Runs eagerly,
        on the host.

        Raises:
          StorageError: When info.json cannot be written.
        """
        if not self._folder.is_writer:
            return

        content = extract_scalars(eval_logs)
        content[GARDEN_STEP] = float(to_numpy(global_step))
        files.write_json(self.best_ckpt_logs_path, content, point="best.info")

    @property
    def best_ckpt_logs(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation so far, nested as they were.

        The deciding metric is also under its own name. Until an evaluation has a finite metric,
        these are the metrics of the last evaluation. None before the first evaluation.
        """
        best = self.criterion.best(self._best_so_far)
        if best is None:
            return self._last_logs
        return {**self._folder.format_info(best.record), self.metric_name: best.value}

    @property
    def best_ckpt_logs_path(self) -> str:
        """The path of info.json."""
        return os.path.join(self.export_dir, INFO)

    @property
    def best_ckpt_path(self) -> str | None:
        """The checkpoint prefix of the best weights. None if there are none yet."""
        path: str | None = tf.train.latest_checkpoint(self.export_dir)
        return path

    def _save(self, checkpoint: tf.train.Checkpoint, prefix: str) -> None:
        # Reading the counter creates it. It is saved then, too, so that
        # restore(...).assert_consumed() passes.
        _ = checkpoint.save_counter
        super()._save(checkpoint, prefix)


def maybe_create_best_ckpt_exporter(
    params: ExperimentParams, data_dir: str
) -> BestCheckpointExporter | None:
    """Returns an exporter of the best checkpoint.

    None when the config names no metric or no folder.

    Args:
      params: The experiment's config, trainer_kit's or Model Garden's.
      data_dir: The parent of the best checkpoint's folder: the model_dir.
    """
    section = params.trainer
    subfolder = section.best_checkpoint_export_subdir
    metric = section.best_checkpoint_eval_metric
    if not (data_dir and subfolder and metric):
        return None

    export_dir = os.path.join(data_dir, subfolder)
    _LOG.info("the best checkpoint by %s is kept in %s", metric, export_dir)
    return BestCheckpointExporter(export_dir, metric, section.best_checkpoint_metric_comp)


def extract_scalars(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested logs with their single numbers as floats, in the same order.

    Other values are left out.
    """
    return nest_metrics(flatten_scalars(logs, "|"))


class GardenBestFolder(BestFolder):
    """A BestFolder whose info.json has the form of Model Garden.

    Args:
      path: The local path of the folder.
      is_writer: Whether this process writes the folder. If not, it changes nothing.
    """

    def import_garden_weights(self, metric: str) -> None:
        """Takes over the best weights that Model Garden has left here.

        It does so if Model Garden's info.json has a finite metric.

        Raises:
          StorageError: When a file cannot be written.
        """
        if not self.is_writer:
            return
        info = self._read_garden_info(metric)
        if info is None:
            return

        source = str(tf.train.latest_checkpoint(self.path))
        target = self.prefix(info["step"])
        try:
            if source != target:
                _remove_checkpoint(target)
                # The index comes last, so that a reader finds complete weights or none.
                for suffix in _suffixes(source):
                    shutil.copyfile(source + suffix, target + suffix)
                    with open(target + suffix, "rb+") as stream:
                        os.fsync(stream.fileno())
                files.flush_folder(os.path.dirname(target))
        except OSError as error:
            raise create_write_error(
                f"{source} cannot be copied to {target}", self.path, error
            ) from error

        self.write_info_record(info)
        self.write_best(info)
        _LOG.info(
            "Model Garden's %s was taken over: %s %s at step %d",
            source,
            metric,
            info["value"],
            info["step"],
        )

    def read_infos(self, metric: str) -> dict[int, BestInfo]:
        """Returns the noted info of complete weights by step.

        On workers it includes the weights that the chief is going to take over.
        """
        infos = super().read_infos(metric)
        if self.is_writer:
            return infos

        info = self._read_garden_info(metric)
        if info is None:
            return infos

        # A record of trainer_kit for the same step counts.
        all_infos = {info["step"]: info, **infos}
        return dict(sorted(all_infos.items()))

    def read_best_info(self) -> BestInfo | None:
        """Returns the noted info of the weights that info.json names."""
        return read_info(self.path, quiet=True)

    def write_best(self, info: BestInfo) -> None:
        """Makes info.json, the pointer file and the links name weights that exist.

        See BestFolder.
        """
        super().write_best(info)
        self._link_weights(self.prefix(info["step"]))

    def clear_best(self) -> None:
        """Removes info.json, the pointer file and the links."""
        super().clear_best()
        self._link_weights("")

    def _link_weights(self, prefix: str) -> None:
        """Links to the weights at `prefix`. With "" it removes the links.

        Errors are ignored: the links are not essential.
        """
        if not self.is_writer:
            return

        link_prefix = os.path.join(self.path, _LINK_NAME)
        with contextlib.suppress(OSError):
            _remove_checkpoint(link_prefix)
            if not prefix:
                return
            for suffix in _suffixes(prefix):
                os.link(prefix + suffix, link_prefix + suffix)

    def format_info(self, info: BestInfo) -> dict[str, Any]:
        """Returns the content of info.json for weights with the noted `info`."""
        content = nest_metrics(info["metrics"])
        content[GARDEN_STEP] = float(info["step"])
        return content

    def _read_garden_info(self, metric: str) -> BestInfo | None:
        """Returns the info of best weights that Model Garden left here.

        None if there are none, or if their metric is not finite.
        """
        content = files.read_json(self.info_path) or {}
        step = content.get(GARDEN_STEP)
        if not isinstance(step, float):
            return None

        # This class writes the same file for its own weights.
        own_info = self.read_best_info()
        if own_info is not None and self.format_info(own_info) == content:
            return None

        metrics = dict(content)
        del metrics[GARDEN_STEP]
        prefix = tf.train.latest_checkpoint(self.path)
        value = flatten_scalars(metrics, "|").get(metric, math.nan)
        is_finite = math.isfinite(step) and math.isfinite(value)
        if prefix is None or describe_damage(prefix) or not is_finite:
            _LOG.warning(
                "Model Garden's best checkpoint in %s is damaged or has no finite %s",
                self.path,
                metric,
            )
            return None

        # Model Garden writes info.json before the weights, so that a killed run leaves older
        # weights.
        reader = tf.train.load_checkpoint(prefix)
        saved_step = int(step)
        if reader.has_tensor(_COUNTER):
            saved_step = int(reader.get_tensor(_COUNTER))
        if saved_step != int(step):
            _LOG.warning(
                "Model Garden's best checkpoint in %s was not taken over: it is not of step %d",
                prefix,
                step,
            )
            return None
        return build_info(int(step), metrics, metric)


def nest_metrics(flat: Mapping[str, float]) -> dict[str, Any]:
    """Returns nested metrics for names joined by `|`.

    A name stays joined if one of its groups is itself a metric.
    """
    nested: dict[str, Any] = {}
    for joined_name, value in flat.items():
        *groups, name = joined_name.split("|")
        paths = itertools.accumulate(groups, "{}|{}".format)
        if any(path in flat for path in paths):
            groups = []
            name = joined_name

        section = nested
        for group in groups:
            section = section.setdefault(group, {})
        section[name] = value
    return nested


def _suffixes(prefix: str) -> list[str]:
    """Returns the suffixes of a checkpoint's files, that of the index last."""
    folder, name = os.path.split(prefix)
    pattern = re.compile(re.escape(name) + _SUFFIX)
    suffixes = []
    for file in os.listdir(folder):
        match = pattern.fullmatch(file)
        if match:
            suffixes.append(match.group(1))

    # ".index" sorts after ".data-...".
    return sorted(suffixes)


def _remove_checkpoint(prefix: str) -> None:
    for suffix in reversed(_suffixes(prefix)):
        os.remove(prefix + suffix)

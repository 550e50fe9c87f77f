"""KFPVisualization: metrics and tables of a component for the user interface of Kubeflow Pipelines.

A component writes two JSON files, and Kubeflow shows what is in them. Their form is that of version
1 of the SDK.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit import files
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.telemetry.scalars import as_scalar

if TYPE_CHECKING:
    import numpy as np

    from trainer_kit.typing import FloatLike

METRICS_FILE = "mlpipeline-metrics.json"
UI_METADATA_FILE = "mlpipeline-ui-metadata.json"

# An environment variable that names the folder of the two files, instead of /.
FOLDER_VARIABLE = "KFP_OUTPUT_FOLDER"

_FORMATS = ("PERCENTAGE", "RAW")
_LOG = logging.getLogger(__name__)


class KFPVisualization:
    """Collects metrics and tables, and writes the files that Kubeflow Pipelines reads.

    The files are /mlpipeline-metrics.json and /mlpipeline-ui-metadata.json, where the manifests of
    components expect them. The environment variable KFP_OUTPUT_FOLDER names another folder, for a
    run outside of a container. Runs eagerly, on the host.

    Args:
      pipeline_name: The name of the pipeline.
      bucket_name: The bucket of its files, or a local folder in place of one.
      job_id: The identity of the job.

    Attributes:
      job_dir: The folder of the job, BUCKET/tmp/PIPELINE/JOB.
      metrics: The metrics for the first file, a list of dicts.
      metadata_outputs: The tables and other outputs for the second file, a list of dicts.
    """

    def __init__(self, pipeline_name: str, bucket_name: str, job_id: str) -> None:
        # The name of a bucket cannot contain a slash.
        is_folder = os.sep in bucket_name or os.path.isdir(bucket_name)
        root = bucket_name if is_folder else f"gs://{bucket_name}"
        self.job_dir = f"{root}/tmp/{pipeline_name}/{job_id}"
        self.metrics: list[dict[str, Any]] = []
        self.metadata_outputs: list[dict[str, Any]] = []

    def produce_metrics(
        self, name: str, value: FloatLike | np.number, f: str = "PERCENTAGE"
    ) -> None:
        """Adds a metric, which replaces one of the same name.

        Kubeflow cannot read NaN or infinity, and ignores the whole file because of one. Such a
        metric is left out, with a warning.

        Args:
          name: The name of the metric: letters, digits, hyphens and underscores. Kubeflow stores no
            other.
          value: A Python number, or a scalar of NumPy or TensorFlow.
          f: The format in which it is shown: RAW, or PERCENTAGE for a share from 0 to 1.

        Raises:
          UsageError: When the value is not a single number, or there is no such format.
        """
        number = as_scalar(value)
        metric_format = str(f).upper()
        if number is None:
            raise UsageError(
                f"produce_metrics({name!r}): {value!r:.60} is not a single number; give one number"
                " per name"
            )
        if metric_format not in _FORMATS:
            raise UsageError(
                f"produce_metrics({name!r}): f is {f!r}, not a format;"
                f" {suggest_names(metric_format, _FORMATS)}"
            )
        if not math.isfinite(number):
            _LOG.warning(
                "the metric %s is %s and is left out: Kubeflow reads finite numbers only",
                name,
                number,
            )
            return

        self.metrics = [metric for metric in self.metrics if metric["name"] != name]
        self.metrics.append({"name": name, "numberValue": number, "format": metric_format})

    def write_metrics(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes all metrics. Call it after the last call of `produce_metrics`.

        Args:
          path: The file, such as the one that a component is given as an output. None:
            /mlpipeline-metrics.json.

        Raises:
          UsageError: When the path is a remote one.
          StorageError: When the file cannot be written.
        """
        _write(path, METRICS_FILE, {"metrics": self.metrics})

    def produce_ui_metadata_table(
        self,
        source: str | os.PathLike[str],
        header: Iterable[object],
        storage: str = "gcs",
        f: str = "csv",
    ) -> None:
        """Adds a table.

        Kubeflow cannot read a local file. Its content is then taken into the file that Kubeflow
        reads. If there is no such file, the source stays as it is, with a warning.

        Args:
          source: The address of a CSV file without a header line, or a local file. With storage
            "inline" the content of such a file.
          header: The names of the columns.
          storage: Where the source is: "gcs", "inline", or another storage that Kubeflow knows.
          f: The format of the source.

        Raises:
          UsageError: When the header is a text instead of a list.
        """
        if isinstance(header, str):
            raise UsageError(
                f"produce_ui_metadata_table: header is {header!r}; give a list of the names of"
                " columns"
            )

        # Kubeflow itself reads remote files and other storages.
        text = os.fspath(source)
        if storage == "gcs" and not files.is_remote(text):
            try:
                text = Path(text).read_text(encoding="utf-8")
                storage = "inline"
            except (OSError, ValueError) as error:
                _LOG.warning(
                    "Kubeflow gets the path %s of a local file, which it cannot read, nor this"
                    " process: %s",
                    text,
                    error,
                )

        columns = [str(column) for column in header]
        output = {
            "type": "table",
            "storage": storage,
            "format": f,
            "header": columns,
            "source": text,
        }
        self.metadata_outputs.append(output)

    def write_ui_metadata(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes all outputs. Call it after the last one was added.

        Args:
          path: The file, such as the one that a component is given as an output. None:
            /mlpipeline-ui-metadata.json.

        Raises:
          UsageError: When the path is a remote one.
          StorageError: When the file cannot be written.
        """
        _write(path, UI_METADATA_FILE, {"outputs": self.metadata_outputs})


def _write(path: str | os.PathLike[str] | None, name: str, content: Mapping[str, object]) -> None:
    """Writes the content as JSON to `path`, or to the file `name` in the folder of Kubeflow."""
    if path is None:
        folder = os.environ.get(FOLDER_VARIABLE) or "/"
        target = os.path.join(folder, name)
    else:
        target = os.fspath(path)
    if files.is_remote(target):
        raise UsageError(
            f"path: {target!r} is a remote file; give a local path, from which Kubeflow collects it"
        )
    files.write_json(target, content)

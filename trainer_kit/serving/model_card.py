"""The README.md and the export.json of an export: what the model is, and how to load it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer_kit import files
from trainer_kit.evals.ledger import active_records, read_records
from trainer_kit.process.run_directory import read_manifest
from trainer_kit.serving.export_formats import FORMATS
from trainer_kit.serving.inference_function import InferenceFunction
from trainer_kit.serving.model_loading import LoadedRun
from trainer_kit.serving.parity import Parity
from trainer_kit.telemetry.scalars import flatten_scalars

RECORD = "export.json"


def write_model_card(
    folder: str,
    target: Path,
    run: LoadedRun | None,
    inference: InferenceFunction,
    results: Mapping[str, Parity],
) -> None:
    """Writes the two files. Runs on the host.

    Args:
      folder: The folder of the export, which is not published yet.
      target: Its later path.
      run: The run that the model is from. None: a model of a program.
      inference: What was exported.
      results: The comparison of each format, by its name.
    """
    sections = [f"# {_get_title(run, inference)}"]
    if run is not None:
        sections.append(_describe_training(run))
    sections += [
        "## Inputs\n\n" + _format_specs(inference.input_specs),
        "## Outputs\n\n" + _format_specs(inference.output_specs),
        "## Files\n\n" + _format_results(results),
        "## Use it\n\n" + "\n\n".join(_describe_use(name, target, inference) for name in results),
    ]
    if "saved_model" in results:
        sections.append(_describe_serving(target, run))
    text = "\n\n".join(sections) + "\n"
    files.write_text(os.path.join(folder, "README.md"), text)

    record: dict[str, Any] = {
        "step": run.step if run else None,
        "checkpoint": run.checkpoint if run else None,
        "inputs": _list_specs(inference.input_specs),
        "outputs": _list_specs(inference.output_specs),
        "formats": {name: asdict(parity) for name, parity in results.items()},
    }
    files.write_json(os.path.join(folder, RECORD), record)


def _get_title(run: LoadedRun | None, inference: InferenceFunction) -> str:
    if run is None:
        return type(inference.model).__name__
    experiment = read_manifest(str(run.folder)).get("experiment", "")
    return f"{experiment}, step {run.step}"


def _describe_training(run: LoadedRun) -> str:
    """Returns the section on the run: the command, the data and the metrics."""
    manifest = read_manifest(str(run.folder))
    packages = manifest.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    lines = [
        f"The weights are those of the checkpoint `{run.checkpoint}`, trained for {run.step:,}"
        f" steps with {versions}.",
        "",
        "```bash",
        shlex.join(["python", *map(str, manifest.get("command", []))]),
        "```",
    ]
    data = manifest.get("data", {})
    for section, parts in data.items():
        described = "; ".join(f"{name}: {text}" for name, text in parts.items())
        lines.append(f"\nData of `{section}`: {described}")
    metrics = _read_metrics(run)
    if metrics:
        lines += ["", "| metric at this step | value |", "|---|---|"]
        lines += [f"| {name} | {value:.6g} |" for name, value in metrics.items()]
    return "## Training\n\n" + "\n".join(lines)


def _read_metrics(run: LoadedRun) -> dict[str, float]:
    """Returns the metrics that the run has recorded for the step of its checkpoint."""
    metrics: dict[str, float] = {}
    for record in active_records(read_records(run.folder / "evals" / "validation.jsonl")):
        if record["step"] == run.step:
            metrics.update(flatten_scalars(record["metrics"]))
    return metrics


def _format_specs(specs: Mapping[str, tf.TensorSpec]) -> str:
    lines = ["| name | dtype | shape |", "|---|---|---|"]
    for name, values in _list_specs(specs).items():
        shape = ", ".join("batch" if size is None else str(size) for size in values["shape"])
        lines.append(f"| `{name}` | {values['dtype']} | [{shape}] |")
    return "\n".join(lines)


def _list_specs(specs: Mapping[str, tf.TensorSpec]) -> dict[str, dict[str, Any]]:
    """Returns dtypes and shapes by name, in JSON types."""
    listed = {}
    for name, spec in specs.items():
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        listed[name] = {"dtype": spec.dtype.name, "shape": shape}
    return listed


def _format_results(results: Mapping[str, Parity]) -> str:
    lines = [
        "Each file was run in its own runtime and compared with the model, on batches of several"
        " sizes.",
        "",
        "| format | file | compared |",
        "|---|---|---|",
    ]
    for name, parity in results.items():
        file = FORMATS[name].file or "this folder"
        lines.append(f"| {name} | {file} | {parity} |")
    return "\n".join(lines)


def _describe_use(name: str, target: Path, inference: InferenceFunction) -> str:
    """Returns the lines of Python that run a format."""
    export_format = FORMATS[name]
    path = str(target / export_format.file) if export_format.file else str(target)
    names = list(inference.input_specs)
    lines = export_format.load_lines.format(
        path=path,
        arguments=", ".join(f"{input_name}={input_name}" for input_name in names),
        feeds=_format_feeds(names),
        features=names[0] if len(names) == 1 else _format_feeds(names),
    )
    return f"{name}:\n\n```python\n{lines}\n```"


def _format_feeds(names: Sequence[str]) -> str:
    feeds = ", ".join(f'"{name}": {name}' for name in names)
    return f"{{{feeds}}}"


def _describe_serving(target: Path, run: LoadedRun | None) -> str:
    name = run.folder.name if run else "model"
    return (
        "## TensorFlow Serving\n\nThese lines were not tried.\n\n```bash\n"
        f"docker run -p 127.0.0.1:8501:8501 -v {target.absolute()}:/models/{name}/1"
        f" -e MODEL_NAME={name} tensorflow/serving\n```"
    )

"""The README.md and the export.json of an export: what the model is, and how to load it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
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

_SERVING = """These lines were not tried.

```bash
docker run -p 127.0.0.1:8501:8501 -v {folder}:/models/{name}/1 \\
  -e MODEL_NAME={name} tensorflow/serving
```"""


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
    inputs = _list_specs(inference.input_specs)
    outputs = _list_specs(inference.output_specs)
    record = {
        "step": run.step if run else None,
        "checkpoint": run.checkpoint if run else None,
        "inputs": inputs,
        "outputs": outputs,
        "formats": {name: asdict(parity) for name, parity in results.items()},
    }
    files.write_json(os.path.join(folder, RECORD), record)

    names = list(inputs)
    arguments = ", ".join(f"{name}={name}" for name in names)
    feeds = "{" + ", ".join(f'"{name}": {name}' for name in names) + "}"
    rows = []
    use = []
    for name, parity in results.items():
        file = FORMATS[name].file
        rows.append((name, file or "this folder", parity))
        lines = FORMATS[name].load_lines.format(
            path=target / file,
            arguments=arguments,
            feeds=feeds,
            features=names[0] if len(names) == 1 else feeds,
        )
        use.append(f"{name}:\n\n```python\n{lines}\n```")

    title = type(inference.model).__name__
    sections = {}
    if run is not None:
        manifest = read_manifest(str(run.folder))
        title = f"{manifest.get('experiment') or run.folder.name}, step {run.step}"
        sections["Training"] = _describe_training(run, manifest)
    sections["Inputs"] = _format_specs(inputs)
    sections["Outputs"] = _format_specs(outputs)
    sections["Files"] = (
        "Each file was run in its own runtime and compared with the model, on batches of several"
        f" sizes.\n\n{_format_table(('format', 'file', 'compared'), rows)}"
    )
    sections["Use it"] = "\n\n".join(use)
    if "saved_model" in results:
        name = run.folder.name if run else "model"
        sections["TensorFlow Serving"] = _SERVING.format(folder=target.absolute(), name=name)
    text = "".join(f"\n## {header}\n\n{body}\n" for header, body in sections.items())
    files.write_text(os.path.join(folder, "README.md"), f"# {title}\n{text}")


def _describe_training(run: LoadedRun, manifest: Mapping[str, Any]) -> str:
    """Returns the section on the run: the command, the data and the metrics."""
    packages = manifest.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    paragraphs = [
        f"The weights are those of the checkpoint `{run.checkpoint}`, trained for {run.step:,}"
        f" steps with {versions}.",
        f"```bash\n{shlex.join(['python', *map(str, manifest.get('command', []))])}\n```",
    ]
    for section, parts in manifest.get("data", {}).items():
        described = "; ".join(f"{name}: {text}" for name, text in parts.items())
        paragraphs.append(f"Data of `{section}`: {described}")

    metrics: dict[str, float] = {}
    for record in active_records(read_records(run.folder / "evals" / "validation.jsonl")):
        if record["step"] == run.step:
            metrics.update(flatten_scalars(record["metrics"]))
    rows = [(name, f"{value:.6g}") for name, value in metrics.items()]
    if rows:
        paragraphs.append(_format_table(("metric at this step", "value"), rows))
    return "\n\n".join(paragraphs)


def _list_specs(specs: Mapping[str, tf.TensorSpec]) -> dict[str, dict[str, Any]]:
    """Returns dtypes and shapes by name, in JSON types."""
    listed = {}
    for name, spec in specs.items():
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        listed[name] = {"dtype": spec.dtype.name, "shape": shape}
    return listed


def _format_specs(specs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, spec in specs.items():
        rows.append((f"`{name}`", spec["dtype"], str(spec["shape"]).replace("None", "batch")))
    return _format_table(("name", "dtype", "shape"), rows)


def _format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

"""The README.md and the export.json of an export: what the model is, and how to load it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
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
    record: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "formats": {}}
    arguments = ", ".join(f"{name}={name}" for name in inputs)
    items = ", ".join(f'"{name}": {name}' for name in inputs)
    feeds = f"{{{items}}}"
    features = next(iter(inputs)) if len(inputs) == 1 else feeds
    if isinstance(inference.features_spec, (list, tuple)):
        features = f"[{', '.join(inputs)}]"
    compared = []
    examples = []
    for name, parity in results.items():
        record["formats"][name] = asdict(parity)
        export_format = FORMATS[name]
        compared.append(f"- {name}, {export_format.file or 'this folder'}: {parity}")
        lines = export_format.load_lines.format(
            path=target / export_format.file,
            arguments=arguments,
            feeds=feeds,
            features=features,
        )
        examples.append(f"{name}:\n\n```python\n{lines}\n```")

    title = type(inference.model).__name__
    training = []
    if run is not None:
        manifest = read_manifest(run.folder)
        name = manifest.get("experiment") or run.folder.name
        title = f"{name}, step {run.step}"
        training = ["## Training", *_describe_training(run, manifest)]
        record |= {"step": run.step, "checkpoint": run.checkpoint}
    files.write_json(os.path.join(folder, RECORD), record)

    paragraphs = [
        f"# {title}",
        *training,
        "## Inputs",
        _format_specs(inputs),
        "## Outputs",
        _format_specs(outputs),
        "## Files",
        "Each file was run in its own runtime and compared with the model, on batches of several"
        " sizes.",
        "\n".join(compared),
        "## Use it",
        *examples,
    ]
    if "saved_model" in results:
        name = run.folder.name if run else "model"
        serving = _SERVING.format(folder=target.absolute(), name=name)
        paragraphs += ["## TensorFlow Serving", serving]
    text = "\n\n".join(paragraphs)
    files.write_text(os.path.join(folder, "README.md"), f"{text}\n")


def _describe_training(run: LoadedRun, manifest: Mapping[str, Any]) -> list[str]:
    """Returns paragraphs on the run: the command, the code, the data and the metrics."""
    packages = manifest.get("packages", {})
    installed = [f"{name} {version}" for name, version in packages.items() if version]
    versions = ", ".join(installed)
    words = [str(word) for word in manifest.get("command", [])]
    if words and words[0].endswith("trainer_kit/train.py"):
        # Run as a file, its folder would come first on sys.path and hide Python's typing.
        words[:1] = ["-m", "trainer_kit.train"]
    command = shlex.join(["python", *words])
    paragraphs = [
        f"The weights are those of the checkpoint `{run.checkpoint}`, trained for {run.step:,}"
        f" steps with {versions}.",
        f"```bash\n{command}\n```",
    ]
    if git := manifest.get("git"):
        changes = ", with changes that were not committed" if git["dirty"] else ""
        paragraphs.append(f"The code is that of the git commit `{git['commit']}`{changes}.")
    for section, parts in manifest.get("data", {}).items():
        texts = [f"{name}: {text}" for name, text in parts.items()]
        described = "; ".join(texts)
        paragraphs.append(f"Data of `{section}`: {described}")

    metrics: dict[str, float] = {}
    records = read_records(run.folder / "evals" / "validation.jsonl")
    for record in active_records(records):
        if record["step"] == run.step:
            metrics.update(flatten_scalars(record["metrics"]))
    if metrics:
        lines = [f"- {name}: {value:.6g}" for name, value in metrics.items()]
        paragraphs += ["Metrics at this step:", "\n".join(lines)]
    return paragraphs


def _list_specs(specs: Mapping[str, tf.TensorSpec]) -> dict[str, dict[str, Any]]:
    """Returns dtypes and shapes by name, in JSON types."""
    listed = {}
    for name, spec in specs.items():
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        listed[name] = {"dtype": spec.dtype.name, "shape": shape}
    return listed


def _format_specs(specs: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, spec in specs.items():
        shape = str(spec["shape"]).replace("None", "batch")
        lines.append(f"- `{name}`: {spec['dtype']}, {shape}")
    return "\n".join(lines)

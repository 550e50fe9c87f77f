"""What tests build before they act: configs, registries, data, strategies, reports, processes.

TensorFlow is imported inside the functions that need it: tests/unit uses the others, and works
without TensorFlow. `tests/engine/linear_task.py` has the small task and its experiment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.telemetry.report import Report

# ---- configs


def optimization(type: str, learning_rate: float = 0.1, **fields: Any) -> OptimizationConfig:
    """Returns a config with an optimizer, the fields of its section, and a constant learning rate.

    Skips the test where the installed Keras has not the Muon that we need.
    """
    if type == "muon":
        import keras

        if tuple(map(int, keras.version().split(".")[:2])) < (3, 13):
            pytest.skip("Keras before 3.13")
    rate = {"type": "constant", "constant": {"learning_rate": learning_rate}}
    return OptimizationConfig(optimizer={"type": type, type: fields}, learning_rate=rate)  # type: ignore[arg-type]


def training_data(batch: int = 4, **fields: Any) -> DataConfig:
    """Returns the config of shuffled training data."""
    return DataConfig(**{"is_training": True, "global_batch_size": batch, "seed": 7, **fields})


def validation_data(batch: int = 4, **fields: Any) -> DataConfig:
    """Returns the config of validation data, whose last batch may be small."""
    return DataConfig(
        **{"is_training": False, "global_batch_size": batch, "drop_remainder": False, **fields}
    )


# ---- registries


@contextlib.contextmanager
def restore_registries(*registries: Registry[Any], empty: bool = False) -> Iterator[None]:
    """Restores the entries of registries on exit: removes what was registered meanwhile.

    Args:
      registries: The registries, such as `experiments` and `OptimizerConfig.registry`.
      empty: Whether the registries have no entries on entry.
    """
    saved_entries = [dict(registry._entries) for registry in registries]
    if empty:
        for registry in registries:
            registry._entries.clear()
    try:
        yield
    finally:
        for registry, entries in zip(registries, saved_entries, strict=True):
            registry._entries.clear()
            registry._entries.update(entries)


def remove_user_entries(*registries: Registry[Any]) -> None:
    """Removes from registries what was not registered by a module of trainer_kit."""
    for registry in registries:
        for name, entry in list(registry._entries.items()):
            function_or_class = getattr(entry, "build", entry)
            if not function_or_class.__module__.startswith("trainer_kit."):
                del registry._entries[name]


# ---- devices and data


@functools.cache
def replicas(count: int) -> Any:
    """Returns a strategy over some of the four logical CPUs of the process: the default one for one
    of them.

    The replicas sum by copying: TensorFlow's collectives allow one group size in the life of a
    process. All tests of a process share the strategy. A test that gives it options of the input,
    which it remembers, makes its own.
    """
    import tensorflow as tf

    if count == 1:
        return tf.distribute.get_strategy()
    devices = [f"CPU:{index}" for index in range(count)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def seeded_trainer(
    config: Any,
    task_type: Any,
    count: int = 1,
    *,
    train: bool = True,
    evaluate: bool = True,
    cls: Any = None,
) -> Any:
    """Returns a trainer over some replicas, whose initial weights are the same each time.

    Args:
      config: The experiment.
      task_type: The class of the task.
      count: The number of replicas.
      train, evaluate: What the trainer is for.
      cls: The class of the trainer; None: Trainer.
    """
    import keras

    from trainer_kit.training.trainer import Trainer

    keras.utils.set_random_seed(3)
    with replicas(count).scope():
        return (cls or Trainer).create(
            config, task_type(config.task), train=train, evaluate=evaluate
        )


def trained_weights(trainer: Any) -> list[Any]:
    """Returns the values of the trainable variables of its model, as NumPy arrays."""
    return [variable.numpy() for variable in trainer.model.trainable_variables]


def assert_all_close(values: Iterable[Any], expected: Iterable[Any], atol: float = 0.0) -> None:
    """Compares arrays with arrays: bit by bit without a tolerance."""
    import numpy as np

    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=atol)


def on_each_replica(strategy: Any, value: Any) -> list[Any]:
    """Returns the value of a variable or a tensor on each replica, as NumPy arrays."""
    import keras

    value = value.value if isinstance(value, keras.Variable) else value
    return [part.numpy() for part in strategy.experimental_local_results(value)]


def input_context(replicas: int, pipelines: int = 1, pipeline: int = 0) -> Any:
    """Returns the context of one of several input pipelines, which share the replicas."""
    import tensorflow as tf

    return tf.distribute.InputContext(pipelines, pipeline, replicas)


def read_batches(dataset: Any, batches: int = -1) -> list[Any]:
    """Returns the next batches of a dataset, or all, as nested lists."""
    return [batch.tolist() for batch in dataset.take(batches).as_numpy_iterator()]


def write_records(path: Path, records: Iterable[bytes], compression: str = "") -> str:
    """Writes a TFRecord file; returns its path."""
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)

    return str(path)


# ---- what a run writes


def report(step: int = 1, kind: str = "train", **values: Any) -> Report:
    """Returns a report; a value that is no field of `Report` is a metric of this name."""
    fields: dict[str, Any] = {"kind": kind, "step": step, "total_steps": None, "metrics": {}}
    for name, value in values.items():
        group = fields if name in Report.__dataclass_fields__ else fields["metrics"]
        group[name] = value

    return Report(**fields)


def curve(path: Path, name: str, kind: str | None = None) -> list[tuple[int, float]]:
    """Returns (step, value) of a metric or a rate in each report of a history."""
    named = [(record, {**record, **record["metrics"]}) for record in read_active_history(path)]
    return [
        (record["step"], values[name])
        for record, values in named
        if values.get(name) is not None and kind in (None, record["kind"])
    ]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, which have to be strict JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def final_record(folder: Path) -> dict[str, Any]:
    """Returns what a run has recorded at its end."""
    return read_json(folder / "final.json")


def evaluated_steps(folder: Path, name: str = "validation") -> list[int]:
    """Returns the steps of the evaluations on record in the folder of a run."""
    return [record["step"] for record in json_lines(folder / "evals" / f"{name}.jsonl")]


# ---- other processes and threads


def wait_until(happened: Callable[[], object], seconds: float = 20.0) -> None:
    """Returns when another thread or process has made something true, which has to be soon."""
    give_up = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def free_hosts(count: int) -> list[str]:
    """Returns free addresses of this machine; held all at once, so that they differ."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()

    return hosts


def run_program(code: str, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new Python; the result has its exit code and what it wrote."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def start_python(*arguments: str, says: str = "ready", **options: Any) -> subprocess.Popen[str]:
    """Starts a new Python; returns it when it has printed this line."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, *arguments], text=True, **pipes, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{says}\n"
    return process


def imported_by(modules: Sequence[str], *heavy: str) -> list[str]:
    """Returns which of the heavy packages the import of some modules imports, in a new Python."""
    code = f"import sys, {', '.join(modules)}; print(*sorted(set({heavy}) & set(sys.modules)))"
    ended = run_program(code)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()

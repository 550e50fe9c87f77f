"""Rebuilds the best checkpoints of a run from its ledger and its checkpoints, without training.

Where the best weights exist, only info.json and its like are written, without TensorFlow. To export weights from a
checkpoint, the experiment is built from what the run's folder records.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trainer_kit.checkpoints.commit import problem
from trainer_kit.cli.view.recorded_evaluations import EVAL, VALIDATION, named_folder
from trainer_kit.cli.view.run_status import Settings, readable
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.evals.best.kept_weights import KeptWeights
from trainer_kit.evals.ledger import active_records, read_records
from trainer_kit.process.run_lock import RunLock
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.serving.recorded_run import recorded_config, recorded_experiment

_LOG = logging.getLogger(__name__)


class _Unseen:
    """Keeps a lock from writing a heartbeat: `trainer-kit tensorboard` would take this command for a trainer."""

    def _write(self) -> None:
        pass


class _TrainersLock(_Unseen, RunLock):
    pass


class _SidecarsLock(_Unseen, Lease):
    pass


def recompute(folder: Path, name: str, settings: Settings, import_modules: Sequence[str]) -> list[str]:
    """Makes the best folders hold what the ledger `name` says; returns a line about each folder.

    Args:
      folder: The run's folder.
      name: The name of the ledger.
      settings: The run's settings.
      import_modules: Modules to import before the experiment is looked up; if empty, those recorded by the run.

    Raises:
      UsageError: when the run keeps no best checkpoint of this ledger, or an export needs an unknown experiment.
      ModelDirInUseError: while the process that writes the folders is alive.
      StorageError: when a file cannot be written.
    """
    bests = _bests(folder, name, settings)
    if name == EVAL or not bests:
        raise UsageError(
            f"--recompute: the run in {folder} keeps no best checkpoint for the evaluations of evals/{name}.jsonl; "
            "a run keeps one if trainer.best_checkpoint_eval_metric or trainer.best_checkpoints names a metric"
        )
    with _alone(folder, name), readable(folder):
        records = active_records(read_records(folder / "evals" / f"{name}.jsonl"))  # one validation set or several
        before = {place: _state(place) for place, _ in bests}
        lacking = [(place, steps) for place, one in bests if (steps := _put_right(folder, place, one, records))]
        if lacking:
            _export(folder, name, lacking, records, import_modules)
        return [_summary(folder, place, before[place], _state(place), one) for place, one in bests]


def _bests(folder: Path, name: str, settings: Settings) -> list[tuple[Path, Criterion]]:
    own = folder if name == VALIDATION else folder / "evals" / name
    primary = Criterion(settings.metric, settings.comparison)
    found = [(own / settings.best_folder, primary)] if settings.metric and settings.best_folder else []
    return found + [(named_folder(folder, name, best), one) for best, one in settings.named.items()]


def _alone(folder: Path, name: str) -> AbstractContextManager[Any]:
    if name == VALIDATION:
        return _TrainersLock(folder)
    return _SidecarsLock(folder / "evals", name, lambda: ("start", 0), recorded=lambda: True)


def _put_right(folder: Path, place: Path, criterion: Criterion, records: list[dict[str, Any]]) -> list[int]:
    """Repairs a best folder from the weights in it; returns the steps whose weights must come from checkpoints."""
    weights = KeptWeights(BestFolder(str(place)), criterion)
    weights.follow(records)
    steps, gone = weights.lost(lambda step: not problem(str(folder / f"ckpt-{step}")))
    for one in gone if not steps else ():  # else the export reports them
        _LOG.warning("%s", weights.told_of_gone(one))
    return steps


def _state(place: Path) -> tuple[dict[str, Any] | None, dict[int, float]]:
    """Returns the content of info.json, and the time at which each step's weights were written."""
    best = BestFolder(str(place))
    written = {step: os.path.getmtime(f"{best.prefix(step)}.index") for step in best.whole()}
    return read_info(str(place), quiet=True), written


def _summary(folder: Path, place: Path, before: Any, now: Any, criterion: Criterion) -> str:
    """Returns a line that says what was done to a folder and what it holds now."""
    info, steps = now
    done = ["info.json was rebuilt"] if info is not None and info != before[0] else []
    exported = [step for step in steps if steps[step] != before[1].get(step)]
    removed = [step for step in before[1] if step not in steps]
    done += [f"exported: {_listed(exported)}"] if exported else []
    done += [f"removed: {_listed(removed)}"] if removed else []
    where = os.path.relpath(place, folder)
    if info is None:
        return f"{where}: there are no weights of any evaluation with a finite {criterion.metric}"
    holds = f"best is step {info['step']}, {info['metric']} {info['value']!r}; weights: {_listed(steps)}"
    return f"{where}: {'; '.join(done) or 'nothing to do'}; {holds}"


def _listed(steps: Any) -> str:
    return ", ".join(f"ckpt-{step}" for step in sorted(steps))


def _export(
    folder: Path,
    name: str,
    lacking: Sequence[tuple[Path, list[int]]],
    records: list[dict[str, Any]],
    import_modules: Sequence[str],
) -> None:
    """Builds the run's model, and exports the missing weights from the run's checkpoints."""
    if not recorded_experiment(folder):
        place, steps = lacking[0]
        again = "run the training command again, with a larger trainer.train_steps if the run is finished"
        raise UsageError(
            f"--recompute: {_listed(steps)} in {place} cannot be exported from the run's checkpoints, because "
            "manifest.json does not name the experiment; to export the weights, "
            f"{again if name == VALIDATION else 'run the command of the sidecar again'}"
        )
    config = recorded_config(folder, import_modules)

    from trainer_kit.config.experiments import task_class
    from trainer_kit.evals.best.repair import put_back_lost
    from trainer_kit.process.run_directory import RunDirectory
    from trainer_kit.run.launcher import prepare
    from trainer_kit.training.trainer_creation import create_exporter, create_trainer

    strategy = prepare(config)
    with strategy.scope():
        directory = RunDirectory(str(folder), config.trainer, sidecar="" if name == VALIDATION else name)
        exporter = create_exporter(config, directory)
        assert exporter is not None
        task = task_class(config.task)(config.task, logging_dir=str(folder))
        trainer = create_trainer(config, task, train=False, checkpoint_exporter=exporter)
        exporter.resume(None, records)
        put_back_lost(trainer, str(folder), None)

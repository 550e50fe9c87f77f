"""Checks an experiment: a run of a few steps with evaluation, callbacks and checkpoint; leaves no files."""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from types import TracebackType
from typing import Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import run_gin_second_pass
from trainer_kit.errors import ExitCode

_STEPS, _BATCHES = 3, 2  # of training, and of the evaluation of a validation set


class Checklist:
    """While entered, prints a line with the seconds for each check that has passed, and one for the check that failed.

    Attributes:
      current: The check that runs now; "" before the first one.
    """

    def __init__(self) -> None:
        self.current, self._start = "", 0.0

    def begin(self, check: str) -> None:
        """Begins the next check; the one before it has passed."""
        self._print_passed()
        self.current, self._start = check, time.perf_counter()

    def _print_passed(self) -> None:
        if self.current:
            print(f"ok    {self.current} ({time.perf_counter() - self._start:.1f} s)", flush=True)

    def __enter__(self) -> Checklist:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._print_passed()
        else:
            print(f"FAIL  {self.current}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment and the sources of its config."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs every check and prints a line for each; the first failing check ends the command with its message."""
    start = time.perf_counter()
    with Checklist() as checks:
        checks.begin("config: every value is known and valid")
        config = resolve_arguments(arguments).config
        checks.begin("task: its module can be imported, and gin knows every name that is bound")
        from trainer_kit.config.experiment_registry import lookup_task_class

        task_type = lookup_task_class(config.task)
        run_gin_second_pass(arguments.gin_file, arguments.gin_params)
        checks.begin(
            "machine: the devices and the strategy can be used, and the batch sizes divide among"
            " the replicas"
        )
        from trainer_kit.run.launcher import prepare_runtime

        strategy = prepare_runtime(config)
        with strategy.scope(), tempfile.TemporaryDirectory() as folder:
            from trainer_kit.run.lengths import resolve_lengths

            task = task_type(config.task, logging_dir=folder)
            resolved, _ = resolve_lengths(config, task)
            short = shorten_config(resolved)
            trainer = _build_trainer(config, short, task, folder, checks)
            _run(config, short, task, trainer, folder, checks)
    if config.trainer.train_steps == 0:
        print(
            "note: trainer.train_steps is 0, so a run trains nothing; this check has trained"
            f" {_STEPS} steps"
        )
    print(f"{arguments.experiment} is ready to run ({time.perf_counter() - start:.1f} s)")
    return ExitCode.DONE


def shorten_config(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the config of a run that begins like that of `config`, and where all is due after a few steps.

    If the run is longer than that, its learning rate and durations stay what they are; a callback
    has to stop it.
    """
    options = config.trainer
    steps = max(_STEPS, options.fuse_steps)
    batches = options.validation_steps if 0 < options.validation_steps < _BATCHES else _BATCHES
    train_steps = options.train_steps
    if 0 <= train_steps < steps:
        train_steps = type(train_steps)(
            steps
        )  # after rounded steps, a dataset that ends starts again
    return config.replace(
        trainer={
            "train_steps": train_steps,
            "steps_per_loop": steps,
            "summary_interval": steps,
            "checkpoint_interval": steps,
            "validation_interval": steps,
            "validation_steps": batches,
            "validation_sets": {
                name: {"steps": None, "interval": None} for name in options.validation_sets
            },
            "recovery_max_trials": 0,  # a loss that is not finite ends the check
            "callbacks": (),
        }
    )


def _build_trainer(
    config: ExperimentConfig,
    short_config: ExperimentConfig,
    task: Any,
    folder: str,
    checks: Checklist,
) -> Any:
    """Returns the trainer of the short run, after the checks of the names and the data that `config` asks for."""
    from trainer_kit.callbacks.early_stopping import check_early_stopping_metric
    from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
    from trainer_kit.process.run_directory import RunDirectory
    from trainer_kit.training.task_inputs import create_validation_sets
    from trainer_kit.training.trainer_creation import (
        check_best_metric,
        check_optimizer_choice,
        create_exporter,
        create_trainer,
    )

    checks.begin("model, optimizer and metrics can be built")
    check_optimizer_choice(config, type(task))
    exporter = create_exporter(short_config, RunDirectory(folder, short_config.trainer))
    trainer = create_trainer(short_config, task, checkpoint_exporter=exporter)
    names, early = trainer.validation_metric_names(), config.trainer.early_stopping
    if exporter is not None and names is not None:
        best = BestCheckpoints.from_exporter(exporter)
        metrics = [kept.metric_name for kept in best]
        checks.begin(
            f"best metric: {', '.join(dict.fromkeys(metrics))} is one of {', '.join(names)}"
        )
        check_best_metric(trainer, best)
    if early is not None and not early.eval_name and names is not None:
        checks.begin(f"early stopping: {early.metric} is one of {', '.join(names)}")
        check_early_stopping_metric(early, trainer)
    checks.begin("data: can be opened, and is not empty")
    trainer.check_data()
    feeds = {one.name: one.data for one in getattr(trainer, "validation", ())}
    create_validation_sets(feeds, config.trainer).check(
        config.trainer.validation_steps
    )  # with the numbers of batches of the run
    return trainer


def _run(
    config: ExperimentConfig,
    short_config: ExperimentConfig,
    task: Any,
    trainer: Any,
    folder: str,
    checks: Checklist,
) -> None:
    import tensorflow as tf

    from trainer_kit.callbacks.check_progress import CheckProgress, limit_intervals
    from trainer_kit.callbacks.configured_callbacks import create_callbacks
    from trainer_kit.callbacks.webhook import Webhook
    from trainer_kit.checkpoints.state.strict_restore import restore
    from trainer_kit.run.runner import run_experiment
    from trainer_kit.telemetry.console import ConsoleWriter

    checks.begin("start: callbacks, initial weights and the files of the run")
    steps = short_config.trainer.steps_per_loop
    progress = CheckProgress(steps, short_config.trainer.fuse_steps == 1, checks.begin)
    configured = [
        one for one in create_callbacks(config.trainer.callbacks) if not isinstance(one, Webhook)
    ]
    callbacks = [*limit_intervals(steps, configured), progress]
    run_experiment(
        tf.distribute.get_strategy(),
        task,
        "train_and_eval",
        short_config,
        folder,
        trainer=trainer,
        callbacks=callbacks,
        console=ConsoleWriter(io.StringIO()),
        enable_async_checkpointing=False,
    )
    checks.begin("restore: the checkpoint can be restored")
    restore(
        trainer.checkpoint,
        tf.train.latest_checkpoint(folder),
        strict=True,
        optional_sections=trainer.state.optional_sections,
    )

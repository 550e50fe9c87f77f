"""Checks an experiment by a run of a few steps, which leaves no files.

The run trains, evaluates, calls the callbacks, and saves and restores a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.cli.config_arguments import add_config_arguments, resolve_arguments
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import run_gin_second_pass
from trainer_kit.errors import DivergedError, ExitCode

EXAMPLE = "trainer-kit check digits"

if TYPE_CHECKING:
    from trainer_kit.training.task import Task
    from trainer_kit.training.trainer import Trainer

# The length of the training, and of the evaluation of a validation set.
_STEPS = 3
_BATCHES = 2


class Checklist:
    """While entered, prints a line for each check.

    A check that has passed is printed with its seconds. The last line may be that of the check that
    failed.

    Attributes:
      current: The check that runs now. "" before the first one.
    """

    def __init__(self) -> None:
        self.current = ""
        self._start = 0.0

    def begin(self, check: str) -> None:
        """Begins the next check. The one before it has passed."""
        self._print_passed()
        self.current = check
        self._start = time.perf_counter()

    def _print_passed(self) -> None:
        if self.current:
            seconds = time.perf_counter() - self._start
            print(f"ok    {self.current} ({seconds:.1f} s)", flush=True)

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


class CheckProgress(Callback):
    """Begins the checks of the short run, and ends that run. Runs eagerly, on the host.

    Args:
      checks: The checks.
      config: The config of the short run.
    """

    name = "check"

    def __init__(self, checks: Checklist, config: ExperimentConfig) -> None:
        self._checks = checks
        self._steps = config.trainer.steps_per_loop
        self.every = self._steps
        # The first step is a separate loop, so that a loss that is not finite there is recognised.
        self._isolates_first_step = config.trainer.fuse_steps == 1

    def next_boundary(self, step: int) -> int | None:
        """Returns step 1 if the first step is a separate loop."""
        return 1 if self._isolates_first_step and step < 1 else None

    def loop_begin(self, run: Run, steps: int) -> None:
        """Begins the check of the training."""
        if run.step == 0:
            self._checks.begin(f"train: {self._steps} steps")

    def loop_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Prints the loss and the size of model and optimizer, and ends the run."""
        if run.step < self._steps:
            return

        import tensorflow as tf

        from trainer_kit.checkpoints.state.train_state import list_optimizer_variables
        from trainer_kit.telemetry.device_usage import read_peak_memory
        from trainer_kit.telemetry.flops import describe_model_cost
        from trainer_kit.telemetry.scalars import get_training_loss

        loss = get_training_loss(logs)
        print(f"      training_loss {loss:.4g}; {describe_model_cost(run.trainer)}")
        slot_bytes = 0
        for variable in list_optimizer_variables(run.trainer.optimizer):
            size = math.prod(variable.shape)
            slot_bytes += size * tf.as_dtype(variable.dtype).size
        print(f"      optimizer slots of {slot_bytes / 2**20:.3g} MiB")
        memory = read_peak_memory()
        if memory is not None:
            print(f"      peak memory of a step: {memory / 2**30:.3g} GiB")
        run.stop("the check ends here")

    def checkpoint_begin(self, run: Run) -> None:
        """Begins the check of the checkpoint.

        The save after a training that fails because its data has ended too early is no check.
        """
        if run.total_steps is None or run.step >= self._steps:
            self._checks.begin("save: a checkpoint")

    def evaluation_begin(self, run: Run) -> None:
        """Begins the check of the evaluation."""
        self._checks.begin(
            "evaluate: the first batches of each validation set, and the best metric"
        )

    def boundary_end(self, run: Run) -> None:
        """Begins the check of the run's end, once this step is saved and evaluated."""
        # A run also has a boundary at step 0, before its first loop.
        if run.loop is not None and run.step >= self._steps:
            self._checks.begin("end: callbacks and records of the run")

    def exception(self, run: Run, error: Exception) -> None:
        """Leaves the checks at the one that has failed. The run may still save.

        Raises:
          DivergedError: when the run has diverged, since the report of the divergence would be
            deleted with the temporary folder.
        """
        self._checks = Checklist()
        if isinstance(error, DivergedError):
            from trainer_kit.callbacks.recovery import describe_remedy

            raise DivergedError(f"{error}; {describe_remedy(error, run)}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment and the sources of its config."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs every check and prints a line for each.

    The first failing check ends the command with its message.
    """
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
        # This imports TensorFlow, after the config was checked.
        from trainer_kit.run.launcher import prepare_runtime

        strategy = prepare_runtime(config)
        with strategy.scope(), tempfile.TemporaryDirectory() as folder:
            from trainer_kit.run.lengths import resolve_lengths
            from trainer_kit.training.trainer_creation import choose_optimizer

            task = task_type(config.task, logging_dir=folder)
            config = choose_optimizer(config, task_type)
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
    """Returns the config of a run that begins like that of `config`.

    Reports, checkpoints and evaluations are due after a few steps. If the run is longer than that,
    its learning rate and durations stay what they are. A callback has to stop it.
    """
    options = config.trainer
    steps = max(_STEPS, options.fuse_steps)
    batches = options.validation_steps if 0 < options.validation_steps < _BATCHES else _BATCHES
    train_steps = options.train_steps
    if 0 <= train_steps < steps:
        # The type stays: after rounded steps, a dataset that ends starts again.
        train_steps = type(train_steps)(steps)
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
            # A loss that is not finite ends the check.
            "recovery_max_trials": 0,
            "callbacks": (),
        }
    )


def _build_trainer(
    config: ExperimentConfig,
    short_config: ExperimentConfig,
    task: Task,
    folder: str,
    checks: Checklist,
) -> Trainer:
    """Returns the trainer of the short run.

    First checks the names and the data that `config` asks for.
    """
    from trainer_kit.callbacks.early_stopping import check_early_stopping_metric
    from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
    from trainer_kit.process.run_directory import RunDirectory
    from trainer_kit.training.task_inputs import create_validation_sets
    from trainer_kit.training.trainer_creation import (
        check_best_metric,
        create_exporter,
        create_trainer,
    )

    checks.begin("model, optimizer and metrics can be built")
    exporter = create_exporter(short_config, RunDirectory(folder, short_config.trainer))
    trainer = create_trainer(short_config, task, checkpoint_exporter=exporter)

    names = trainer.validation_metric_names()
    if exporter is not None and names is not None:
        best = BestCheckpoints.from_exporter(exporter)
        metrics = dict.fromkeys(checkpoint.metric_name for checkpoint in best)
        checks.begin(f"best metric: {', '.join(metrics)} is one of {', '.join(names)}")
        check_best_metric(trainer, best)

    early_stopping = config.trainer.early_stopping
    if early_stopping is not None and not early_stopping.eval_name and names is not None:
        checks.begin(f"early stopping: {early_stopping.metric} is one of {', '.join(names)}")
        check_early_stopping_metric(early_stopping, trainer)

    checks.begin("data: can be opened, and is not empty")
    trainer.check_data()
    # The validation sets are checked with the numbers of batches of the run.
    validation_sets = getattr(trainer, "validation", ())
    feeds = {validation_set.name: validation_set.data for validation_set in validation_sets}
    create_validation_sets(feeds, config.trainer).check(config.trainer.validation_steps)
    return trainer


def _run(
    config: ExperimentConfig,
    short_config: ExperimentConfig,
    task: Task,
    trainer: Trainer,
    folder: str,
    checks: Checklist,
) -> None:
    import tensorflow as tf

    from trainer_kit.callbacks.configured_callbacks import create_callbacks
    from trainer_kit.callbacks.trackers import Tracker
    from trainer_kit.callbacks.webhook import Webhook
    from trainer_kit.checkpoints.state.strict_restore import restore
    from trainer_kit.run.runner import run_experiment
    from trainer_kit.telemetry.console import ConsoleWriter

    checks.begin("start: callbacks, initial weights and the files of the run")
    steps = short_config.trainer.steps_per_loop
    callbacks = []
    for callback in create_callbacks(config.trainer.callbacks):
        if isinstance(callback, (Webhook, Tracker)):
            continue
        if callback.every is not None and callback.every > steps:
            # The interval may be a property of the callback's class, which cannot be set.
            with contextlib.suppress(AttributeError):
                callback.every = steps
        callbacks.append(callback)
    callbacks.append(CheckProgress(checks, short_config))
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

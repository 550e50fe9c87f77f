"""The parts of a run, each made from the config: trainer, best checkpoint, checkpoint manager, reports."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orbit
import tensorflow as tf

from trainer_kit.callbacks.divergence_report import explain_divergence
from trainer_kit.callbacks.early_stopping import EarlyStopping, check_metric
from trainer_kit.callbacks.recovery import Recovery
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import read_record
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.experiments import trainer_class
from trainer_kit.config.schema.base import FieldError
from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.zero_rate import rate_end_warning
from trainer_kit.distribution.workers import broadcast_from_chief
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.repair import put_back_lost
from trainer_kit.evals.best.several import EXPORTERS, BestCheckpoints
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger, other_ledgers
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.lease import Lease, Leases
from trainer_kit.process.run_directory import RunDirectory, RunIdentity, config_hash, kept_fuse_steps
from trainer_kit.run.action_checks import checked_actions
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.flops import count_flops
from trainer_kit.telemetry.history import JsonLinesWriter
from trainer_kit.telemetry.model_stats import count_parameters
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.tensorboard import SummaryManager, TensorBoardWriter
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.loops.fuse_choice import choose_fuse_steps
from trainer_kit.training.trainer import Trainer

_LOG = logging.getLogger(__name__)
_ASKED_OF_TRAINERS = ("request_stop", "checkpoint_exporter", "before_save", "check_data", "validation_metric_names")


@dataclass(frozen=True)
class Reports:
    """Where a run's numbers go.

    Attributes:
      writer: takes a Report after each loop and evaluation; writes in a thread.
      train_summaries, eval_summaries: for TensorBoard, also for the task's own tf.summary calls.
      history: metrics.jsonl; None for runs that do not train.
      chief: whether this process writes the run's files.
      console: where progress is shown; None on a worker that is not the chief.
      times: what the run spends its time on.
    """

    writer: BackgroundWriter
    train_summaries: Any
    eval_summaries: Any
    history: JsonLinesWriter | None
    chief: bool
    console: Writer | None = None
    times: TimeLedger = field(default_factory=TimeLedger)


def create_trainer(
    config: ExperimentConfig, task: Any, train: bool = True, evaluate: bool = True, checkpoint_exporter: Any = None
) -> Any:
    """Returns a Trainer, of the class that is registered with the task, with model and optimizer. In strategy scope."""
    chosen = trainer_class(config.task) or Trainer
    return chosen.create(config, task, train, evaluate, checkpoint_exporter)


def check_trainer(trainer: Any) -> None:
    """Raises UsageError when a ready-made trainer is none that the engine can drive, such as a trainer of Orbit."""
    missing = [name for name in _ASKED_OF_TRAINERS if not hasattr(trainer, name)]
    if missing:
        raise UsageError(
            f"trainer: {type(trainer).__name__} is no trainer_kit.Trainer (it has no {', '.join(missing)}); inherit "
            "from trainer_kit.Trainer, or start it by trainer_kit.compat.model_garden.run_experiment, which drives "
            "trainers of Orbit and Model Garden too"
        )


def create_exporter(
    config: ExperimentConfig, directory: RunDirectory, keeps: bool = True
) -> BestCheckpoint | BestCheckpoints | None:
    """Returns what keeps the best checkpoints in their folders; None when the config names no metric."""
    options = config.trainer
    metric, primary = options.best_checkpoint_eval_metric, None
    if metric:
        kind = (trainer_class(config.task) or Trainer).best_checkpoint
        primary = kind(directory.own_best, metric, options.best_checkpoint_metric_comp, keeps=keeps)
    named = {
        name: BestCheckpoint(
            os.path.join(directory.own_named_bests, name),
            one.metric,
            one.metric_comp,
            keep=one.keep,
            min_delta=one.min_delta,
            keeps=keeps,
            option=f"trainer.best_checkpoints.{name}.metric",
        )
        for name, one in options.best_checkpoints.items()
    }
    return BestCheckpoints(primary, named) if named else primary


def check_best_metric(trainer: Any, wanted: bool) -> None:
    """Checks, before the first step, that the best checkpoint will be kept if it is `wanted`; on every worker.

    Raises:
      UsageError: when no evaluation will report the metric, unless only a run can tell.
    """
    exporter = trainer.checkpoint_exporter
    if exporter is None:
        if wanted:
            _LOG.warning("no best checkpoint will be kept: the ready-made trainer has no checkpoint_exporter")
        return
    names = trainer.validation_metric_names()
    if names is not None and isinstance(exporter, EXPORTERS):  # one of the caller's own looks at what it is given
        exporter.check_metric(names)


def check_early_stopping_metric(options: EarlyStoppingConfig, trainer: Any) -> None:
    """Raises UsageError when no evaluation will report the metric of early stopping, unless only a run can tell."""
    names = None if options.eval_name else trainer.validation_metric_names()
    if names is not None:
        check_metric(options.metric, names, "an evaluation")


def create_manager(
    trainer: Trainer,
    config: ExperimentConfig,
    model_dir: str,
    asynchronous: bool,
    partial: bool = False,
    from_step: int | None = None,
    reports: Reports | None = None,
    history: RunHistory | None = None,
) -> CheckpointManager:
    """Returns the manager of the run's checkpoints; what was reported before one outlives the process with it.

    On every worker at once.
    """
    trains = getattr(trainer, "trains", trainer.optimizer is not None)
    state = getattr(trainer, "state", None)
    interval, loop = config.trainer.checkpoint_interval, config.trainer.steps_per_loop
    if trains and interval < loop:
        _LOG.warning(
            "trainer.checkpoint_interval=%d is less than trainer.steps_per_loop=%d, and checkpoints come at the ends "
            "of loops: make loops shorter, or it longer",
            *(interval, loop),
        )
    return CheckpointManager(
        trainer.checkpoint,
        model_dir,
        max_to_keep=config.trainer.max_to_keep,
        step_counter=trainer.global_step,
        checkpoint_interval=interval,
        init_fn=trainer.initialize,
        asynchronous=asynchronous,
        for_training=trains,
        keeps=is_chief(trainer.strategy),
        before_save=trainer.before_save if trains and state is not None else lambda _: None,
        before_files=reports.writer.settle if reports else lambda: None,
        sound=state.is_sound if state and config.trainer.recovery_max_trials >= 0 else lambda: True,
        agree=lambda number: broadcast_from_chief(trainer.strategy, number),
        spared=_leases(model_dir, config.trainer, history).needed,
        partial=partial,
        loose=getattr(state, "loose", ()),
        run_id=RunIdentity(model_dir),
        recorded=history.extent if history else lambda _: {},
        from_step=from_step,
    )


def _leases(model_dir: str, options: TrainerConfig, history: RunHistory | None) -> Leases:
    evals, max_wait = RunDirectory(model_dir, options).evals, options.continuous_eval.max_wait_checkpoints
    return Leases(evals, max_wait, history.ledger if history else None)


def create_history(
    directory: RunDirectory, config: ExperimentConfig, reports: Reports, trainer: Any, dataset: str
) -> RunHistory:
    """Returns what keeps history, curves, ledger and best in step."""
    sets = {name: config_hash(config, name) for name in getattr(trainer, "validation_sets", ()) if name}
    # Of a run whose ledger was lost, sidecars may know later lineages; they follow only those that come after.
    known = other_ledgers(directory.ledger) if reports.history else []
    lineage = max((record["lineage"] for record in known), default=0)
    ledger = Ledger(directory.ledger, dataset=dataset, config_hash=config_hash(config), lineage=lineage, sets=sets)
    summaries = (reports.train_summaries, reports.eval_summaries)

    # Whoever copies checkpoints alone to a folder of their own knows that the rest is not there.
    copied = not any(map(os.path.exists, (directory.manifest, directory.metrics)))

    def recorded(step: int) -> Any:
        return {} if copied else (read_record(os.path.join(directory.path, f"ckpt-{step}")) or {}).get("recorded")

    def put_back(step: int) -> None:
        if start := complete_checkpoints(directory.path).get(step):
            put_back_lost(trainer, directory.path, start)

    return RunHistory(
        ledger, reports.history, summaries, trainer.checkpoint_exporter, reports.writer.flush, put_back, recorded
    )


def create_return(directory: RunDirectory, history: RunHistory) -> Callable[[int], str]:
    """Returns what takes all that was told back to the step that an action has gone back to, and finds its checkpoint.

    It raises UsageError where there is none of that step.
    """

    def on_return(step: int) -> str:
        path = complete_checkpoints(directory.path).get(step)
        if path is None:
            raise UsageError(
                f"an action has set global_step back to {step}, of which {directory.path} holds no checkpoint; restore "
                "one of the run's own, whole"
            )
        history.rewind(step)
        return path

    return on_return


def create_early_stopping(
    directory: RunDirectory, history: RunHistory, trainer: Any, options: TrainerConfig, trains: bool
) -> EarlyStopping:
    """Returns what ends a training run early if the config asks for it, and nothing else; on every worker."""
    return EarlyStopping(
        options.early_stopping if trains else None,
        history.ledger if is_chief(trainer.strategy) else None,
        directory.evals,
        lambda number: broadcast_from_chief(trainer.strategy, number),
        lambda: int(trainer.global_step.numpy()),
    )


def create_sidecar(
    directory: RunDirectory, history: RunHistory, trainer: Any, config: ExperimentConfig, lease: Any, reports: Reports
) -> Sidecar | None:
    """Returns what an evaluation beside a run knows of the run; None without a lease, for what is none."""
    if not isinstance(lease, Lease):
        return None
    return Sidecar(
        directory,
        history.ledger,
        trainer.checkpoint_exporter,
        reports.eval_summaries,
        lease,
        config.trainer.train_steps,
        lambda: int(trainer.global_step.numpy()),
        lambda: put_back_lost(trainer, directory.path, None, lease.read),
    )


def create_actions(
    strategy: tf.distribute.Strategy,
    config: ExperimentConfig,
    trainer: Any,
    manager: CheckpointManager,
    given: Sequence[Any] | None,
) -> list[Any]:
    """Returns the actions after training loops: those given, the trainer's own, and the watch for a preemption notice.

    An action with methods `state()` and `restore(state)` has its state in every checkpoint.
    """
    own = getattr(trainer, "own_train_actions", None)
    actions = [*(given or []), *checked_actions(own(config, manager.source, manager) if own else None, None)[0]]
    keep_states(trainer, actions)
    resolver = getattr(strategy, "cluster_resolver", None)
    if config.trainer.preemption_on_demand_checkpoint and isinstance(
        resolver, tf.distribute.cluster_resolver.TPUClusterResolver
    ):
        actions.append(orbit.actions.SaveCheckpointIfPreempted(resolver, manager, trainer.global_step))
    return actions


def keep_states(trainer: Any, actions: Sequence[Any], kind: str = "action") -> None:
    """Has the states of actions be in every checkpoint; before the restore.

    Args:
      trainer: of the run; one that is not ours keeps none.
      actions: those with methods `state()` and `restore(state)` have a state.
      kind: tells these from the others of the run.
    """
    for number, action in enumerate(actions):
        if hasattr(action, "state") and hasattr(action, "restore") and hasattr(trainer, "state"):
            restore = action.restore
            trainer.state.run_state.add(
                f"{kind} {number} {type(action).__name__}",
                action.state,
                lambda state, restore=restore: None if state is None else restore(state),
            )


def create_eval_actions(
    config: ExperimentConfig, trainer: Any, directory: RunDirectory, given: Sequence[Any] | None
) -> list[Any]:
    """Returns the actions after evaluations: those given, and the trainer's own."""
    own = getattr(trainer, "own_eval_actions", None)
    return [*(given or []), *(own(config, directory.own) if own else [])]


def create_recovery(
    config: ExperimentConfig, trainer: Any, manager: CheckpointManager, history: RunHistory, directory: RunDirectory
) -> Recovery | None:
    """Returns what takes a diverged run back; None for a trainer that is not ours."""
    if not isinstance(trainer, Trainer):
        return None
    explain = functools.partial(explain_divergence, trainer, manager, directory.path)
    return Recovery(config.trainer, trainer, manager, history.rewind, explain)


def open_reports(
    console: Writer | None,
    directory: RunDirectory,
    chief: bool,
    trains: bool,
    save_summary: bool,
    managers: tuple[Any, Any] = (None, None),
    *,
    times: TimeLedger | None = None,
) -> Reports:
    """Opens all that a run reports to; on a worker that is not the chief, next to nothing.

    Args:
      console: where progress is shown; None: nowhere.
      directory: of the run.
      chief: whether this process writes the run's files.
      trains: whether there will be a history.
      save_summary: whether TensorBoard summaries are written.
      managers: of the summaries of training and of validation, in place of our own.
      times: counts what the run spends its time on; None: begins with this call.
    """
    folders = (directory.train_summaries, directory.eval_summaries)
    own = (SummaryManager(folder if save_summary and chief else None) for folder in folders)
    train_summaries, eval_summaries = (given or made for given, made in zip(managers, own, strict=True))
    writers: list[Writer] = [TensorBoardWriter(train_summaries, eval_summaries)]
    history = JsonLinesWriter(directory.metrics) if chief and trains else None
    if history is not None:
        writers.append(history)
    if console is not None:
        writers.append(console)
    writer = BackgroundWriter(writers)
    return Reports(writer, train_summaries, eval_summaries, history, chief, console, times or TimeLedger())


def with_kept_choice(config: ExperimentConfig, directory: RunDirectory) -> ExperimentConfig:
    """Returns the config with what trainer.fuse_steps=auto came to when the run was started, if it was."""
    kept = kept_fuse_steps(directory.path) if config.trainer.fuse_steps == "auto" else None
    if kept is None:
        return config
    try:
        resolved = config.replace(trainer={"fuse_steps": kept})
    except FieldError as error:
        raise UsageError(
            f"{error.errors()[0]['msg']}; {kept} is what trainer.fuse_steps=auto chose when the run in "
            f"{directory.path} was started: go on as it was started, or with trainer.fuse_steps=1 and "
            "--allow_config_change=trainer.fuse_steps"
        ) from None
    _LOG.info("trainer.fuse_steps=auto: %s, as when the run was started", _form(kept))
    return resolved


def get_ready_to_train(trainer: Any, config: ExperimentConfig, directory: RunDirectory, summaries: Any) -> int | None:
    """Checks the data, and with fuse_steps=auto chooses the form of the training loop; a run keeps what it chose.

    Args:
      trainer: of the run, restored.
      config: of the run.
      directory: of the run.
      summaries: the manager of its training summaries.

    Returns:
      How many steps are one program, if that was to be chosen; None if not, or if a stop came first.
    """
    trainer.check_data()
    if warning := rate_end_warning(config.trainer):
        _LOG.warning("%s", warning)
    if config.trainer.fuse_steps != "auto" or not isinstance(trainer, Trainer) or trainer.optimizer is None:
        return None
    if (kept := kept_fuse_steps(directory.path)) is not None:
        if trainer.fuse_steps != kept:  # a ready-made trainer does not know
            trainer.fuse(kept)
        return kept
    choice = choose_fuse_steps(trainer, summaries.summary_writer())
    if choice is None:
        return None
    _LOG.info("trainer.fuse_steps=auto: %s; %s", _form(choice.fuse_steps), choice.reason)
    trainer.fuse(choice.fuse_steps)
    return choice.fuse_steps


def _form(fuse_steps: int) -> str:
    return "each step by itself" if fuse_steps == 1 else f"{fuse_steps} steps fused"


def model_cost(trainer: Any) -> str:
    """Returns the size of the trainer's model and, once it was trained, what one example costs, for the log.

    Traces the model once more, so it comes last.
    """
    parameters, spec = str(count_parameters(trainer.model)), getattr(trainer, "batch_spec", None)
    if spec is None:
        return parameters
    features = spec[0] if isinstance(spec, tuple) and len(spec) == 2 else spec
    return f"{parameters}; {count_flops(trainer.model, features)} for one example"


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes the run's files."""
    return bool(strategy.extended.should_checkpoint)

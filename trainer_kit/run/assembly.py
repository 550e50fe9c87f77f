"""Builds the parts of a run: trainer, history, checkpoints, callbacks and controller."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.callback_list import CallbackList
from trainer_kit.callbacks.early_stopping import EarlyStopping, check_early_stopping_metric
from trainer_kit.callbacks.finite_check import FiniteCheck
from trainer_kit.callbacks.metrics_reporter import MetricsReporter
from trainer_kit.callbacks.profile import Profile
from trainer_kit.callbacks.record_evaluation import (
    ExportBest,
    RecordEvaluation,
    RecordSidecarEvaluation,
)
from trainer_kit.callbacks.recovery import Recovery
from trainer_kit.callbacks.tensor_summaries import TensorSummaries, request_tensors
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.checkpoints.retention import Retention
from trainer_kit.checkpoints.state.variable_names import layer_names
from trainer_kit.config.resume_check import find_data_mistakes
from trainer_kit.config.schema.durations import RoundedSteps, get_seconds
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError, Mistake, UsageError
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger, read_sidecar_records
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.run_directory import (
    compute_config_hash,
    describe_differences,
    get_versions,
    has_begun,
    read_manifest,
)
from trainer_kit.process.run_lock import RunLock
from trainer_kit.process.sidecar_lease import Lease, LeaseReader
from trainer_kit.process.signals import StopSignals
from trainer_kit.process.user_code import describe_code, describe_code_changes
from trainer_kit.run.controller import Controller
from trainer_kit.run.orbit_adapters import Actions, OrbitController, list_actions, register_states
from trainer_kit.run.plan import RunPlan
from trainer_kit.run.preflight import find_early_stopping_mistakes
from trainer_kit.runtime.collectives import barrier, broadcast_text, worker_count
from trainer_kit.telemetry.report import Writer
from trainer_kit.telemetry.report_writers import ReportWriters
from trainer_kit.telemetry.summary_manager import TensorBoardOptions
from trainer_kit.telemetry.time_ledger import TimeLedger
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.evaluator import Evaluator
from trainer_kit.training.loops.train_loop import SummaryTimer
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import (
    check_accumulation,
    check_best_metric,
    check_freeze,
    check_overfit_batches,
    check_trainer,
    create_exporter,
    create_trainer,
    get_trainer_class,
)
from trainer_kit.typing import CheckpointExporter, TaskLike

_LOG = logging.getLogger(__name__)


def build_trainer(plan: RunPlan, task: TaskLike) -> tuple[Any, BestCheckpoints | None]:
    """Builds the trainer of the run, with model and optimizer.

    A trainer that the run creates gets no exporter: the run exports the evaluations that it
    records, and not those that a callback runs. Three kinds of trainer export in their own
    `evaluate`: a ready-made one, one that an orbit.Controller drives, and one whose class has
    another `best_checkpoint_class`, such as Model Garden's.

    Called in strategy scope.

    Returns:
      (trainer, best): the trainer, and the owner of its best checkpoints. None if the run keeps
      none.

    Raises:
      UsageError: when the engine cannot drive the trainer, or no evaluation will report a metric
        that is needed.
    """
    config = plan.config
    keeps_best = plan.evaluates and plan.mode != "eval"
    exporter: BestCheckpoints | CheckpointExporter | None = None
    if keeps_best:
        exporter = create_exporter(config, plan.directory, plan.is_chief)
    trainer_class = get_trainer_class(config)
    run_exports = (
        plan.options.trainer is None
        and issubclass(plan.options.controller_cls, Controller)
        and issubclass(trainer_class, Evaluator)
        and trainer_class.best_checkpoint_class is BestWeightsExporter
    )
    trainer = plan.options.trainer or create_trainer(
        config, task, plan.trains, plan.evaluates, None if run_exports else exporter
    )
    check_trainer(trainer)
    if not run_exports:
        if exporter is not None and trainer.checkpoint_exporter is None:
            _LOG.warning(
                "no best checkpoint will be kept: the ready-made trainer has no checkpoint_exporter"
            )
        exporter = trainer.checkpoint_exporter

    best = None if exporter is None else BestCheckpoints.from_exporter(exporter)
    check_best_metric(trainer, best)
    _check_controller(plan)
    if plan.trains:
        check_accumulation(trainer, config.trainer.accumulate_steps)
        check_overfit_batches(trainer, config.trainer)
        check_freeze(trainer, config.trainer.freeze)
        if early := config.trainer.early_stopping:
            if mistakes := find_early_stopping_mistakes(config.trainer, plan.mode):
                raise ConfigError(mistakes)
            check_early_stopping_metric(early, trainer)
    return trainer, best


def _check_controller(plan: RunPlan) -> None:
    """Raises UsageError when the caller's controller class cannot do what the config asks for."""
    options = plan.config.trainer
    kind = plan.options.controller_cls
    if issubclass(kind, Controller):
        return
    if plan.callbacks or options.summaries:
        names = [callback.name for callback in plan.callbacks] or ["trainer.summaries"]
        raise UsageError(
            f"{', '.join(names)}: {kind.__name__} calls no callbacks of trainer_kit; give a"
            " subclass of trainer_kit.run.controller.Controller as controller_cls, or functions of"
            " the logs as train_actions"
        )
    if not plan.trains:
        return
    if plan.options.profile:
        raise UsageError(
            f"--profile: {kind.__name__} does not end its loops where the trace begins; give a"
            " subclass of trainer_kit.run.controller.Controller as controller_cls, or trace by"
            " functions of train_actions"
        )
    if get_seconds(options.summary_interval):
        raise UsageError(
            f"trainer.summary_interval={options.summary_interval}: {kind.__name__} counts steps;"
            " give a number of them"
        )
    if options.recovery_max_trials > 0:
        raise UsageError(
            f"trainer.recovery_max_trials: {kind.__name__} cannot rewind the run after a"
            " divergence; give a subclass of trainer_kit.run.controller.Controller as"
            " controller_cls, or set trainer.recovery_max_trials=0"
        )
    if options.early_stopping is not None:
        raise UsageError(
            f"trainer.early_stopping: {kind.__name__} keeps no ledger of evaluations, which early"
            " stopping reads; give a subclass of trainer_kit.run.controller.Controller as"
            " controller_cls, or remove trainer.early_stopping"
        )


def build_writers(
    plan: RunPlan, trainer: BaseTrainer, console: Writer | None, log: Writer | None
) -> ReportWriters:
    """Returns what the run reports its numbers to."""
    tensorboard = TensorBoardOptions(
        loss_tag=getattr(trainer, "loss_tag", ""),
        config=plan.original_config,
        config_kind="validation" if plan.evaluates else "train",
    )
    return ReportWriters.open(
        plan.directory,
        is_chief=plan.is_chief,
        trains=plan.trains,
        save_summary=plan.options.save_summary,
        console=console,
        log=log,
        tensorboard=tensorboard,
        summary_managers=(plan.options.summary_manager, plan.options.eval_summary_manager),
    )


def build_history(
    plan: RunPlan, writers: ReportWriters, trainer: BaseTrainer, best: BestCheckpoints | None
) -> RunHistory:
    """Returns the run's history.

    It keeps reports, curves, ledger and best checkpoint at the same step.
    """
    directory = plan.directory
    config = plan.config
    sets = {
        name: compute_config_hash(config, name) for name in trainer.validation_set_names if name
    }

    # If the run's ledger was lost, sidecars may know later lineages, and they follow only a lineage
    # after those.
    records = []
    if plan.writes_records:
        records = read_sidecar_records(directory.ledger_path)
    ledger = Ledger(
        directory.ledger_path,
        dataset="validation" if plan.trains else "eval",
        config_hash=compute_config_hash(config),
        lineage=max((record["lineage"] for record in records), default=0),
        sets=sets,
    )

    # A folder with copied checkpoints only has neither manifest nor history: that is no loss of
    # reports.
    has_manifest = os.path.exists(directory.manifest_path)
    has_reports = has_manifest or os.path.exists(directory.metrics_path)
    return RunHistory(
        ledger,
        writers.history,
        (writers.train_summaries, writers.eval_summaries),
        best,
        writers.writer,
        checkpoint_folder=directory.path if has_reports else "",
    )


def build_manager(plan: RunPlan, trainer: BaseTrainer, history: RunHistory) -> CheckpointManager:
    """Returns the manager of the run's checkpoints.

    It writes all earlier reports to disk before a checkpoint.
    """
    options = plan.config.trainer
    leases = LeaseReader(
        plan.directory.evals_dir, options.continuous_eval.max_wait_checkpoints, history.ledger
    )
    if plan.options.allow_partial_restore:
        trainer.state.allow_partial_restore()
    return CheckpointManager(
        trainer,
        plan.directory,
        options,
        reports=history,
        retention=Retention(plan.directory.path, leases, options.keep_interval),
        asynchronous=plan.options.enable_async_checkpointing,
        allow_partial=plan.options.allow_partial_restore,
    )


def build_early_stopping(plan: RunPlan, history: RunHistory) -> EarlyStopping | None:
    """Returns the early stopping of a training run, None when the config has none."""
    options = plan.config.trainer.early_stopping
    if not options or not plan.trains:
        return None
    return EarlyStopping(options, history.ledger, plan.directory.evals_dir)


def build_sidecar(
    plan: RunPlan,
    lock: RunLock | Lease | None,
    trainer: BaseTrainer,
    writers: ReportWriters,
    history: RunHistory,
) -> Sidecar | None:
    """Returns the view that a continuous_eval process has of its training run.

    Returns None in all other modes.
    """
    if not isinstance(lock, Lease):
        return None
    return Sidecar(
        plan.directory,
        history.ledger,
        history.best,
        writers.eval_summaries,
        lock,
        plan.config.trainer.train_steps,
        trainer.global_step,
    )


def check_setup(plan: RunPlan, trainer: BaseTrainer) -> dict[str, Any]:
    """Returns what the manifest records of devices, data, layers and code.

    Runs eagerly, once the trainer has opened its data.

    Raises:
      UsageError: on all workers, when the chief sees that the run began with others, unless they
        are allowed.
    """
    device_kinds = {device.device_type for device in tf.config.list_logical_devices()}
    accelerators = device_kinds - {"CPU", "TPU_SYSTEM"}
    data = trainer.data_identities() if plan.trains else {}
    setup = {
        "replicas": plan.strategy.num_replicas_in_sync,
        "workers": worker_count(plan.strategy),
        "device": max(accelerators, default="CPU"),
    }
    if setup["device"] == "GPU":
        gpus = tf.config.list_physical_devices("GPU")
        details = tf.config.experimental.get_device_details(gpus[0])
        setup["device_name"] = details.get("device_name", "")
    task = getattr(trainer, "task", None)
    code = {}
    if plan.writes_records:
        code = describe_code(type(task))

    is_resumed = plan.trains and has_begun(plan.directory.path)
    before = {}
    if is_resumed:
        before = read_manifest(plan.directory.path)
    data_before = before.get("data", {})
    allowed_paths = tuple(plan.options.allow_config_change)
    mistakes = list(find_data_mistakes(data_before, data, plan.changes, allowed_paths))
    if plan.config.trainer.require_exact_resume:
        advice = "go back, or set it to false to continue with other results"
        problems = describe_differences(before, {**get_versions(), **setup})
        problems += describe_code_changes(before, code)
        mistakes += [
            Mistake("trainer.require_exact_resume", problem, advice) for problem in problems
        ]

    if text := broadcast_text(plan.strategy, str(ConfigError(mistakes))):
        # No worker ends before the others have the text.
        barrier(plan.strategy)
        raise UsageError(text)
    return {
        **setup,
        **code,
        "data": {**data_before, **data},
        "train_steps": plan.config.trainer.train_steps,
        "layer_names": layer_names(trainer.model),
    }


def build_controller(
    plan: RunPlan,
    trainer: BaseTrainer,
    manager: CheckpointManager,
    writers: ReportWriters,
    history: RunHistory,
    early_stopping: EarlyStopping | None,
    sidecar: Sidecar | None,
    signals: StopSignals,
    times: TimeLedger,
) -> Controller | OrbitController:
    """Returns the controller of the trainer, with the callbacks of the run.

    It is a Controller, or the caller's orbit.Controller in an adapter.
    """
    options = plan.config.trainer
    directory = plan.directory
    stopped_step = directory.read_stopped_step()
    run = Run(trainer, directory.path, plan.is_chief, plan.epochs, stopped_step)
    actions = _build_actions(plan, trainer, manager)

    # What a controller of any kind takes.
    arguments: dict[str, Any] = {
        "strategy": plan.strategy,
        "trainer": trainer if plan.trains else None,
        "evaluator": trainer if plan.evaluates else None,
        "global_step": trainer.global_step,
        "checkpoint_manager": manager,
        "steps_per_loop": options.steps_per_loop,
        "summary_manager": writers.train_summaries,
        "eval_summary_manager": writers.eval_summaries,
        "signals": signals,
    }

    controller_cls = plan.options.controller_cls
    if not issubclass(controller_cls, Controller):
        interval = options.summary_interval if plan.options.save_summary else None
        if interval:
            # Orbit takes multiples only, and the default may be none.
            interval += -interval % options.steps_per_loop
        return OrbitController(
            controller_cls,
            callbacks=CallbackList(run, [], times, plan.strategy),
            actions=actions,
            history=history,
            summary_interval=interval,
            summary_dir=directory.train_summary_dir,
            eval_summary_dir=directory.eval_summary_dir,
            **arguments,
        )

    user_callbacks = list(plan.callbacks)
    if options.summaries:
        managers = (writers.train_summaries, writers.eval_summaries)
        timer = _build_summary_interval(plan)
        user_callbacks.append(TensorSummaries(options.summaries, timer, *managers))
    request_tensors(trainer, user_callbacks)
    profile = None
    if plan.options.profile:
        profile = Profile(plan.options.profile, directory.train_summary_dir, options.steps_per_loop)
    members = assemble_callbacks(
        plan.config,
        trainer,
        manager,
        history,
        writers.writer,
        user_callbacks,
        actions,
        early_stopping=early_stopping,
        profile=profile,
        sidecar=sidecar,
        trains=plan.trains,
    )
    callbacks = CallbackList(run, members, times, plan.strategy)
    callbacks.register_states()

    # Loops end at the multiples of intervals that were rounded to steps, such as epochs.
    loop_ends = (options.steps_per_loop, options.checkpoint_interval, options.summary_interval)
    return controller_cls(
        callbacks=callbacks,
        summary_interval=_build_summary_interval(plan),
        save_on_stop=options.preemption_on_demand_checkpoint or options.max_time is not None,
        history=history,
        boundary_intervals=[steps for steps in loop_ends if isinstance(steps, RoundedSteps)],
        **arguments,
    )


def assemble_callbacks(
    config: ExperimentConfig,
    trainer: BaseTrainer,
    manager: CheckpointManager,
    history: RunHistory,
    writer: Writer,
    user_callbacks: Sequence[Callback],
    actions: Actions,
    *,
    early_stopping: EarlyStopping | None = None,
    profile: Profile | None = None,
    sidecar: Sidecar | None = None,
    trains: bool = True,
) -> list[Callback]:
    """Returns the engine's callbacks and the users' in the order in which each event calls them.

    The best weights of an evaluation are exported, unless the trainer has done so itself. The
    evaluation is then recorded before users' callbacks see it. Values that users report join the
    line of the loop, and the loss is checked after that line is written. A sidecar records last: if
    it dies before it has reported an evaluation, the next start evaluates again.
    """
    callbacks: list[Callback] = []
    best = history.best
    if best is not None:
        callbacks.append(ExportBest(best))
    if sidecar is None:
        callbacks.append(RecordEvaluation(history))
        if profile is not None:
            callbacks.append(profile)

    callbacks += [*user_callbacks, actions]
    if early_stopping is not None:
        callbacks.append(early_stopping)
    batch_size = getattr(getattr(config.task, "train_data", None), "global_batch_size", 0)
    peak_flops = getattr(config.runtime, "peak_flops", None)
    callbacks.append(MetricsReporter(writer, batch_size, best, peak_flops))

    if sidecar is not None:
        callbacks.append(RecordSidecarEvaluation(history.ledger, writer))
        return callbacks

    # The loss is checked after the line of the loop is written.
    options = config.trainer
    if trains and options.recovery_max_trials >= 0 and isinstance(trainer, Trainer):
        callbacks.append(FiniteCheck(options.loss_upper_bound, options.recovery_begin_steps))
        callbacks.append(Recovery(options, trainer, manager))
    return callbacks


def _build_summary_interval(plan: RunPlan) -> int | SummaryTimer | None:
    """Returns the number of steps between summaries of training, or a new timer of them.

    Returns None if the run writes none.
    """
    interval = plan.config.trainer.summary_interval
    if not plan.trains or not plan.options.save_summary:
        return None
    if isinstance(interval, int):
        return interval
    return SummaryTimer(get_seconds(interval))


def _build_actions(plan: RunPlan, trainer: BaseTrainer, manager: CheckpointManager) -> Actions:
    """Returns the actions of the run: the caller's and the trainer's.

    On a TPU an action saves when it is about to be preempted.
    """
    trainer_actions = trainer.build_train_actions(plan.config, manager.restore_folder, manager)
    train_actions = [*plan.train_actions, *list_actions("build_train_actions", trainer_actions)]
    register_states(trainer, train_actions)

    resolver = getattr(plan.strategy, "cluster_resolver", None)
    is_tpu = isinstance(resolver, tf.distribute.cluster_resolver.TPUClusterResolver)
    if plan.config.trainer.preemption_on_demand_checkpoint and is_tpu:
        handler = tf.distribute.experimental.PreemptionCheckpointHandler(resolver, manager)

        def save_if_preempted(logs: object) -> None:
            del logs
            handler.save_checkpoint_if_preempted(
                checkpoint_number=trainer.global_step, check_interval=False
            )

        train_actions.append(save_if_preempted)

    eval_actions = trainer.build_eval_actions(plan.config, plan.directory.output_dir)
    return Actions(train_actions, [*plan.eval_actions, *eval_actions])

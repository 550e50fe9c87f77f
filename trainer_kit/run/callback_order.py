"""Lists the callbacks of a run in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.early_stopping import EarlyStopping
from trainer_kit.callbacks.finite_check import FiniteCheck
from trainer_kit.callbacks.metrics_reporter import MetricsReporter
from trainer_kit.callbacks.profile import Profile
from trainer_kit.callbacks.record_evaluation import (
    ExportBest,
    RecordEvaluation,
    RecordSidecarEvaluation,
)
from trainer_kit.callbacks.recovery import Recovery
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.run.orbit_adapters import Actions
from trainer_kit.telemetry.report import Writer
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.trainer import Trainer


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
    callbacks.append(MetricsReporter(writer, batch_size, best))

    if sidecar is not None:
        callbacks.append(RecordSidecarEvaluation(sidecar, writer))
        return callbacks

    # The loss is checked after the line of the loop is written.
    options = config.trainer
    if trains and options.recovery_max_trials >= 0 and isinstance(trainer, Trainer):
        callbacks.append(FiniteCheck(options.loss_upper_bound, options.recovery_begin_steps))
        callbacks.append(Recovery(options, trainer, manager))
    return callbacks

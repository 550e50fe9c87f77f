"""EngineOptions: the fields of a config that TF Model Garden does not have."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.typing import ExperimentLike

# Without a field for it in the config, the run sets no seed.
_NO_SEED = 0


@dataclass(frozen=True)
class EngineOptions:
    """The fields that a trainer reads and that a config of TF Model Garden lacks.

    A missing field has the default of the schema. See TrainerConfig and RuntimeConfig for the
    meanings.

    Attributes:
      freeze: trainer.freeze.
      fuse_steps: trainer.fuse_steps.
      accumulate_steps: trainer.accumulate_steps.
      recovery_max_trials: trainer.recovery_max_trials.
      preemption_grace_seconds: trainer.preemption_grace_seconds.
      require_exact_resume: trainer.require_exact_resume.
      executor: runtime.executor.
      random_seed: runtime.random_seed. 0 if the field is missing.
    """

    freeze: tuple[str, ...]
    fuse_steps: int
    accumulate_steps: int
    recovery_max_trials: int
    preemption_grace_seconds: float
    require_exact_resume: bool
    executor: str
    random_seed: int

    @classmethod
    def from_config(cls, config: ExperimentLike) -> EngineOptions:
        """Returns the options of a config."""
        trainer = config.trainer
        runtime = config.runtime
        defaults = TrainerConfig
        return cls(
            freeze=getattr(trainer, "freeze", defaults.freeze),
            fuse_steps=getattr(trainer, "fuse_steps", defaults.fuse_steps),
            accumulate_steps=getattr(trainer, "accumulate_steps", defaults.accumulate_steps),
            recovery_max_trials=getattr(
                trainer, "recovery_max_trials", defaults.recovery_max_trials
            ),
            preemption_grace_seconds=getattr(
                trainer, "preemption_grace_seconds", defaults.preemption_grace_seconds
            ),
            require_exact_resume=getattr(
                trainer, "require_exact_resume", defaults.require_exact_resume
            ),
            executor=getattr(runtime, "executor", RuntimeConfig.executor),
            random_seed=getattr(runtime, "random_seed", _NO_SEED),
        )

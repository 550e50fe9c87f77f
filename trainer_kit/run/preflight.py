"""Checks flags, files, config and model_dir of a run before TensorFlow is imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer_kit import files
from trainer_kit.checkpoint_names import check_step_exists, complete_checkpoints
from trainer_kit.config import discovery
from trainer_kit.config.merge import ResolvedConfig
from trainer_kit.config.modes import CONTINUOUS_FINETUNE, MODES, lookup_mode
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.resume_check import find_unknown_paths
from trainer_kit.config.run_length import find_length_mistakes
from trainer_kit.config.schema.evaluation import RESERVED_EVAL_NAMES, describe_folder_name_problem
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TrainerConfig
from trainer_kit.errors import ConfigError, Mistake, UsageError
from trainer_kit.process.finetune_directory import find_pretraining_mistakes
from trainer_kit.process.run_directory import RunDirectory, check_model_dir
from trainer_kit.process.run_lock import check_not_in_use
from trainer_kit.runtime.tf_config import find_parameter_server_mistakes, read_worker_index
from trainer_kit.telemetry.profile_window import parse_profile_steps

# The readers of a DataConfig do not use the address of this flag.
_SERVICE_FLAG = "--tf_data_service"


@dataclass(frozen=True)
class RunRequest:
    """A requested run. The attributes are the values of the flags.

    Attributes:
      experiment, mode, model_dir: The experiment, the mode and the folder of the run. None without
        the flag.
      sources: The sources of config values.
      import_modules: The modules to import first.
      allow_config_change: Paths of config values that may differ from the run in model_dir.
      checkpoint: The checkpoint that mode eval evaluates.
      eval_name: The name of a continuous_eval sidecar.
      from_step: The step to resume from. None means the newest checkpoint.
      profile: The steps to trace, as "10:20". None means no trace.
    """

    experiment: str | None
    mode: str | None
    model_dir: str | None
    sources: ConfigSources = field(default_factory=ConfigSources)
    import_modules: tuple[str, ...] = ()
    allow_config_change: tuple[str, ...] = ()
    checkpoint: str = "latest"
    eval_name: str = "continuous_eval"
    from_step: int | None = None
    profile: str | None = None


def check_request(request: RunRequest) -> ResolvedConfig[ExperimentConfig]:
    """Returns the config of the requested run, after all checks that need no TensorFlow.

    Raises:
      ConfigError: with every mistake in flags, files and config.
      UsageError: when model_dir contains another run, or nothing to evaluate.
      StorageError: when model_dir cannot be written.
      ModelDirInUseError: when another process trains in model_dir.
    """
    mistakes = list(_flag_mistakes(request))
    resolved: ResolvedConfig[ExperimentConfig] | None = None
    cause: UsageError | None = None
    try:
        if request.experiment:
            discovery.import_experiment(request.experiment, request.import_modules)
            resolved = resolve_config(request.experiment, request.sources)

            # Without a record there is no run yet, or check_model_dir reports what is wrong.
            directory = RunDirectory(request.model_dir or "", resolved.config.trainer)
            record = ""
            if request.model_dir:
                with (
                    contextlib.suppress(OSError, ValueError),
                    open(directory.params_path, encoding="utf-8") as stream,
                ):
                    record = stream.read()
            mistakes += find_unknown_paths(request.allow_config_change, resolved.config, record)

            data = getattr(resolved.config.task, "train_data", None)
            if _SERVICE_FLAG in resolved.origins.values() and isinstance(data, DataConfig):
                advice = (
                    "leave it out, or set task.train_data.tf_data_service_address if your task"
                    " reads it"
                )
                problem = "no reader of this release uses the tf.data service yet"
                mistakes.append(Mistake(_SERVICE_FLAG, problem, advice))

            mistakes += find_parameter_server_mistakes(resolved.config.runtime)
            mistakes += find_early_stopping_mistakes(resolved.config.trainer, request.mode or "")
            if request.mode in MODES and MODES[request.mode].trains:
                mistakes += find_length_mistakes(resolved.config.trainer)
            if request.mode == CONTINUOUS_FINETUNE:
                mistakes += find_pretraining_mistakes(resolved.config, request.model_dir or "")
    except ConfigError as error:
        mistakes += error.mistakes
        cause = error
    except UsageError as error:
        mistakes.append(Mistake("", str(error)))
        cause = error
    if mistakes or resolved is None:
        raise ConfigError(mistakes) from cause
    _check_directory(request, resolved)
    return resolved


def find_early_stopping_mistakes(options: TrainerConfig, mode: str) -> list[Mistake]:
    """Returns a mistake when early stopping gets no evaluations, else [].

    That is when the config has early stopping, but the mode evaluates nothing during training.
    """
    early_stopping = options.early_stopping
    if early_stopping is None or early_stopping.eval_name:
        return []
    if mode not in ("train", "train_and_post_eval"):
        return []
    problem = f"the mode {mode} does not evaluate during training"
    advice = (
        "use train_and_eval, name a sidecar in trainer.early_stopping.eval_name, or remove"
        " trainer.early_stopping"
    )
    return [Mistake("trainer.early_stopping", problem, advice)]


def find_profile_mistakes(profile: str | None, mode: str) -> list[Mistake]:
    """Returns a mistake when `profile` is malformed or the mode does not train, else []."""
    if profile is None:
        return []
    try:
        parse_profile_steps(profile)
    except UsageError as error:
        return [Mistake("--profile", str(error))]
    if mode in MODES and not MODES[mode].trains:
        problem = f"it traces training steps, but the mode {mode} does not train"
        return [Mistake("--profile", problem, "leave it out")]
    return []


def _flag_mistakes(request: RunRequest) -> Iterator[Mistake]:
    for name in ("experiment", "mode", "model_dir"):
        if not getattr(request, name):
            yield Mistake(f"--{name}", "is needed", "see --help")

    if request.mode:
        try:
            mode = lookup_mode(request.mode)
        except UsageError as error:
            yield Mistake("--mode", str(error))
        else:
            step = request.from_step
            if step is not None and not mode.is_single_run:
                problem = (
                    f"it belongs to a single run, but {request.mode} starts one for each checkpoint"
                )
                advice = (
                    "to repeat a fine-tuning, remove its metrics-<step>.json and finetune-<step>/"
                )
                yield Mistake("--from_step", problem, advice)
            elif step is not None and not mode.trains:
                problem = (
                    f"training resumes from this step, but the mode {request.mode} does not train"
                )
                advice = "leave it out"
                if request.mode == "eval":
                    advice = f"--checkpoint={step} evaluates that step"
                yield Mistake("--from_step", problem, advice)

    yield from find_profile_mistakes(request.profile, request.mode or "")
    if problem := describe_folder_name_problem(request.eval_name, RESERVED_EVAL_NAMES):
        yield Mistake("--eval_name", problem)


def _check_directory(request: RunRequest, resolved: ResolvedConfig[ExperimentConfig]) -> None:
    model_dir = str(request.model_dir)
    experiment = str(request.experiment)
    if MODES[str(request.mode)].trains:
        directory = RunDirectory(model_dir, resolved.config.trainer)
        runtime = resolved.config.runtime
        # Other workers than the first take no lock.
        if read_worker_index(runtime.worker_hosts, runtime.task_index) == 0:
            check_not_in_use(model_dir)
        if request.from_step:
            check_step_exists(request.from_step, complete_checkpoints(model_dir))
        allowed_paths = list(request.allow_config_change)
        # Where no optimizer is chosen, the run takes one, and compares it with the recorded one.
        optimizer = getattr(resolved.config.trainer.optimizer_config, "optimizer", None)
        if getattr(optimizer, "type", None) is None:
            allowed_paths.append("trainer.optimizer_config.optimizer.type")
        check_model_dir(directory, resolved.config, experiment, allowed_paths)
        return

    if request.mode == "eval" and request.checkpoint == "latest":
        index_path = os.path.join(model_dir, "checkpoint")
        if not complete_checkpoints(model_dir) and not os.path.exists(index_path):
            raise UsageError(
                f"nothing to evaluate: {model_dir} holds no checkpoint; train first, or give"
                " another model_dir, or ask for initial, the weights as the task initializes them"
            )

    # The records of the evaluation go there.
    files.check_writable(model_dir)

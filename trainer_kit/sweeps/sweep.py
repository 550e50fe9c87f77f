"""Runs the trials of a sweep, several at a time. Imports no TensorFlow.

Optuna's storage records the trials. Only one process uses it, so a trial that is recorded as
running when a sweep starts was cut off with an earlier process.
"""

from __future__ import annotations

import itertools
import os
import warnings
from multiprocessing.connection import wait
from typing import Any

import optuna
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from trainer_kit import files
from trainer_kit.config.resume_check import compare_configs
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.sweeps.sweep_config import SweepConfig, format_override
from trainer_kit.sweeps.trial_runner import PRUNED, Evaluated, TrialRunner


class Sweep:
    """The trials of a sweep, each of which is a run of `python -m trainer_kit.train`.

    Args:
      folder: The folder of the sweep, which exists.
      flags: The flags of each run, the experiment first, without its model_dir and the values that
        are tried.
      config: What is tried.
      base_config: The config of the runs without the values that are tried.

    Attributes:
      study: Optuna's study with the trials. Those that are left wait in it.

    Raises:
      UsageError: when the folder contains another sweep.
    """

    def __init__(
        self, folder: str, flags: list[str], config: SweepConfig, base_config: ExperimentConfig
    ) -> None:
        self._folder = folder
        self._flags = flags
        self._config = config

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # It warns of each evaluation that a continued trial repeats, and ignores it.
        warnings.filterwarnings("ignore", module="optuna")
        path = os.path.join(folder, "study.db")
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        is_higher_better = base_config.trainer.best_checkpoint_metric_comp == "higher"
        study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction="maximize" if is_higher_better else "minimize",
            pruner=MedianPruner() if config.pruner == "median" else NopPruner(),
        )
        # With its first seed, a continued sweep would draw the same values again.
        study.sampler = TPESampler(seed=None if study.trials else 0)
        self.study = study

        # The trials have to be comparable.
        settings = {
            "experiment": flags[0],
            "sweep": config.as_dict(),
            "config": base_config.as_dict(),
        }
        recorded_settings = study.user_attrs.get("settings", settings)
        study.set_user_attr("settings", recorded_settings)
        changes = compare_configs(recorded_settings["sweep"], config)
        # A sweep may go on with more trials or another pruner.
        differences = [str(change) for change in changes if change.path.startswith("space.")]
        differences += map(str, compare_configs(recorded_settings["config"], base_config))
        experiment = recorded_settings["experiment"]
        if experiment != flags[0]:
            differences.append(f"it tries {experiment}")
        if differences:
            text = "; ".join(differences)
            raise UsageError(f"{folder} contains another sweep: {text}; give another --sweep_dir")

        # Trials that were cut off with an earlier process are the first to continue.
        study_id = storage.get_study_id_from_name(study.study_name)
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            storage.set_trial_state_values(trial_id, TrialState.WAITING)

        # Optuna draws the values of an empty point when its trial starts.
        points: list[dict[str, Any]] = [{}] * (config.trials - len(study.trials))
        if config.sampler == "grid":
            choices = [search_range.get_labels() for search_range in config.space.values()]
            combinations = itertools.product(*choices)
            points = [dict(zip(config.space, labels, strict=True)) for labels in combinations]
        for point in points:
            study.enqueue_trial(point, skip_if_exists=bool(point))

    def run(self, jobs: int) -> bool:
        """Runs the trials that are left. The others continue when a trial fails or is killed.

        Args:
          jobs: The number of trials at a time. The CPU cores are divided among them.

        Returns:
          Whether all trials have succeeded or were pruned.

        Raises:
          UsageError: when the folder of a new trial exists already.
        """
        # macOS has no affinities.
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        runners: list[TrialRunner] = []
        try:
            for job in range(jobs):
                log_path = os.path.join(self._folder, f"worker_{job}.log")
                # With more jobs than cores, the last ones use all of them.
                job_cores = cores[job::jobs] or cores
                runners.append(TrialRunner(log_path, job_cores))

            while True:
                running: dict[Any, TrialRunner] = {}
                for runner in runners:
                    if runner.trial is None:
                        self._start_next_trial(runner)
                    if runner.trial is not None:
                        running[runner.connection] = runner
                if not running:
                    break
                for connection in wait(running):
                    self._handle_message(running[connection])
        finally:
            for runner in runners:
                runner.terminate()
            for runner in runners:
                runner.stop()

        # A trial may have failed before this start of the sweep.
        failed_trials = self.study.get_trials(states=[TrialState.FAIL])
        for trial in failed_trials:
            error = trial.user_attrs["error"]
            print(f"trial {trial.number} has failed: {error}", flush=True)
        return not failed_trials and not self.study.get_trials(states=[TrialState.RUNNING])

    def _start_next_trial(self, runner: TrialRunner) -> None:
        """Starts the first trial that waits, or continues it in its folder."""
        if not self.study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
            return
        trial = self.study.ask()
        is_new = not trial.params
        model_dir = self._get_model_dir(trial.number)
        if is_new and os.path.exists(model_dir):
            raise UsageError(f"{model_dir} is not of this sweep; move it, or give another folder")

        overrides = []
        for path, search_range in self._config.space.items():
            value = search_range.suggest(trial, path)
            overrides.append(format_override(path, value))
        all_overrides = ",".join(overrides)
        flags = [*self._flags, f"--model_dir={model_dir}", f"--params_override={all_overrides}"]

        # A run continues with the thread counts that it was started with, and TensorFlow can set
        # them only once in a process.
        runner.start(trial, flags, shares_process=is_new)
        verb = "starts" if is_new else "continues"
        print(f"trial {trial.number} {verb}: {all_overrides}", flush=True)

    def _handle_message(self, runner: TrialRunner) -> None:
        """Records an evaluation or the end of a trial."""
        trial = runner.trial
        assert trial is not None
        number = trial.number
        message = runner.receive()
        if isinstance(message, Evaluated):
            trial.report(message.value, message.step)
            is_pruned = trial.should_prune()
            runner.send(is_pruned)
            return

        # The next start of the sweep continues a trial that was killed or stopped.
        was_stopped = message.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        if was_stopped or message.exit_code < 0:
            print(f"trial {number} was cut off: {message.error}", flush=True)
            return

        model_dir = self._get_model_dir(number)
        final_path = os.path.join(model_dir, "final.json")
        final = files.read_json(final_path) or {}
        error = message.error
        if not error and "best" not in final:
            error = "no evaluation has a finite value of the metric that decides"
        if error:
            # Before the state: a kill between the two would leave a failed trial without it.
            trial.set_user_attr("error", error)
            self.study.tell(trial, state=TrialState.FAIL)
            outcome = f"failed: {error}"
        elif final.get("stopped") == PRUNED:
            self.study.tell(trial, state=TrialState.PRUNED)
            outcome = f"was pruned at step {final['step']}"
        else:
            best = final["best"]
            metric = best["metric"]
            value = best["value"]
            self.study.tell(trial, value)
            outcome = f"finished: {metric} {value:.6g}"
        print(f"trial {number} {outcome}", flush=True)

    def _get_model_dir(self, number: int) -> str:
        return os.path.join(self._folder, f"trial_{number:04d}")

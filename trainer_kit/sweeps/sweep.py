"""Runs the trials of a sweep, several at a time, and records them in Optuna's storage.

Only one process uses the storage of a sweep. So each trial that is recorded as running when a sweep
starts was cut off with an earlier process. Imports no TensorFlow.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from multiprocessing.connection import wait

import optuna
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from trainer_kit import files
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.process.run_directory import read_thread_counts
from trainer_kit.sweeps.sweep_config import SweepConfig, format_override
from trainer_kit.sweeps.trial_runner import PRUNED, Evaluated, TrialRunner

# A trial whose process is stopped or killed so often has failed.
_MAX_ATTEMPTS = 3
_NAME = "sweep"
_DIRECTIONS = {"higher": StudyDirection.MAXIMIZE, "lower": StudyDirection.MINIMIZE}


class Sweep:
    """The trials of a sweep, each of which is a run of `python -m trainer_kit.train`.

    Args:
      folder: The folder of the sweep, which exists.
      flags: The flags of each run, without its model_dir and the values that are tried.
      config: What is tried.
      runs: The config of the runs without any of the values that are tried, then with each.

    Attributes:
      study: Optuna's study with the trials.

    Raises:
      UsageError: when the folder contains another sweep.
    """

    def __init__(
        self, folder: str, flags: list[str], config: SweepConfig, runs: list[ExperimentConfig]
    ) -> None:
        options = runs[0].trainer
        self._folder = folder
        self._flags = flags
        self._config = config
        self._attempts: Counter[int] = Counter()

        # TensorFlow can set most of the runtime section only once in a process.
        self._shares_processes = True
        first_runtime = runs[0].runtime
        for run in runs:
            runtime = run.runtime.replace(random_seed=first_runtime.random_seed)
            if runtime != first_runtime:
                self._shares_processes = False

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        folder_path = os.path.abspath(folder)
        path = os.path.join(folder_path, "study.db")
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            load_if_exists=True,
            direction=_DIRECTIONS[options.best_checkpoint_metric_comp],
        )

        # The trials have to be comparable.
        space = config.as_dict()["space"]
        listed_flags = " ".join(flags)
        command = f"{listed_flags} {space}"
        recorded_command = study.user_attrs.get("command", command)
        study.set_user_attr("command", recorded_command)
        if recorded_command != command:
            raise UsageError(
                f"{folder} contains another sweep, {recorded_command}; give another folder"
            )

        # With the seed of the first start, another one would draw the same values again.
        earlier_trials = study.trials
        seed = config.seed + len(earlier_trials)
        study.sampler = RandomSampler(seed)
        if config.sampler == "tpe":
            study.sampler = TPESampler(seed=seed)
        study.pruner = NopPruner()
        if config.pruner == "median":
            study.pruner = MedianPruner()
        elif config.pruner == "hyperband":
            # No evaluation comes earlier. An interval in epochs is not known in steps yet.
            interval = options.validation_interval
            first_step = interval if isinstance(interval, int) else 1
            study.pruner = HyperbandPruner(min_resource=first_step)

        # The trials of a grid wait in the study.
        self._trial_count = config.trials
        if config.sampler == "grid":
            ranges = config.space.values()
            choices = [values.get_labels() for values in ranges]
            points = itertools.product(*choices)
            for point in points:
                labels = dict(zip(config.space, point, strict=True))
                study.enqueue_trial(labels, skip_if_exists=True)
            self._trial_count = len(study.trials)

        self.study = study

        self._interrupted: list[int] = []
        for trial in earlier_trials:
            if trial.state == TrialState.RUNNING:
                self._interrupted.append(trial.number)

    def run(self, jobs: int) -> None:
        """Runs the trials that are left. A failed trial is recorded, and the others continue.

        Args:
          jobs: The number of trials at a time. The CPU cores are divided among them.
        """
        cores = sorted(os.sched_getaffinity(0))
        runners: list[TrialRunner] = []
        try:
            for job in range(jobs):
                log_path = os.path.join(self._folder, f"worker_{job}.log")
                # With more jobs than cores, the last ones use all of them.
                job_cores = cores[job::jobs] or cores
                runner = TrialRunner(log_path, job_cores)
                runners.append(runner)

            while True:
                for runner in runners:
                    if runner.trial is None:
                        self._start_next_trial(runner)
                running = [runner for runner in runners if runner.trial is not None]
                if not running:
                    return

                connections = [runner.connection for runner in running]
                ready_connections = wait(connections)
                for runner in running:
                    if runner.connection in ready_connections:
                        self._handle_message(runner)
        finally:
            for runner in runners:
                runner.stop()

    def _start_next_trial(self, runner: TrialRunner) -> None:
        """Starts a trial that an earlier start of the sweep has left, else a new one if any."""
        trials = self.study.trials
        has_waiting_trial = False
        for trial in trials:
            if trial.state == TrialState.WAITING:
                has_waiting_trial = True
        if self._interrupted:
            number = self._interrupted.pop(0)
            study_id = self._storage.get_study_id_from_name(_NAME)
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            next_trial = Trial(self.study, trial_id)
        elif has_waiting_trial or len(trials) < self._trial_count:
            next_trial = self.study.ask()
        else:
            return
        for path, values in self._config.space.items():
            values.suggest(next_trial, path)
        self._start(runner, next_trial)

    def _start(self, runner: TrialRunner, trial: Trial) -> None:
        """Starts a trial, or continues it in its folder."""
        self._attempts[trial.number] += 1
        model_dir = self._get_model_dir(trial)
        flags = [*self._flags, f"--model_dir={model_dir}"]
        values = []
        for path, value in trial.params.items():
            override = format_override(path, value)
            values.append(override)
            flags.append(f"--params_override={override}")
        listed_values = ", ".join(values)

        # A run continues with the thread counts that it was started with, and TensorFlow can set
        # them only once in a process.
        recorded_threads = read_thread_counts(model_dir)
        has_usual_threads = recorded_threads in (None, runner.threads)
        shares_process = has_usual_threads and self._shares_processes
        runner.start(trial, flags, shares_process)
        verb = "starts" if recorded_threads is None else "continues"
        print(f"trial {trial.number} {verb}: {listed_values}", flush=True)

    def _handle_message(self, runner: TrialRunner) -> None:
        """Records an evaluation or the end of a trial."""
        trial = runner.trial
        assert trial is not None
        number = trial.number
        message = runner.receive()
        if isinstance(message, Evaluated):
            # Optuna ignores an evaluation that a killed run repeats.
            trial.report(message.value, message.step)
            is_pruned = trial.should_prune()
            runner.send(is_pruned)
            return

        # The trial has ended.
        exit_code = message.exit_code
        was_killed = exit_code < 0
        was_stopped = exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        may_continue = self._attempts[number] < _MAX_ATTEMPTS
        if may_continue and (was_killed or was_stopped):
            self._start(runner, trial)
            return

        model_dir = self._get_model_dir(trial)
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
            step = final["step"]
            outcome = f"was pruned at step {step}"
        else:
            best = final["best"]
            metric = best["metric"]
            value = best["value"]
            self.study.tell(trial, value)
            outcome = f"finished: {metric} {value:.6g}"
        print(f"trial {number} {outcome}", flush=True)

    def _get_model_dir(self, trial: Trial) -> str:
        name = f"trial_{trial.number:04d}"
        return os.path.join(self._folder, name)

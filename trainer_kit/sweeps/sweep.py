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
from optuna.trial import Trial, TrialState

from trainer_kit import files
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.process.run_directory import read_thread_counts
from trainer_kit.sweeps.sweep_config import SweepConfig, format_override
from trainer_kit.sweeps.trial_runner import PRUNED, Evaluated, TrialRunner

# A trial whose process is stopped or killed so often has failed.
_MAX_ATTEMPTS = 3


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
        runtimes = [run.runtime.replace(random_seed=0) for run in runs]
        self._shares_processes = all(runtime == runtimes[0] for runtime in runtimes)

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = os.path.abspath(os.path.join(folder, "study.db"))
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        is_higher_better = options.best_checkpoint_metric_comp == "higher"
        direction = "maximize" if is_higher_better else "minimize"
        self.study = optuna.create_study(
            storage=self._storage, study_name="sweep", load_if_exists=True, direction=direction
        )

        # The trials have to be comparable.
        space = [f"{path}={values.as_dict()}" for path, values in config.space.items()]
        command = [*flags, *space]
        recorded = self.study.user_attrs.get("command", command)
        self.study.set_user_attr("command", recorded)
        if recorded != command:
            changes = ", ".join(sorted({*recorded} ^ {*command}))
            raise UsageError(f"{folder} contains another sweep ({changes}); give another folder")

        # With the seed of the first start, another one would draw the same values again.
        seed = config.seed + len(self.study.trials)
        self.study.sampler = RandomSampler(seed)
        if config.sampler == "tpe":
            self.study.sampler = TPESampler(seed=seed)
        self.study.pruner = NopPruner()
        if config.pruner == "median":
            self.study.pruner = MedianPruner()
        elif config.pruner == "hyperband":
            interval = options.validation_interval
            self.study.pruner = HyperbandPruner(interval if isinstance(interval, int) else 1)

        self._trial_count = config.trials
        if config.sampler == "grid":
            choices = [values.get_labels() for values in config.space.values()]
            for point in itertools.product(*choices):
                values = dict(zip(config.space, point, strict=True))
                self.study.enqueue_trial(values, skip_if_exists=True)
            self._trial_count = len(self.study.trials)
        self._interrupted = [
            trial.number for trial in self.study.trials if trial.state == TrialState.RUNNING
        ]

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
                runners.append(TrialRunner(log_path, cores[job::jobs] or cores))

            while True:
                for runner in runners:
                    trial = None if runner.trial else self._create_trial()
                    if trial is not None:
                        self._start(runner, trial)
                connections = [runner.connection for runner in runners if runner.trial]
                if not connections:
                    return
                ready = wait(connections)
                for runner in runners:
                    if runner.connection in ready:
                        self._handle_message(runner)
        finally:
            for runner in runners:
                runner.stop()

    def _create_trial(self) -> Trial | None:
        """Returns a trial with all of its values, or None if no more are to start."""
        started = [trial for trial in self.study.trials if trial.state != TrialState.WAITING]
        if self._interrupted:
            study_id = self._storage.get_study_id_from_name(self.study.study_name)
            number = self._interrupted.pop(0)
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
            trial = Trial(self.study, trial_id)
        elif len(started) < self._trial_count:
            trial = self.study.ask()
        else:
            return None
        for path, values in self._config.space.items():
            values.suggest(trial, path)
        return trial

    def _start(self, runner: TrialRunner, trial: Trial) -> None:
        """Starts a trial, or continues it in its folder."""
        model_dir = self._get_model_dir(trial)
        values = [format_override(path, value) for path, value in trial.params.items()]
        overrides = [f"--params_override={value}" for value in values]
        self._attempts[trial.number] += 1

        # A run continues with the thread counts that it was started with, and TensorFlow can set
        # them only once in a process.
        recorded_threads = read_thread_counts(model_dir)
        has_usual_threads = recorded_threads in (None, runner.threads)
        flags = [*self._flags, f"--model_dir={model_dir}", *overrides]
        runner.start(trial, flags, has_usual_threads and self._shares_processes)
        verb = "starts" if recorded_threads is None else "continues"
        print(f"trial {trial.number} {verb}: {', '.join(values)}", flush=True)

    def _handle_message(self, runner: TrialRunner) -> None:
        """Records an evaluation or the end of a trial."""
        trial = runner.trial
        assert trial is not None
        number = trial.number
        message = runner.receive()
        if isinstance(message, Evaluated):
            # A run that was killed may repeat an evaluation.
            if message.step not in self.study.trials[number].intermediate_values:
                trial.report(message.value, message.step)
            runner.send(trial.should_prune())
            return
        exit_code = message.exit_code
        was_cut_off = exit_code < 0 or exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        if was_cut_off and self._attempts[number] < _MAX_ATTEMPTS:
            self._start(runner, trial)
            return

        error = message.error
        final = files.read_json(os.path.join(self._get_model_dir(trial), "final.json")) or {}
        if not error and "best" not in final:
            error = "no evaluation has a finite value of the metric that decides"
        if error:
            # They come before the state: a kill between would leave a failed trial without them.
            trial.set_user_attr("error", error)
            trial.set_user_attr("exit_code", max(exit_code, ExitCode.BUG))
            self.study.tell(trial, state=TrialState.FAIL)
            print(f"trial {number} failed: {error}", flush=True)
        elif final.get("stopped") == PRUNED:
            self.study.tell(trial, state=TrialState.PRUNED)
            print(f"trial {number} was pruned at step {final['step']}", flush=True)
        else:
            best = final["best"]
            self.study.tell(trial, best["value"])
            print(f"trial {number} finished: {best['metric']} {best['value']:.6g}", flush=True)

    def _get_model_dir(self, trial: Trial) -> str:
        return os.path.join(self._folder, f"trial_{trial.number:04d}")

"""Runs the trials of a sweep in worker processes, several at a time. Imports no TensorFlow."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from optuna.trial import Trial

from trainer_kit import files
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.errors import ConfigError, ExitCode
from trainer_kit.process.run_directory import read_thread_counts
from trainer_kit.sweeps.sweep_study import SweepStudy
from trainer_kit.sweeps.worker_process import Ended, Evaluated, WorkerProcess, divide_cores

# A trial that ends its process so often has failed.
_MAX_DEATHS = 3


@dataclass
class Job:
    """One of the trials that run at a time.

    Attributes:
      number: The number of the job, from 0.
      cores: The CPU cores of its process.
      worker: Its process. None before its first trial, and after a process was killed.
      trial: The trial that runs. None if none does.
      is_pruned: Whether the trial was told to end.
    """

    number: int
    cores: Sequence[int]
    worker: WorkerProcess | None = None
    trial: Trial | None = None
    is_pruned: bool = False


class Sweep:
    """A sweep whose trials are runs of an experiment.

    Args:
      study: The trials.
      experiment: The name of the experiment.
      sources: The sources of its config. The values of a trial come last.
      import_modules: The modules that register the experiment.
      folder: The folder of the sweep.
      metric: The metric that decides.
      trials_per_process: The number of trials after which a process is replaced.
    """

    def __init__(
        self,
        study: SweepStudy,
        experiment: str,
        sources: ConfigSources,
        import_modules: Sequence[str],
        folder: str,
        metric: str,
        trials_per_process: int,
    ) -> None:
        self._study = study
        self._experiment = experiment
        self._sources = sources
        self._import_modules = import_modules
        self._folder = folder
        self._metric = metric
        self._trials_per_process = trials_per_process
        self._deaths: Counter[int] = Counter()

    def run(self, job_count: int) -> None:
        """Runs the trials that are left. A trial that fails is recorded, and the others go on."""
        jobs = [Job(number, cores) for number, cores in enumerate(divide_cores(job_count))]
        try:
            while True:
                for job in jobs:
                    while job.trial is None and (trial := self._study.start_trial()) is not None:
                        self._start(job, trial)

                workers = {
                    job.worker.connection: job
                    for job in jobs
                    if job.worker is not None and job.trial is not None
                }
                if not workers:
                    return
                for connection in wait(list(workers)):
                    self._handle_message(workers[connection])
        finally:
            for job in jobs:
                if job.worker is not None:
                    job.worker.stop()

    def get_model_dir(self, number: int) -> str:
        """Returns the folder of a trial's run."""
        return os.path.join(self._folder, f"trial_{number:04d}")

    def _start(self, job: Job, trial: Trial) -> None:
        """Sends a trial to the process of a job, or to a new one. Wrong values fail the trial."""
        model_dir = self.get_model_dir(trial.number)
        overrides = self._study.format_overrides(trial)
        all_overrides = (*self._sources.params_overrides, *overrides)
        sources = replace(self._sources, params_overrides=all_overrides)
        try:
            config = resolve_config(self._experiment, sources).config
        except ConfigError as error:
            line = " ".join(str(error).split())
            self._study.fail(trial, line, ExitCode.USAGE)
            return

        # TensorFlow can set most of the runtime section only once in a process. The threads are
        # those that the run was started with, so that its resume is exact.
        count = len(job.cores)
        threads = read_thread_counts(model_dir) or {"inter_op": count, "intra_op": count}
        runtime = config.runtime.replace(random_seed=0).as_dict()
        settings = {**runtime, **threads}

        worker = job.worker
        if worker is not None:
            is_used_up = worker.trial_count >= self._trials_per_process
            if is_used_up or worker.settings != settings:
                worker.stop()
                worker = None
        if worker is None:
            log_path = os.path.join(self._folder, f"worker_{job.number}.log")
            worker = WorkerProcess(log_path, job.cores, settings)

        flags = [
            f"--experiment={self._experiment}",
            "--mode=train_and_eval",
            f"--model_dir={model_dir}",
        ]
        for name, values in (
            ("import_module", self._import_modules),
            ("config_file", sources.config_files),
            ("gin_file", sources.gin_files),
            ("gin_params", sources.gin_params),
            ("params_override", sources.params_overrides),
        ):
            flags += [f"--{name}={value}" for value in values]
        worker.send_trial(flags, self._metric)
        job.worker = worker
        job.trial = trial
        job.is_pruned = False
        print(f"trial {trial.number}: {', '.join(overrides)}", flush=True)

    def _handle_message(self, job: Job) -> None:
        """Records an evaluation or the end of the trial of a job."""
        worker = job.worker
        trial = job.trial
        assert worker is not None and trial is not None
        message = worker.receive()
        if isinstance(message, Evaluated):
            job.is_pruned = self._study.report(trial, message.step, message.value)
            worker.answer(job.is_pruned)
            return

        # The trial has ended.
        number = trial.number
        job.trial = None
        if message is None or message.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            # Somebody has stopped or killed the process. The run continues in another one.
            job.worker = None
            exit_code = worker.stop()
            self._deaths[number] += 1
            if self._deaths[number] < _MAX_DEATHS:
                print(f"trial {number}: its process ended with code {exit_code}; starting it again")
                self._start(job, trial)
                return
            message = Ended(
                ExitCode.BUG, f"its process ended {_MAX_DEATHS} times, last with code {exit_code}"
            )

        final = files.read_json(os.path.join(self.get_model_dir(number), "final.json")) or {}
        best = final.get("best")
        if message.error:
            self._study.fail(trial, message.error, message.exit_code)
            print(f"trial {number} failed: {message.error}")
        elif job.is_pruned:
            self._study.prune(trial)
            print(f"trial {number} was pruned at step {final['step']}")
        elif best is None:
            self._study.fail(trial, f"no evaluation had a finite {self._metric}")
            print(f"trial {number} failed: no evaluation had a finite {self._metric}")
        else:
            self._study.complete(trial, best["value"])
            print(
                f"trial {number} finished: {self._metric} {best['value']:.6g} at step {best['step']}"
            )

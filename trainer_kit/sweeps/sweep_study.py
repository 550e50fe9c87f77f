"""The trials of a sweep, in Optuna's storage `study.db` in the folder of the sweep.

Only the process of the sweep reads and writes it, and only one sweep at a time. So each trial that
the storage shows as running was cut off with the process of an earlier start. Imports Optuna, and
no TensorFlow.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.sweeps.sweep_config import SearchRange, SweepConfig

_NAME = "sweep"
_COMMAND = "command"
ERROR = "error"
EXIT_CODE = "exit_code"


class SweepStudy:
    """The trials of a sweep.

    Args:
      folder: The folder of the sweep. It exists.
      config: What the sweep tries.
      comparison: Whether "higher" or "lower" values of the metric are better.
      command: What decides the results of the trials, which a later start may not change.
      first_report: The step of the first evaluation of a run, if that is known.

    Raises:
      UsageError: when the folder contains another sweep.
    """

    def __init__(
        self,
        folder: str,
        config: SweepConfig,
        comparison: str,
        command: Mapping[str, Any],
        first_report: int,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._config = config
        path = os.path.join(os.path.abspath(folder), "study.db")
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            load_if_exists=True,
            direction="maximize" if comparison == "higher" else "minimize",
            pruner=_create_pruner(config, first_report),
        )
        self._check_command(folder, command)

        # With the same seed, a later start would draw the same values as the first one.
        self._study.sampler = _create_sampler(config, config.seed + len(self._study.trials))
        if config.sampler == "grid":
            paths = list(config.space)
            for labels in itertools.product(*[values.labels for values in config.space.values()]):
                point = dict(zip(paths, labels, strict=True))
                self._study.enqueue_trial(point, skip_if_exists=True)
        self._interrupted = self._select_numbers(TrialState.RUNNING)

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials that have started, in the order of their numbers."""
        trials = self._study.trials
        return [trial for trial in trials if trial.state != TrialState.WAITING]

    @property
    def trial_count(self) -> int:
        """The number of trials that the sweep has when it is complete."""
        return len(self._study.trials) if self._config.sampler == "grid" else self._config.trials

    @property
    def best(self) -> FrozenTrial | None:
        """The best trial that was not pruned. None before one has finished."""
        completed = self._select_numbers(TrialState.COMPLETE)
        return self._study.best_trial if completed else None

    def start_trial(self) -> Trial | None:
        """Returns the next trial, with all values drawn. None if no more are to start.

        Trials that an earlier start has left come first.
        """
        if self._interrupted:
            trial = self._open_trial(self._interrupted.pop(0))
        elif len(self.trials) < self.trial_count:
            trial = self._study.ask()
        else:
            return None
        for path, values in self._config.space.items():
            _suggest(trial, path, values)
        return trial

    def format_overrides(self, trial: Trial) -> list[str]:
        """Returns the values of a trial as values of --params_override."""
        overrides = []
        for path, label in trial.params.items():
            values = self._config.space[path]
            value = values.choices[values.labels.index(label)] if values.choices else label
            overrides.append(f"{path}={json.dumps(value)}")
        return overrides

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Records an evaluation of a trial, and returns whether the trial should end.

        An evaluation that is repeated after a kill is recorded once.
        """
        recorded_values = self._study.trials[trial.number].intermediate_values
        if step not in recorded_values:
            trial.report(value, step)
        return trial.should_prune()

    def complete(self, trial: Trial, value: float) -> None:
        """Records that a trial has finished, and its best value."""
        self._study.tell(trial, value)

    def prune(self, trial: Trial) -> None:
        """Records that a trial was ended early. Its last evaluation is its value."""
        self._study.tell(trial, state=TrialState.PRUNED)

    def fail(self, trial: Trial, error: str, exit_code: int = ExitCode.BUG) -> None:
        """Records that a trial has failed, with a line that says why."""
        trial.set_user_attr(ERROR, error)
        trial.set_user_attr(EXIT_CODE, int(exit_code))
        self._study.tell(trial, state=TrialState.FAIL)

    def _open_trial(self, number: int) -> Trial:
        study_id = self._storage.get_study_id_from_name(_NAME)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return Trial(self._study, trial_id)

    def _select_numbers(self, state: TrialState) -> list[int]:
        return [trial.number for trial in self._study.trials if trial.state == state]

    def _check_command(self, folder: str, command: Mapping[str, Any]) -> None:
        recorded = self._study.user_attrs.get(_COMMAND)
        if recorded is None:
            self._study.set_user_attr(_COMMAND, dict(command))
            return
        for name, value in command.items():
            if recorded.get(name) != value:
                raise UsageError(
                    f"--sweep_dir: {folder} contains a sweep with {name}={recorded.get(name)!r},"
                    f" not {value!r}; give the same command, or another folder"
                )


def _create_sampler(config: SweepConfig, seed: int) -> BaseSampler:
    # The values of a grid are in the queue of the study already.
    if config.sampler == "tpe":
        return TPESampler(seed=seed)
    return RandomSampler(seed=seed)


def _create_pruner(config: SweepConfig, first_report: int) -> BasePruner:
    if config.pruner == "median":
        return MedianPruner()
    if config.pruner == "hyperband":
        return HyperbandPruner(min_resource=first_report)
    return NopPruner()


def _suggest(trial: Trial, path: str, values: SearchRange) -> None:
    """Draws the value of a path, unless the trial has it already."""
    low = values.low
    high = values.high
    if low is None or high is None:
        trial.suggest_categorical(path, values.labels)
    elif isinstance(low, int) and isinstance(high, int):
        trial.suggest_int(path, low, high, step=int(values.step or 1), log=values.log)
    else:
        trial.suggest_float(path, low, high, step=values.step, log=values.log)

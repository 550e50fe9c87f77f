"""trainer.fuse_steps=auto: which form of the training loop is faster here, timed before the first step.

Both forms run on the state and on the first batch of the run; the state is then put back as it was, to the bit, and the
data is opened anew.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.base import FieldError
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.executor import executor
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.inputs.records import damage_in
from trainer_kit.inputs.stacking import bytes_of, problem_of_stacking, stacked
from trainer_kit.process.run_directory import RunDirectory, kept_fuse_steps
from trainer_kit.training.loops.fused_loop import UnfusableError, refusal_of_xla

_LOG = logging.getLogger(__name__)
LARGEST = 100  # steps in a program: more gain nothing, and a stop waits for them
_STACK_BYTES = 128 * 2**20
_ROUNDS = 5
_SECONDS = 0.1  # of a timing
_GAIN = 1.05  # a smaller one may be noise


@dataclass(frozen=True)
class Choice:
    """How many steps are one program, and why.

    Attributes:
      fuse_steps: 1: each step is run by itself.
      reason: for the log.
    """

    fuse_steps: int
    reason: str


def choose_fuse_steps(trainer: Any, summaries: tf.summary.SummaryWriter | None = None) -> Choice | None:
    """Times both forms of the loop, and leaves the trainer as it was. Eager, on the host, after a restore.

    Args:
      trainer: the run's.
      summaries: what the steps write their summaries to in the run. None are written here.

    Returns:
      What is faster; None when a stop was asked for meanwhile, or no batch can be read: the run will tell why.
    """
    if problem := trainer.problem_of_fusing():
        return Choice(1, problem)
    if trainer.data.feed.given is not None:
        return Choice(1, "a ready-made dataset would be begun twice")
    trainer.fuse(1)
    if not trainer.data.is_made_anew():
        return Choice(1, "build_inputs returns the same dataset each time, which would be begun twice")
    dataset = trainer.train_dataset
    if not isinstance(dataset, tf.data.Dataset):
        return Choice(1, f"a batch cannot be taken of a {type(dataset).__name__}")
    if problem := problem_of_stacking(dataset.element_spec):
        return Choice(1, problem)
    size = largest_stack(trainer.config.trainer.steps_per_loop, bytes_of(dataset.element_spec))
    if size < 2:
        return Choice(1, "no two steps fit into a program: steps_per_loop is a prime number, or batches are large")
    writing = summaries.as_default() if summaries is not None else contextlib.nullcontext()
    try:
        with writing, tf.summary.record_if(lambda: trainer.global_step < 0), executor(trainer.config.runtime):
            return _timed(trainer, dataset.take(1).cache().repeat(), size)
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.OutOfRangeError) or damage_in(error):
            return None
        raise
    finally:
        trainer.fuse(1)


def largest_stack(steps_per_loop: int, batch_bytes: int) -> int:
    """Returns how many steps are tried as one program: a divisor of those in a loop, so that none is cut."""
    most = min(LARGEST, steps_per_loop, max(1, _STACK_BYTES // max(1, batch_bytes)))
    return max(size for size in range(1, most + 1) if steps_per_loop % size == 0)


def _timed(trainer: Any, batches: tf.data.Dataset, size: int) -> Choice | None:
    begin = time.perf_counter()
    plain, fused = (_Form(trainer.loop_of(1), batches), _Form(trainer.loop_of(size), stacked(batches, size)))
    try:
        graphs = [plain.trace(), fused.trace()]
    except UnfusableError as error:
        trainer.forget_train_loop()  # the summaries of the loop that was traced are never written
        return Choice(1, error.reason)
    with _state_kept(trainer, graphs):
        try:
            fused.run(1)
        except tf.errors.ResourceExhaustedError:
            return Choice(1, f"{size} steps in one program of XLA take more memory than there is")
        except tf.errors.OpError as error:
            if (reason := refusal_of_xla(error)) is None:
                raise
            return Choice(1, f"XLA cannot compile the training step: {reason}")
        for form in (plain, plain, fused):  # the first run of each compiles it
            form.run(1)
        longest = trainer.config.trainer.steps_per_loop
        ratios = [_ratio(plain, fused, longest) for _ in range(_ROUNDS) if not trainer.stop_requested]
    if trainer.stop_requested:
        return None
    gain = statistics.median(ratios)
    timed = (
        f"{size} steps in one program of XLA run at {gain:.2f} times the rate of separate steps, the wait for data "
        f"apart; timed in {time.perf_counter() - begin:.1f} s"
    )
    return Choice(size if gain >= _GAIN else 1, timed)


@contextlib.contextmanager
def _state_kept(trainer: Any, graphs: Sequence[tf.Graph]) -> Iterator[None]:
    """Puts every variable back that a checkpoint holds, that a metric has, or that a graph uses."""
    saved = [item for item in tf.train.TrackableView(trainer.checkpoint).descendants() if isinstance(item, tf.Variable)]
    used = [variable for graph in graphs for variable in graph.variables]
    metrics = [v.value if isinstance(v, keras.Variable) else v for v in trainer.metric_variables()]
    before = [(one, one.read_value()) for one in {id(one): one for one in [*saved, *metrics, *used]}.values()]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


class _Form:
    """One form of the loop on its own iterator."""

    def __init__(self, loop: Any, dataset: tf.data.Dataset) -> None:
        self._loop = loop
        self._feed = DatasetIterator("train_data", lambda: dataset)  # which deletes iterators without a wait
        self._iterator = self._feed.iterator()
        self.seconds = 0.0  # of a step, at the last run

    def trace(self) -> tf.Graph:
        return self._loop.graph(self._iterator)

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        self._loop(self._iterator, tf.constant(steps, tf.int32))
        self.seconds = (time.perf_counter() - begin) / steps
        return self.seconds


def _ratio(plain: _Form, fused: _Form, longest: int) -> float:
    """How many times as fast the fused form is; each runs one loop, of about a tenth of a second or one step."""
    seconds = [form.run(max(1, min(longest, int(_SECONDS / max(form.seconds, 1e-6))))) for form in (plain, fused)]
    return seconds[0] / seconds[1]


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


def choose_loop_form(trainer: Any, config: ExperimentConfig, directory: RunDirectory, summaries: Any) -> int | None:
    """With fuse_steps=auto chooses the form of the training loop; a run keeps what it chose.

    Args:
      trainer: of the run, restored.
      config: of the run.
      directory: of the run.
      summaries: the manager of its training summaries.

    Returns:
      How many steps are one program, if that was to be chosen; None if not, or if a stop came first.
    """
    if config.trainer.fuse_steps != "auto" or not trainer.trains:
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

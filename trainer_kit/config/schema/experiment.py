"""The typed, frozen config classes: ExperimentConfig(task, trainer, runtime) and DataConfig.

Field names and defaults are those of TF Model Garden 2.20, so that its YAML files can be read. The exceptions, with
their reasons, are in MODEL_GARDEN_EXCEPTIONS below and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny

from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.evaluation import (
    BestCheckpointConfig,
    ContinuousEvalConfig,
    Count,
    EarlyStoppingConfig,
    PositiveInt,
    StepsOrAll,
    ValidationSetConfig,
    folder_name_problem,
    validation_sets,
)
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import suggestion

MODEL_GARDEN_EXCEPTIONS: dict[str, str] = {
    "RuntimeConfig.distribution_strategy": "'auto': mirroring over a single device costs up to 3 times",
    "TrainerConfig.best_checkpoint_export_subdir": "'best_ckpt': naming the metric is enough to keep the best",
    "TaskConfig.validation_data": "drop_remainder is False: validation keeps its last batch",
    "OptimizerConfig": "types we do not build (lars, slide, *_experimental, adafactor_keras) are refused by name",
    "TaskConfig.differential_privacy_config": "deprecated there; refused here rather than ignored",
}

ONE_REPLICA = "XLA cannot update variables that are mirrored"
BEST_CHECKPOINTS = "best_checkpoints"  # the folder of those with names
RUN_NAMES = (
    "train", "evals", "workers", "checkpoint", "damaged", "archived", "diverged", BEST_CHECKPOINTS, "params.yaml",
    "manifest.json", "metrics.jsonl", "metrics.superseded.jsonl", "final.json", "heartbeat.json",
    "trainer.lock", "attempts.jsonl",
)  # fmt: skip


@configclass
class DataConfig(Config):
    """What a dataset is made of. All of it reaches `Task.build_inputs`; the readers in `inputs/` use what fits them.

    Attributes:
      input_path: a path or glob, several separated by commas, a list of those, or a dict of those by name.
      tfds_name, tfds_split, tfds_data_dir, tfds_as_supervised, tfds_skip_decoding_feature: for TensorFlow Datasets.
      global_batch_size: examples in a batch, over all replicas.
      is_training: whether to shuffle and repeat.
      drop_remainder: whether a last batch that is not full is left out.
      shuffle_buffer_size: examples; for readers that shuffle by buffer.
      cache: keep decoded examples in memory.
      cycle_length, block_length: how many files are read at once, and how many examples in a row from each.
      ram_budget: gigabytes, for the tf.data service.
      deterministic: whether the order is the same in each run (None: tf.data's default).
      sharding: whether each worker reads its own part.
      enable_tf_data_service, tf_data_service_address, tf_data_service_job_name,
      enable_shared_tf_data_service_between_parallel_trainers, apply_tf_data_service_before_batching, trainer_id:
        for the tf.data service.
      seed: of the order and of random preprocessing.
      prefetch_buffer_size: batches; None leaves it to tf.data.
      autotune_algorithm: name in tf.data.experimental.AutotuneAlgorithm.
    """

    input_path: str | tuple[str, ...] | dict[str, str | tuple[str, ...]] = ""
    tfds_name: str | dict[str, str] = ""
    tfds_split: str = ""
    global_batch_size: Count = 0
    is_training: bool | None = None
    drop_remainder: bool = True
    shuffle_buffer_size: Count = 100
    cache: bool = False
    cycle_length: PositiveInt | None = None
    block_length: PositiveInt = 1
    ram_budget: int | None = None
    deterministic: bool | None = None
    sharding: bool = True
    enable_tf_data_service: bool = False
    tf_data_service_address: str | None = None
    tf_data_service_job_name: str | None = None
    tfds_data_dir: str = ""
    tfds_as_supervised: bool = False
    tfds_skip_decoding_feature: str = ""
    enable_shared_tf_data_service_between_parallel_trainers: bool = False
    apply_tf_data_service_before_batching: bool = False
    trainer_id: str | None = None
    seed: int | None = None
    prefetch_buffer_size: Count | None = None
    autotune_algorithm: str | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """At most one source of data."""
        if self.input_path and self.tfds_name:
            yield "tfds_name", "cannot be set together with input_path; choose one source of data"


@configclass
class TaskConfig(Config):
    """What a task is configured by. Inherit from it, and decorate the subclass with `@trainer_kit.configclass`.

    Attributes:
      init_checkpoint: a checkpoint, or a folder of them, to start from when model_dir has none; in mode
        continuous_train_and_eval the folder of the run whose checkpoints are fine-tuned, each by a run of its own.
      model: the model's own section; subclasses give it a type.
      train_data: what is trained on.
      validation_data: what is evaluated on: one dataset, or several as a dict by name, with names that can be folders.
      name: of the task; default: the name of its class.
      differential_privacy_config: not supported; has to be None.
      allow_image_summary: whether tasks that can show images in TensorBoard do so.
    """

    one_or_several = ("validation_data",)

    init_checkpoint: str = ""
    model: SerializeAsAny[Config] | None = None
    train_data: DataConfig = DataConfig()
    validation_data: DataConfig = DataConfig(drop_remainder=False)
    name: str | None = None
    differential_privacy_config: None = None
    allow_image_summary: bool = False


@configclass
class CallbackConfig(Config):
    """A callback of a run, by name.

    Attributes:
      name: that it is registered by with @trainer_kit.register_callback, or "module:Class".
      args: the arguments of its class.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)


@configclass
class TrainerConfig(Config):
    """How long to train, and how often to report, save and evaluate. All intervals are in steps.

    Attributes:
      optimizer_config: optimizer, learning rate, warm-up and moving average.
      train_tf_function, train_tf_while_loop: run the training loop as a tf.function, with its loop inside.
      eval_tf_function, eval_tf_while_loop: the same for evaluation. An evaluation that aggregates no logs is one graph
        in any case. One that does goes step by step, with aggregate_logs in Python, unless eval_tf_while_loop asks for
        one graph: for an aggregate_logs of TensorFlow operations, whose state is nested tensors of any shape. Where it
        needs Python (numpy, strings, lists that grow), a warning says so and the evaluation goes step by step.
      eval_recreate_iterator: start each evaluation at the first example; else go on where the last one stopped.
      allow_tpu_summary: summaries from inside a TPU program; not supported, has to be False.
      steps_per_loop: steps between two looks of Python at the run.
      fuse_steps: so many steps, at most those of a loop, are one program of XLA, which is several times as fast for
        small dense models and slower for convolutions on a CPU; 1: none is; `trainer-kit doctor fuse` measures what is
        faster. For one replica. The numbers are those of separate steps to the last digits of float32; dropout draws
        other masks. A stop waits for the end of a program.
      summary_interval: steps between summaries that the task itself writes.
      checkpoint_interval: steps between checkpoints.
      max_to_keep: how many of the newest checkpoints stay.
      continuous_eval: which checkpoints continuous_eval takes, and how long they are kept for it.
      continuous_eval_timeout: seconds that continuous_eval waits for a checkpoint when nothing tells that the training
        run is alive; None: for ever.
      train_steps: the global step to train up to; -1: until the data is exhausted.
      validation_steps: batches in an evaluation; -1: all.
      validation_interval: steps between evaluations in train_and_eval.
      validation_sets: by name, what is different for one of several validation sets.
      best_checkpoint_export_subdir: folder, inside model_dir, of the best checkpoint; may be empty if none is kept.
      best_checkpoint_eval_metric: the metric that decides what is best; empty: no best is kept.
      best_checkpoint_metric_comp: whether a higher or a lower value is better.
      early_stopping: when the run ends before train_steps; None: it does not.
      best_checkpoints: further bests by name, each in a folder of its own.
      callbacks: what is called around training steps, in this order; each has a name and args.
      loss_upper_bound, recovery_begin_steps: a run has diverged when a weight or the loss is not finite, or the loss is
        above the bound after so many steps.
      recovery_max_trials: how often a run that has diverged goes back to its last sound checkpoint; 0: it ends;
        -1: nothing is looked at.
      recovery_policy: what is different after going back: skip, without the batch that made it diverge;
        lower_learning_rate, at recovery_learning_rate_factor times the rate; retry, nothing (for faulty machines).
      validation_summary_subdir: folder, inside model_dir, of the validation summaries.
      preemption_on_demand_checkpoint: save when SIGTERM or Ctrl-C stops the run.
      preemption_grace_seconds: how long after SIGTERM the process may last; it saves and ends within them.
      hang_timeout_seconds: seconds without any progress after which the process ends, so that it can be started
        again; None: never.
      require_exact_resume: refuse to train when a resumed run would not be the same as one that was never stopped.
    """

    optimizer_config: OptimizationConfig = OptimizationConfig()
    train_tf_while_loop: bool = True
    train_tf_function: bool = True
    eval_tf_function: bool = True
    eval_tf_while_loop: bool = False
    eval_recreate_iterator: bool = True
    allow_tpu_summary: Literal[False] = False
    steps_per_loop: PositiveInt = 1000
    fuse_steps: PositiveInt = 1
    summary_interval: PositiveInt = 1000
    checkpoint_interval: PositiveInt = 1000
    max_to_keep: PositiveInt = 5
    continuous_eval: ContinuousEvalConfig = ContinuousEvalConfig()
    continuous_eval_timeout: Annotated[float, Field(ge=0)] | None = 60 * 60
    train_steps: StepsOrAll = 0
    validation_steps: StepsOrAll = -1
    validation_interval: PositiveInt = 1000
    validation_sets: dict[str, ValidationSetConfig] = Field(default_factory=dict)
    best_checkpoint_export_subdir: str = "best_ckpt"
    best_checkpoint_eval_metric: str = ""
    best_checkpoint_metric_comp: Literal["higher", "lower"] = "higher"
    early_stopping: EarlyStoppingConfig | None = None
    best_checkpoints: dict[str, BestCheckpointConfig] = Field(default_factory=dict)
    callbacks: tuple[CallbackConfig, ...] = ()
    loss_upper_bound: float = 1e6
    recovery_begin_steps: Count = 0
    recovery_max_trials: StepsOrAll = 0
    recovery_policy: Literal["skip", "lower_learning_rate", "retry"] = "skip"
    recovery_learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    validation_summary_subdir: str = "validation"
    preemption_on_demand_checkpoint: bool = True
    preemption_grace_seconds: Annotated[float, Field(ge=1)] = 25
    hang_timeout_seconds: Annotated[float, Field(gt=0)] | None = 60 * 60
    require_exact_resume: bool = False

    def rules(self) -> Iterator[tuple[str, str]]:
        """Rules between intervals and switches."""
        if self.summary_interval % self.steps_per_loop:
            yield (
                "summary_interval",
                f"{self.summary_interval} is not a multiple of steps_per_loop ({self.steps_per_loop}); "
                "summaries are written at the end of a loop",
            )
        if self.validation_steps == 0:
            yield "validation_steps", "0 evaluates nothing; use -1 for all of the data or a number above 0"
        if self.train_tf_while_loop and not self.train_tf_function:
            yield "train_tf_while_loop", "needs train_tf_function; set both to false, or neither"
        if self.fuse_steps > 1 and not self.train_tf_while_loop:
            yield "fuse_steps", "needs train_tf_while_loop; set it to true, or fuse_steps to 1"
        if self.eval_tf_while_loop and not self.eval_tf_function:
            yield "eval_tf_while_loop", "needs eval_tf_function; set eval_tf_while_loop to false"
        if not self.eval_recreate_iterator and self.validation_steps == -1:
            yield (
                "eval_recreate_iterator",
                "false leaves nothing for a second evaluation when the first has used all data (validation_steps=-1); "
                "set validation_steps to a number of batches, or eval_recreate_iterator to true",
            )
        yield from self._early_stopping_rules()
        yield from self._folder_rules()

    def _early_stopping_rules(self) -> Iterator[tuple[str, str]]:
        """Early stopping has a metric, and depends on no clock where a resume has to be exact."""
        early = self.early_stopping
        if early is not None and not early.metric:
            yield "early_stopping.metric", "is needed to tell an improvement; name a metric of the evaluations"
        if self.require_exact_resume and early is not None and early.eval_name:
            yield (
                "early_stopping.eval_name",
                "makes the last step a matter of the clock, which require_exact_resume=true forbids; leave it empty",
            )

    def _folder_rules(self) -> Iterator[tuple[str, str]]:
        """The folders that the config names lie in model_dir, apart from each other and from everything else."""
        best, summaries = self.best_checkpoint_export_subdir, self.validation_summary_subdir
        if problem := folder_name_problem(summaries, RUN_NAMES):
            yield "validation_summary_subdir", problem
        if best and (problem := folder_name_problem(best, RUN_NAMES)):
            yield "best_checkpoint_export_subdir", problem
        if best and best == summaries:
            yield (
                "best_checkpoint_export_subdir",
                f"{best!r} is validation_summary_subdir too; give each its own folder",
            )
        if self.best_checkpoint_eval_metric and not best:
            yield "best_checkpoint_export_subdir", "is needed to keep the best; name a folder, such as best_ckpt"
        for name in self.best_checkpoints:
            if problem := folder_name_problem(name, ()):
                yield "best_checkpoints", problem


@configclass
class ExperimentConfig(Config):
    """All of an experiment: what is learned (task), for how long (trainer), on what (runtime)."""

    task: SerializeAsAny[TaskConfig] = TaskConfig()
    trainer: TrainerConfig = TrainerConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Validation sets by name, fused steps, and batches to train on that virtual CPUs share equally.

        Other strategies know their replicas on the machine only.
        """
        yield from self._set_rules()
        runtime = self.runtime
        if runtime.run_eagerly and self.trainer.fuse_steps > 1:
            yield (
                "trainer.fuse_steps",
                f"{self.trainer.fuse_steps} fuses steps of a graph; set runtime.run_eagerly=false",
            )
        if runtime.virtual_cpus < 2 or runtime.tpu or runtime.distribution_strategy not in ("auto", "mirrored"):
            return
        replicas = runtime.virtual_cpus
        if self.trainer.fuse_steps > 1:
            yield (
                "trainer.fuse_steps",
                f"{self.trainer.fuse_steps} needs one replica; {ONE_REPLICA}: set fuse_steps=1, or train on one device",
            )
        for path, batch in self.equal_batches():
            if batch % replicas:
                below = batch - batch % replicas
                nearest = [str(size) for size in (below, below + replicas) if size]
                yield (
                    path,
                    f"batch {batch} on {replicas} replicas (runtime.virtual_cpus) leaves {batch % replicas} over; "
                    f"the nearest that can be shared equally: {' or '.join(nearest)}",
                )

    def _set_rules(self) -> Iterator[tuple[str, str]]:
        """Several validation sets are named like folders, and what is said of one is said of one that there is."""
        sets = validation_sets(self.task)
        several = isinstance(getattr(self.task, "validation_data", None), Mapping)
        if several and not sets:
            yield "task.validation_data", "holds no validation set; name one, or give the fields of a single one"
        for name in sets if several else ():
            if "." in name or "|" in name or folder_name_problem(name, ()):
                yield "task.validation_data", f"{name!r} cannot name a validation set; use letters, digits, _ and -"
        chosen = [("trainer.validation_sets", name) for name in self.trainer.validation_sets]
        chosen += [
            ("trainer.continuous_eval.validation_sets", name) for name in self.trainer.continuous_eval.validation_sets
        ]
        for path, name in chosen:
            if not several:
                yield path, f"names {name!r}, and task.validation_data is a single set; remove it"
            elif name not in sets:
                yield path, f"there is no validation set {name!r}; {suggestion(name, list(sets))}"

    def equal_batches(self) -> Iterator[tuple[str, int]]:
        """Yields path and size of the global batches that replicas have to share equally: those to train on.

        In an evaluation each example counts for itself, so that one replica may get more of them than another.
        """
        found = {"task.train_data": (getattr(self.task, "train_data", None), True)}
        for name, data in validation_sets(self.task).items():
            path = f"task.validation_data.{name}".rstrip(".")
            found[path] = (data, bool(getattr(data, "is_training", False)))
        for path, (data, equal) in found.items():
            batch = getattr(data, "global_batch_size", 0)
            if batch and equal:
                yield f"{path}.global_batch_size", batch

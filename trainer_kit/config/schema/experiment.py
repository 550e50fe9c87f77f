"""The config classes of an experiment: ExperimentConfig(task, trainer, runtime) and DataConfig.

Config classes are typed and frozen. Field names and defaults are those of TF Model Garden 2.20, so
that its YAML files can be read. The exceptions, with their reasons, are listed in
tests/unit/config/schema/test_experiment.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from trainer_kit.config.registry import Registry
from trainer_kit.config.run_files import RESERVED_NAMES
from trainer_kit.config.schema import durations
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.evaluation import (
    BestCheckpointConfig,
    ContinuousEvalConfig,
    EarlyStoppingConfig,
    ValidationSetConfig,
    describe_folder_name_problem,
    get_training_sets,
    get_validation_sets,
)
from trainer_kit.config.schema.gradient_processor_configs import describe_xla_problem
from trainer_kit.config.schema.initial_weights import InitCheckpoint
from trainer_kit.config.schema.metric_configs import MetricConfig, SummaryConfig
from trainer_kit.config.schema.number_types import (
    IntFromMinusOne,
    NonNegativeInt,
    PositiveInt,
    describe_uneven_batch,
    find_broken_patterns,
)
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig
from trainer_kit.config.schema.optimization import (
    EMAConfig,
    NamedOptimizerConfig,
    OptimizationConfig,
)
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import suggest_names

XLA_REPLICA_LIMIT = "XLA cannot update variables that are mirrored"


@configclass
class DatasetConfig(OpenOneOfConfig):
    """Which registered dataset. `trainer_kit.register_dataset` adds one.

    Attributes:
      type: The name of a registered dataset; unset means that the task's build_inputs makes the
        data.
    """

    registry: ClassVar[Registry[Branch]] = Registry("dataset")

    type: str | None = None


@configclass
class DataConfig(Config):
    """Describes a dataset.

    `Task.build_inputs` receives every field. The readers in `inputs/` use those that apply.

    Attributes:
      input_path: The files to read: a path or a glob, several of them separated by commas, a list
        of them, or a mapping of those by name.
      tfds_name: The name of a dataset of TensorFlow Datasets, for tasks that read one.
      tfds_split: The split of the dataset of TensorFlow Datasets, such as train[:90%].
      global_batch_size: The number of examples in a batch, summed over all replicas.
      is_training: Whether the data is shuffled and repeated without end, as training needs it.
      drop_remainder: Whether a last batch with fewer examples than global_batch_size is left out.
      shuffle_buffer_size: The number of examples in a shuffle buffer, for readers that use one;
        ArraySource and TFRecordSource shuffle the whole data without it.
      cache: Whether decoded examples are kept in memory, for readers that can do so.
      cycle_length: How many files are read at once, for readers that interleave files.
      block_length: How many records in a row are read from one file; TFRecordSource keeps that
        many together in its shuffled order.
      ram_budget: The memory in gigabytes that the input pipeline may use, for readers that hand it
        to tf.data.
      deterministic: Whether batches come in the same order in each run; unset leaves it to tf.data,
        whose default is true.
      sharding: Whether each worker reads only its own part of the files, for readers that split the
        files.
      data_is_sharded: Whether each of several workers has its own part of the data already, such as
        other files, so that build_inputs need not read the input_pipeline_id of its input context.
      enable_tf_data_service: Whether batches come from a tf.data service, for tasks that read with
        one.
      tf_data_service_address: The address of the tf.data service; the flag --tf_data_service sets
        it.
      tf_data_service_job_name: The name of the job in the tf.data service, by which several
        trainers share one stream of batches.
      tfds_data_dir: The folder of the files of TensorFlow Datasets; empty means its default.
      tfds_as_supervised: Whether TensorFlow Datasets returns pairs of features and label.
      tfds_skip_decoding_feature: Names of features, separated by commas, that TensorFlow Datasets
        does not decode.
      enable_shared_tf_data_service_between_parallel_trainers: Whether trainers that run at the same
        time share the batches of one tf.data service.
      apply_tf_data_service_before_batching: Whether the tf.data service hands out single examples,
        which are batched by the trainer.
      trainer_id: The name of this trainer among those that share a tf.data service.
      seed: The seed of the order of examples and of random preprocessing; unset means 0 for
        ArraySource and TFRecordSource.
      prefetch_buffer_size: How many batches are made ahead; unset leaves the number to tf.data.
      autotune_algorithm: The tuner of tf.data, a name in tf.data.experimental.AutotuneAlgorithm;
        unset turns it off in ArraySource and TFRecordSource.
      dataset: A registered dataset that makes the data in place of the task's build_inputs.
    """

    input_path: str | tuple[str, ...] | dict[str, str | tuple[str, ...]] = ""
    tfds_name: str | dict[str, str] = ""
    tfds_split: str = ""
    global_batch_size: NonNegativeInt = 0
    is_training: bool | None = None
    drop_remainder: bool = True
    shuffle_buffer_size: NonNegativeInt = 100
    cache: bool = False
    cycle_length: PositiveInt | None = None
    block_length: PositiveInt = 1
    ram_budget: int | None = None
    deterministic: bool | None = None
    sharding: bool = True
    data_is_sharded: bool = False
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
    prefetch_buffer_size: NonNegativeInt | None = None
    autotune_algorithm: str | None = None
    dataset: DatasetConfig = DatasetConfig()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that at most one source of data is set."""
        if self.input_path and self.tfds_name:
            yield "tfds_name", "cannot be set together with input_path; choose one source of data"


@configclass
class TaskConfig(Config):
    """The settings of a task.

    Inherit from it, and decorate the subclass with `@trainer_kit.configclass`.

    Attributes:
      init_checkpoint: The path of a checkpoint, or of a folder of checkpoints, whose weights a new
        run starts from; or a list of sections, each with a path and a choice of variables. In mode
        continuous_train_and_eval it is the folder of the run whose checkpoints are fine-tuned, each
        by a run of its own.
      model: The section of the model; a task's own config class gives it a type.
      train_data: The data to train on.
      validation_data: The data to evaluate on: one dataset, or several as a mapping by name. A name
        has to be one that a folder can have.
      name: The name of the task; unset means the name of its class.
      differential_privacy_config: Differential privacy is not supported, so this has to be unset.
      allow_image_summary: Whether tasks that can show images in TensorBoard do so.
    """

    # The fields that take one section, or several as a mapping by name.
    one_or_several = ("validation_data",)
    # Where an experiment has this section, for messages about a section that is built alone.
    path_in_experiment = "task"

    init_checkpoint: InitCheckpoint = ""
    model: SerializeAsAny[Config] | None = None
    train_data: DataConfig = DataConfig()
    validation_data: DataConfig = DataConfig(drop_remainder=False)
    name: str | None = None
    differential_privacy_config: None = None
    allow_image_summary: bool = False

    def rules_with_trainer(self, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
        """Checks this section and the section trainer together.

        Args:
          trainer: The section trainer of the same experiment.

        Yields:
          The dotted path of a field in the experiment, and its problem. There are none by default.
        """
        del trainer
        yield from ()


@configclass
class CallbackConfig(Config):
    """A callback of a run, by name.

    Attributes:
      name: The name that the callback is registered by with @trainer_kit.register_callback, or
        "module:Class".
      args: The arguments that the callback's class is called with.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)


@configclass
class TrainerConfig(Config):
    """How long to train, and how often to report, save and evaluate.

    A plain number counts steps. Fields whose type is a duration also take "3 epochs", passes over
    the training data, "20 %", a share of the run, or "30 min", a time. The type names which.

    Attributes:
      optimizer_config: The optimizer, the learning rate, the warm-up and the moving average of the
        weights.
      optimizers: Several optimizers by name, each for variables of its own, in place of the
        optimizer in optimizer_config. A name has no slash or dot.
      freeze: Regular expressions of the variables that training leaves as they are. Each is
        searched in the path of a variable. They get no gradient, no slots of an optimizer and no
        average; a layer of batch normalization all of whose variables match uses its moving
        averages.
      trainer_class: The subclass of trainer_kit.Trainer that trains, as module:Class; empty means
        the class that the task is registered with, or Trainer itself.
      train_tf_while_loop: Whether the steps of a training loop are a loop in the graph; false calls
        each step from Python.
      train_tf_function: Whether training steps run as a tf.function; false runs them eagerly.
      eval_tf_function: Whether evaluation steps run as a tf.function; false runs them eagerly.
      eval_tf_while_loop: Whether an evaluation that aggregates logs is one graph too; evaluations
        without aggregate_logs always are. It is for an aggregate_logs made of TensorFlow
        operations, whose state is nested tensors of any shape. Where it needs Python (NumPy,
        strings, lists that grow), a warning says so and the evaluation goes step by step.
      eval_recreate_iterator: Whether each evaluation starts at the first example; false goes on
        where the last one stopped.
      allow_tpu_summary: Summaries from inside a TPU program are not supported, so this has to be
        false.
      steps_per_epoch: The number of training steps in an epoch; unset means that the training data
        decides. It has to be set for data without an end, if the config names epochs.
      steps_per_loop: The number of training steps in a loop; logs, checkpoints and evaluations come
        at the ends of loops only.
      fuse_steps: The number of training steps that XLA compiles into one program; 1 fuses none. It
        takes at most the steps of a loop. Small dense models train several times as fast,
        convolutions on a CPU slower; compare two short runs. It is for one replica. Results equal
        those of separate steps to the last digits of float32, but dropout draws other masks. A stop
        waits for the end of a program.
      accumulate_steps: The number of micro-batches that a batch is split into, for batches that do
        not fit into memory: global_batch_size is the batch of one update, and each replica adds up
        the gradients of this number of parts of its share.
      summary_interval: Steps between the summaries that the task itself writes, and between
        histograms and images of named tensors. A number of your own has to be a multiple of
        steps_per_loop. A time is looked at when a loop ends.
      checkpoint_interval: Steps between checkpoints. A time is looked at when a loop ends.
      max_to_keep: How many of the newest checkpoints are kept.
      keep_interval: Which older checkpoints are also kept: the first after every so many steps,
        epochs or hours; unset keeps none of them.
      continuous_eval: Which checkpoints mode continuous_eval evaluates, and how long they are kept
        for it.
      continuous_eval_timeout: Seconds that mode continuous_eval waits for a checkpoint without a
        sign of life of the training run; unset waits without end.
      train_steps: The global step at which training ends; -1 trains until the data is exhausted.
        With a number of epochs, a dataset that ends starts again.
      max_time: The time after which this process saves and ends with exit code 75; the same command
        resumes. Unset sets no limit.
      overfit_batches: The number of batches, counted from the start of the training data, that the
        run trains on again and again and evaluates on; they are an epoch then. Unset for real runs.
        A correct model and loss memorize them.
      validation_steps: The number of batches in an evaluation; -1 takes all of them.
      validation_interval: Steps between evaluations in mode train_and_eval.
      validation_sets: What differs for one of several validation sets, by the name of the set.
      best_checkpoint_export_subdir: The folder inside model_dir for the best weights; it may be
        empty if no best is kept.
      best_checkpoint_eval_metric: The metric that decides which weights are the best; empty keeps
        no best.
      best_checkpoint_metric_comp: Whether a higher or a lower value of the metric is better.
      early_stopping: When training ends before train_steps because evaluations no longer improve;
        unset never ends it early.
      best_checkpoints: Further best checkpoints by name, each in a folder of its own.
      export: The formats in which a run exports its best weights when it ends, or the last weights
        if it keeps no best: saved_model, keras, litert, litert_int8, onnx. See trainer_kit.export.
      metrics: Metrics of training and of evaluation, in addition to those of the task's
        build_metrics. The task's process_metrics updates them with labels and outputs, or the step
        with a named tensor.
      summaries: Tensors, by name, whose values are written at the end of training loops or
        evaluations.
      report_gradient_norm: Whether training reports gradient_norm, the L2 norm of all gradients of
        an update before gradient processors and clipping, as its mean over the loop; with several
        optimizers, that of each. On several replicas each update sums the gradients over replicas
        once more for it, unless a processor or a bound does so anyway.
      callbacks: Callbacks around training steps, in the order in which they are called; each has a
        name and args.
      loss_upper_bound: A run has diverged when its loss is above this value. It has also diverged
        when the loss or a weight is not finite.
      recovery_begin_steps: The step from which loss_upper_bound counts.
      recovery_max_trials: How often a run that has diverged goes back to its last sound checkpoint;
        0 ends the run, and -1 turns all checks for divergence off.
      recovery_policy: What changes after a run that diverged went back: `skip` leaves out the batch
        that made it diverge, `lower_learning_rate` multiplies the rate by
        recovery_learning_rate_factor, `retry` changes nothing (for faulty machines).
      recovery_learning_rate_factor: The factor of the learning rate at each recovery with
        recovery_policy=lower_learning_rate.
      validation_summary_subdir: The folder inside model_dir for the TensorBoard summaries of
        evaluations.
      preemption_on_demand_checkpoint: Whether a checkpoint is saved when SIGTERM or Ctrl-C stops
        the run.
      preemption_grace_seconds: Seconds after SIGTERM within which the process saves and ends.
      hang_timeout_seconds: Seconds without any progress after which the process ends with exit code
        7, so that it can be started again; unset never ends it.
      require_exact_resume: Whether training is refused when a resumed run could differ from one
        that was never stopped; false only warns.
    """

    path_in_experiment = "trainer"

    optimizer_config: OptimizationConfig = OptimizationConfig()
    optimizers: dict[str, NamedOptimizerConfig] = Field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    trainer_class: str = ""
    train_tf_while_loop: bool = True
    train_tf_function: bool = True
    eval_tf_function: bool = True
    eval_tf_while_loop: bool = False
    eval_recreate_iterator: bool = True
    allow_tpu_summary: Literal[False] = False
    steps_per_epoch: PositiveInt | None = None
    steps_per_loop: durations.StepsInLoop = 1000
    fuse_steps: PositiveInt = 1
    accumulate_steps: PositiveInt = 1
    summary_interval: durations.SaveInterval = durations.SUMMARY_INTERVAL
    checkpoint_interval: durations.SaveInterval = 1000
    max_to_keep: PositiveInt = 5
    keep_interval: durations.KeepInterval | None = None
    continuous_eval: ContinuousEvalConfig = ContinuousEvalConfig()
    continuous_eval_timeout: Annotated[float, Field(ge=0)] | None = 60 * 60
    train_steps: durations.RunSteps = 0
    max_time: durations.TimeSpan | None = None
    overfit_batches: PositiveInt | None = None
    validation_steps: IntFromMinusOne = -1
    validation_interval: durations.PartOfRun = 1000
    validation_sets: dict[str, ValidationSetConfig] = Field(default_factory=dict)
    best_checkpoint_export_subdir: str = "best_ckpt"
    best_checkpoint_eval_metric: str = ""
    best_checkpoint_metric_comp: Literal["higher", "lower"] = "higher"
    early_stopping: EarlyStoppingConfig | None = None
    best_checkpoints: dict[str, BestCheckpointConfig] = Field(default_factory=dict)
    export: tuple[Literal["saved_model", "keras", "litert", "litert_int8", "onnx"], ...] = ()
    metrics: tuple[MetricConfig, ...] = ()
    summaries: tuple[SummaryConfig, ...] = ()
    report_gradient_norm: bool = False
    callbacks: tuple[CallbackConfig, ...] = ()
    loss_upper_bound: float = 1e6
    recovery_begin_steps: NonNegativeInt = 0
    recovery_max_trials: IntFromMinusOne = 0
    recovery_policy: Literal["skip", "lower_learning_rate", "retry"] = "skip"
    recovery_learning_rate_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    validation_summary_subdir: str = "validation"
    preemption_on_demand_checkpoint: bool = True
    preemption_grace_seconds: Annotated[float, Field(ge=1)] = 25
    hang_timeout_seconds: Annotated[float, Field(gt=0)] | None = 60 * 60
    require_exact_resume: bool = False

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that intervals fit each other, and that no two switches exclude each other."""
        yield from durations.interval_rules(self)

        if self.validation_steps == 0:
            yield (
                "validation_steps",
                "0 evaluates nothing; use -1 for all of the data or a number above 0",
            )
        if self.train_tf_while_loop and not self.train_tf_function:
            yield "train_tf_while_loop", "needs train_tf_function; set both to false, or neither"
        if self.fuse_steps > 1 and not self.train_tf_while_loop:
            yield "fuse_steps", "needs train_tf_while_loop; set it to true, or fuse_steps to 1"
        if self.eval_tf_while_loop and not self.eval_tf_function:
            yield "eval_tf_while_loop", "needs eval_tf_function; set eval_tf_while_loop to false"
        if not self.eval_recreate_iterator and self.validation_steps == -1:
            yield (
                "eval_recreate_iterator",
                "false needs validation_steps; set it to a number of batches",
            )

        if self.trainer_class and not re.fullmatch(r"\w+(\.\w+)*:\w+", self.trainer_class):
            yield (
                "trainer_class",
                f"{self.trainer_class!r} names no class; write it as module:Class",
            )
        yield from find_broken_patterns("freeze", self.freeze)
        yield from self._optimizer_rules()

        # Early stopping needs a metric, and no sidecar where resume has to be exact.
        early_stopping = self.early_stopping
        if early_stopping is not None and not early_stopping.metric:
            yield (
                "early_stopping.metric",
                "is needed to recognise an improvement; name a metric of the evaluations",
            )
        if self.require_exact_resume and early_stopping is not None and early_stopping.eval_name:
            yield (
                "early_stopping.eval_name",
                "lets a sidecar's speed decide the last step,"
                " which require_exact_resume=true forbids; leave it empty",
            )

        # Folders lie in model_dir, and differ from each other and from all files of the run.
        best_folder = self.best_checkpoint_export_subdir
        summary_folder = self.validation_summary_subdir
        if problem := describe_folder_name_problem(summary_folder, RESERVED_NAMES):
            yield "validation_summary_subdir", problem
        if best_folder and (problem := describe_folder_name_problem(best_folder, RESERVED_NAMES)):
            yield "best_checkpoint_export_subdir", problem
        if best_folder and best_folder == summary_folder:
            yield (
                "best_checkpoint_export_subdir",
                f"{best_folder!r} is validation_summary_subdir too; choose another",
            )
        if self.best_checkpoint_eval_metric and not best_folder:
            yield (
                "best_checkpoint_export_subdir",
                "is needed to keep the best; name a folder, such as best_ckpt",
            )

        # The best checkpoints with names lie in a folder that contains nothing else.
        for name in self.best_checkpoints:
            if problem := describe_folder_name_problem(name, ()):
                yield "best_checkpoints", problem

    def _optimizer_rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there is one optimizer or several, and that averages are evaluated alike."""
        for name in self.optimizers:
            if not re.fullmatch(r"\w+", name):
                yield (
                    "optimizers",
                    f"{name!r} cannot be a name; use letters, digits and underscores",
                )
        for field in ("optimizer", "learning_rate", "warmup"):
            if self.optimizers and getattr(self.optimizer_config, field).type:
                yield (
                    "optimizers",
                    f"do not use optimizer_config.{field}; set its type=null, or remove these",
                )

        # The section of a Model Garden task may have no field ema, or one of another type.
        common_average = getattr(self.optimizer_config, "ema", None)
        averaged = []
        for name, section in self.optimizers.items():
            if section.ema is not None:
                averaged.append(name)
        if averaged and common_average is not None:
            names = ", ".join(averaged)
            yield (
                "optimizers",
                f"optimizer_config.ema averages all weights; remove it, or that of {names}",
            )

        # All averages of a run evaluate the same weights.
        averages: dict[str, object] = {}
        for name, section in self.optimizers.items():
            averages[f"optimizers.{name}.ema"] = section.ema
        averages["optimizer_config.ema"] = common_average

        # The lists of weights to evaluate, by the path of their section.
        evaluated_weights: dict[str, list[str]] = {}
        for path, average in averages.items():
            if isinstance(average, EMAConfig):
                evaluated_weights[path] = list(average.evaluate)
        if not evaluated_weights:
            return

        first_path = next(iter(evaluated_weights))
        first_weights = evaluated_weights[first_path]
        for path, weights in evaluated_weights.items():
            if weights != first_weights:
                problem = f"{weights} differs from trainer.{first_path}.evaluate, {first_weights}"
                yield f"{path}.evaluate", f"{problem}; set both to the same list"

        # Several evaluations of a step see the same data.
        if len(first_weights) > 1 and not self.eval_recreate_iterator:
            problem = f"{first_weights} needs the same data for each"
            yield (
                f"{first_path}.evaluate",
                f"{problem}; set eval_recreate_iterator=true, or evaluate one of them",
            )


@configclass
class ExperimentConfig(Config):
    """A whole experiment: what is learned (task), for how long (trainer), on what (runtime).

    Attributes:
      task: What is learned: the model, the data and what the task needs.
      trainer: How long to train, and how often to report, save and evaluate.
      runtime: What the experiment runs on: devices, threads, precision and seed.
    """

    path_in_experiment = ""

    task: SerializeAsAny[TaskConfig] = TaskConfig()
    trainer: TrainerConfig = TrainerConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks what the sections of an experiment require of each other.

        These are named validation sets, compiled and fused steps, and batches that virtual CPUs
        share equally. The replicas of other strategies are known only on the machine.
        """
        yield from self._validation_set_rules()

        # A converted experiment of Model Garden has a task section of another class.
        if isinstance(self.task, TaskConfig):
            yield from self.task.rules_with_trainer(self.trainer)

        # A batch has an example for each micro-batch.
        parts = self.trainer.accumulate_steps
        train_data = getattr(self.task, "train_data", None)
        batch = getattr(train_data, "global_batch_size", 0)
        if batch and parts > batch:
            problem = f"{parts} parts of a batch of task.train_data.global_batch_size={batch}"
            yield "trainer.accumulate_steps", f"{problem} are too many; set at most {batch}"

        # XLA can compile the gradient processors, where it compiles the training step.
        runtime = self.runtime
        fuse_steps = self.trainer.fuse_steps
        named_sections = {
            f"optimizers.{name}": section for name, section in self.trainer.optimizers.items()
        }
        sections = {"optimizer_config": self.trainer.optimizer_config, **named_sections}
        for path, section in sections.items():
            # The section of a Model Garden task has no such field.
            for index, processor in enumerate(getattr(section, "gradient_processors", ())):
                if problem := describe_xla_problem(processor.type, runtime.enable_xla, fuse_steps):
                    yield f"trainer.{path}.gradient_processors.{index}.type", problem

        if runtime.run_eagerly and fuse_steps > 1:
            yield (
                "trainer.fuse_steps",
                f"{fuse_steps} needs steps that run as a graph; set runtime.run_eagerly=false",
            )

        # With virtual CPUs the number of replicas is known before the run.
        mirrors = runtime.distribution_strategy in ("auto", "mirrored") and not runtime.tpu
        replicas = runtime.virtual_cpus
        if mirrors and replicas > 1:
            if fuse_steps > 1:
                yield (
                    "trainer.fuse_steps",
                    f"{fuse_steps} needs one replica; {XLA_REPLICA_LIMIT}:"
                    " set fuse_steps=1, or use one device",
                )
            for path, batch in self.get_training_batch_sizes():
                if batch % replicas:
                    yield path, describe_uneven_batch(batch, replicas, " (runtime.virtual_cpus)")

    def _validation_set_rules(self) -> Iterator[tuple[str, str]]:
        """Checks the names of validation sets, and that settings name existing sets."""
        sets = get_validation_sets(self.task)

        # The name of each of several sets is that of a folder. A single set is called "".
        several = "" not in sets
        if several and not sets:
            yield (
                "task.validation_data",
                "holds no validation set; name one, or give the fields of a single one",
            )
        for name in sets if several else ():
            if "." in name or "|" in name or describe_folder_name_problem(name, ()):
                yield (
                    "task.validation_data",
                    f"{name!r} cannot name a validation set; use letters, digits, _ and -",
                )

        options = self.trainer
        for section, names in (
            ("", options.validation_sets),
            (".continuous_eval", options.continuous_eval.validation_sets),
        ):
            path = f"trainer{section}.validation_sets"
            for name in names:
                if not several:
                    yield (
                        path,
                        f"names {name!r}, but task.validation_data is a single set; remove it",
                    )
                elif name not in sets:
                    yield (
                        path,
                        f"there is no validation set {name!r}; {suggest_names(name, list(sets))}",
                    )

    def get_training_batch_sizes(self) -> Iterator[tuple[str, int]]:
        """Yields path and size of the global batches that replicas have to share equally.

        They are those of training. In an evaluation each example counts by itself, so one replica
        may get more examples than another.
        """
        sections = get_training_sets(self.task)
        for name, data in get_validation_sets(self.task).items():
            if getattr(data, "is_training", False):
                # A single set is called "", and leaves a dot at the end of its path.
                path = f"task.validation_data.{name}".rstrip(".")
                sections[path] = data

        for path, data in sections.items():
            if batch := getattr(data, "global_batch_size", 0):
                yield f"{path}.global_batch_size", batch

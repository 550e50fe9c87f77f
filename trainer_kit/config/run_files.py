"""The table of the files of a run: who writes each, when, and what is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass

BEST_CHECKPOINTS = "best_checkpoints"  # the folder of those with names


@dataclass(frozen=True)
class RunFile:
    """A file in model_dir, or a folder with all that is in it.

    Attributes:
      path: Its path in model_dir; `<...>` stands for what differs, and a folder ends with a slash.
      writer: Which process writes it.
      when: When it is written.
      content: What is in it.
      named_by: The config field that names it, if there is one; `path` then has the default.
    """

    path: str
    writer: str
    when: str
    content: str
    named_by: str = ""

    def matches(self, path: str) -> bool:
        """Whether `path`, relative to model_dir, is this file or lies in this folder."""
        parts = [re.escape(part) for part in re.split(r"<\w+>", self.path)]
        return re.fullmatch(r"[^/]+".join(parts) + (".*" if self.path.endswith("/") else ""), path) is not None


_TRAINER, _SIDECAR, _SUPERVISOR = "the training run", "a continuous_eval sidecar", "the supervisor of --max_restarts"
_START, _EVALUATION = "before the first step of each start", "after each evaluation"
_ASIDE = "when a run starts or returns to an earlier step"

RUN_FILES: tuple[RunFile, ...] = (
    RunFile("params.yaml", _TRAINER, _START, "The whole config. `--config_file=params.yaml` runs the same again."),
    RunFile(
        "manifest.json", _TRAINER, _START,
        "The run's identity, experiment, command, starts, versions, platform, thread counts and seed, what `auto` has "
        "chosen, the steps of the run and of its durations, and the numbers that the user gave to layers.",
    ),
    RunFile("operative_config.<mode>.gin", _TRAINER, _START, "The gin bindings that were used, as gin lists them."),
    RunFile(
        "checkpoint", _TRAINER, "after each checkpoint",
        "The name of the newest checkpoint, as TensorFlow's `latest_checkpoint` reads it.",
    ),
    RunFile(
        "ckpt-<step>.<part>", _TRAINER, "every trainer.checkpoint_interval steps and at the end",
        "A checkpoint: weights, optimizer, random state, position in the data, states of callbacks. "
        "The newest trainer.max_to_keep of them stay.",
    ),
    RunFile(
        "ckpt-<step>.commit.json", _TRAINER, "when all other files of the checkpoint are complete",
        "The sizes and checksums of the checkpoint's files, and the run that saved it.",
    ),
    RunFile("ckpt-<step>.pin", "you", "at any time", "An empty file that keeps a checkpoint from being removed."),
    RunFile(
        ".saving-ckpt-<step>.<run>", _TRAINER, "while a checkpoint is written or removed",
        "An empty file that marks an unfinished checkpoint as this run's own.",
    ),
    RunFile(
        "ckpt-<step>_temp/", _TRAINER, "while a checkpoint is written",
        "The unfinished files of a checkpoint. The next start removes what a killed process has left.",
    ),
    RunFile(
        "best_ckpt/", _TRAINER, "after an evaluation that is better than the best before",
        "The best weights as a checkpoint, and `info.json`, which holds their step, metric and value.",
        "trainer.best_checkpoint_export_subdir",
    ),
    RunFile(
        f"{BEST_CHECKPOINTS}/<name>/", _TRAINER, "after an evaluation that is among the best",
        "The best weights and `info.json` of one entry of trainer.best_checkpoints.",
    ),
    RunFile(
        "history.json", _TRAINER, "after each epoch of trainer_kit.compat.keras.fit",
        "The epochs, counted from 0, and their logs by name, as Keras's History has them.",
    ),
    RunFile(
        "metrics.jsonl", _TRAINER, "within a fifth of a second after each report",
        "Every report of training and evaluation, and every change of a hyper-parameter: one JSON object on each "
        "line, in the order of steps.",
    ),
    RunFile(
        "metrics.superseded.jsonl", _TRAINER, "when a run resumes from an earlier step",
        "The earlier reports of steps that were trained again.",
    ),
    RunFile(
        "hyper_parameters.yaml", "you", "at any time",
        "The hyper-parameters to change while the run goes on; the callback set_from_file reads it.",
    ),
    RunFile(
        "hyper_parameters.jsonl", _TRAINER, "when hyper_parameters.yaml has changed",
        "What was read at which step, so that a resumed run repeats it.",
    ),
    RunFile(
        "final.json", _TRAINER, "when the run is finished",
        "The last step, its metrics, the best, why the run ended early if it did, and where its time went.",
    ),
    RunFile(
        "heartbeat.json", _TRAINER, "every few seconds",
        "Who trains here (host and process), at which step and in which phase.",
    ),
    RunFile("trainer.lock", _TRAINER, "at the start", "An empty file that is locked while a process trains here."),
    RunFile(
        "evals/validation.jsonl", _TRAINER, _EVALUATION,
        "The ledger: one JSON object for each evaluation, with step, checkpoint, data and metrics. "
        "The best follows from it.",
    ),
    RunFile(
        "evals/<name>.jsonl", _SIDECAR, _EVALUATION,
        "The ledger of the sidecar with this --eval_name; mode eval has `evals/eval.jsonl`.",
    ),
    RunFile(
        "evals/<name>.lease.json", _SIDECAR, "every few seconds",
        "Who runs the sidecar, and which checkpoints it needs.",
    ),
    RunFile("evals/<name>.lock", _SIDECAR, "at its start", "An empty file that is locked while the sidecar runs."),
    RunFile(
        "evals/<name>/", _SIDECAR, _EVALUATION,
        "The sidecar's best weights and TensorBoard summaries; mode eval writes its summaries to `evals/eval/`.",
    ),
    RunFile(
        "train/", _TRAINER, "at the end of each training loop",
        "TensorBoard summaries of training, and in `plugins/profile/` the traces of --profile.",
    ),
    RunFile(
        "validation/", _TRAINER, _EVALUATION, "TensorBoard summaries of evaluations.",
        "trainer.validation_summary_subdir",
    ),
    RunFile(
        "ema_checkpoints/", _TRAINER, f"{_EVALUATION}; in mode train with each checkpoint",
        "Checkpoints of the averaged weights on their own, of the callback ema_checkpoints; those of "
        "`ema.more_decays` are in folders of their names.",
    ),
    RunFile(
        "samples/", _TRAINER, _EVALUATION, "Pictures of what a generator makes, of the callback sample_pictures.",
    ),
    RunFile(
        "errors/<time>-<pid>.txt", "any process of the run", "when an error is shown in a few lines",
        "The command and the whole traceback.",
    ),
    RunFile(
        "stacks-<time>.txt", "the watchdog of a process", "when trainer.hang_timeout_seconds pass without progress",
        "The stacks of all threads.",
    ),
    RunFile(
        "diverged/", _TRAINER, "when a run diverges",
        "`step-<step>.json` explains the divergence; checkpoints with weights that are not finite are moved here.",
    ),
    RunFile("damaged/", _TRAINER, _ASIDE, "Checkpoints that are incomplete or damaged."),
    RunFile("archived/", _TRAINER, _ASIDE, "Checkpoints of later steps than the one that --from_step names."),
    RunFile("foreign/", _TRAINER, _ASIDE, "Checkpoints that another run saved."),
    RunFile(
        "attempts.jsonl", _SUPERVISOR, "after each attempt",
        "One JSON object for each attempt: command, exit code, cause, last errors. "
        "Those of a sidecar are in `evals/<name>/`.",
    ),
    RunFile("workers/<n>/", "worker n, from 1", "with checkpoints and attempts", "Its attempts, and its own copy."),
    RunFile(
        "finetune-<step>/", "mode continuous_train_and_eval", "from the start of a fine-tuning",
        "A run directory of its own for each checkpoint of the other run.",
    ),
    RunFile(
        "metrics-<step>.json", "mode continuous_train_and_eval", "when the fine-tuning of a checkpoint is finished",
        "The metrics that the fine-tuning ended with.",
    ),
)  # fmt: skip
RUN_NAMES = tuple(
    dict.fromkeys(one.path.split("/")[0] for one in RUN_FILES if "<" not in one.path.split("/")[0] and not one.named_by)
)

"""The names in model_dir that a run uses itself. docs/reference/run_directory.md says what is in each file."""

from __future__ import annotations

BEST_CHECKPOINTS = "best_checkpoints"  # the folder of those with names

# What no field of the config may name a folder.
RESERVED_NAMES = (
    "params.yaml",
    "manifest.json",
    "checkpoint",
    BEST_CHECKPOINTS,
    "history.json",
    "metrics.jsonl",
    "metrics.superseded.jsonl",
    "hyper_parameters.yaml",
    "hyper_parameters.jsonl",
    "final.json",
    "heartbeat.json",
    "trainer.lock",
    "evals",
    "train",
    "ema_checkpoints",
    "samples",
    "errors",
    "diverged",
    "damaged",
    "archived",
    "attempts.jsonl",
    "workers",
)

"""The names in model_dir that a run uses itself.

docs/reference/run_directory.md describes the contents of each file.
"""

from __future__ import annotations

# The folder of the best checkpoints with names.
BEST_CHECKPOINTS = "best_checkpoints"

# No field of the config may give one of these names to a folder.
RESERVED_NAMES = (
    "params.yaml",
    "manifest.json",
    "model.json",
    "checkpoint",
    BEST_CHECKPOINTS,
    "history.json",
    "metrics.jsonl",
    "metrics.superseded.jsonl",
    "hyper_parameters.yaml",
    "hyper_parameters.jsonl",
    "final.json",
    "log.txt",
    "heartbeat.json",
    "trainer.lock",
    "evals",
    "export",
    "train",
    "ema_checkpoints",
    "samples",
    "errors",
    "diverged",
    "damaged",
    "archived",
    "attempts.jsonl",
    "workers",
    "trackers",
)

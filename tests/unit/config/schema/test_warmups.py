"""Rules of the sections of warm-ups. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.schedules import WarmupConfig


def test_a_warm_up_has_a_length() -> None:
    for name in WarmupConfig.branches():
        assert wrong_fields(WarmupConfig, {"type": name}) == [f"{name}.warmup_steps"]
        assert WarmupConfig(**{"type": name, name: {"warmup_steps": 5}}).get().warmup_steps == 5  # type: ignore[arg-type]

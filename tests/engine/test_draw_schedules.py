"""The picture of the schedules, `python -m scripts.draw_schedules`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import draw_schedules
from trainer_kit.config.schema.schedules import LrConfig


def test_the_picture_has_every_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_schedules, "STEPS", 10)
    assert set(draw_schedules.EXAMPLES) == set(LrConfig.branches()) - set(LrConfig.registry.names())
    draw_schedules.main([str(tmp_path / "schedules.png")])
    assert (tmp_path / "schedules.png").read_bytes().startswith(b"\x89PNG")

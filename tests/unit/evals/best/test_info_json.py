"""What names the best checkpoint: read as it was written, and nothing that only looks like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.evals.best.info_json import INFO, is_info, read_info

_WHOLE = {
    "checkpoint": "ckpt-5",
    "step": 5,
    "metric": "a",
    "value": 0.5,
    "metrics": {"a": 0.5, "far|b": 1},
}


def test_what_was_written_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / INFO).write_text(json.dumps(_WHOLE))

    assert read_info(str(tmp_path)) == _WHOLE
    assert read_info(str(tmp_path / "none")) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "ckpt-6"},
        {"step": "5"},
        {"step": True},
        {"value": float("nan")},
        {"value": 10**400},
        {"metrics": {"a": "0.5"}},
    ],
)
def test_what_was_not_written_by_us_is_none(change: dict[str, Any]) -> None:
    assert is_info(_WHOLE)
    assert not is_info({**_WHOLE, **change})
    assert not is_info([_WHOLE])


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"step": 5}'])
def test_a_damaged_one_is_none_with_a_warning_unless_quiet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / INFO).write_bytes(text.encode("latin-1"))

    assert read_info(str(tmp_path), quiet=True) is None
    assert caplog.text == ""
    assert read_info(str(tmp_path)) is None
    assert "info.json cannot be read" in caplog.text


def test_model_gardens_form_is_read_with_the_weights_record(tmp_path: Path) -> None:
    expected = {
        "checkpoint": "ckpt-20",
        "step": 20,
        "metric": "acc",
        "value": 0.5,
        "metrics": {"acc": 0.5},
    }
    record = tmp_path / "ckpt-20.commit.json"
    record.write_text(json.dumps({"files": {}, "info": expected}))

    for step in (20.0, 20):
        info = {"acc": 0.5, "best_ckpt_global_step": step}
        (tmp_path / "info.json").write_text(json.dumps(info))
        assert read_info(str(tmp_path)) == expected

    for wrong in (
        *({"best_ckpt_global_step": step} for step in (30.0, "20", float("nan"), None)),
        [20.0],
    ):
        (tmp_path / "info.json").write_text(json.dumps(wrong))
        assert read_info(str(tmp_path), quiet=True) is None

    record.unlink()
    (tmp_path / "info.json").write_text(json.dumps({"best_ckpt_global_step": 20.0}))

    assert read_info(str(tmp_path), quiet=True) is None

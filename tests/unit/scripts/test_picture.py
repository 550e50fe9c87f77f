"""A picture of bars and curves, and of nothing."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks import picture
from scripts.benchmarks.results import Goal, Results, Row, Section


def test_only_the_picture_is_left_in_the_folder(tmp_path: Path) -> None:
    goals = (Goal(to="a", bound=0.9),)
    bars = [
        Row(name="a", label="by hand", values=[[2.0]]),
        Row(name="again", label="by hand, again", to="a", values=[[2.1]]),
        Row(name="ours", label="ours", to="a", values=[[1.9]], goals=goals),
        Row(name="failed", label="ours, fused", to="a", failed="no such key"),
    ]
    curves = [Row(name=f"ours_{x}", label=f"ours, {x}", line="ours", x=x, values=[[1.0 + x]]) for x in (0.0, 1.0, 10.0)]
    sections = [
        Section(name="dense", title="a small net", unit="steps/s", rows=bars, equals=("a", "again")),
        Section(name="actions", title="cost of a step", unit="us/step", rows=curves),
    ]
    picture.write(Results(machine={"cores": 2}, options={}, sections=sections), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]


def test_without_figures_there_is_a_picture_too(tmp_path: Path) -> None:
    picture.write(Results(machine={}, options={}, sections=[]), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 0

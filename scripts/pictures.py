"""Draws the pictures of the pages from real runs: `python -m scripts.pictures`.

They are written to docs/images/. The runs take about two minutes on two cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.source_files import ROOT

_IMAGES = ROOT / "docs" / "images"
_INK = "#24292f"
_BLUE = "#1f77b4"
_ORANGE = "#e8710a"
_GREY = "#b9c0c8"
_KILL_STEP = 460
_COMMAND = (
    *(sys.executable, "-m", "trainer_kit.train", "--experiment=digits", "--mode=train_and_eval"),
    "--params_override=steps_per_loop=20,summary_interval=20,validation_interval=200,"
    "checkpoint_interval=200,require_exact_resume=true",
)


def main() -> None:
    """Draws all pictures."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": _INK, "text.color": _INK})
    with tempfile.TemporaryDirectory() as runs:
        whole = _train(Path(runs) / "whole")
        first, last = _train_and_kill(Path(runs) / "killed")
    pictures = {
        "killed_run": draw_killed_run(whole, first, last),
        "loop": draw_loop(),
        "checkpoint_life": draw_checkpoint_life(),
    }
    for name, figure in pictures.items():
        figure.savefig(_IMAGES / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)


def _train(folder: Path) -> dict[int, float]:
    """Returns the losses of a whole run by step."""
    subprocess.run([*_COMMAND, f"--model_dir={folder}"], check=True, capture_output=True)
    return _read_losses(folder)


def _train_and_kill(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the losses of a run until it is killed, and those after the same command again."""
    command = [*_COMMAND, f"--model_dir={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    losses: dict[int, float] = {}
    while max(losses, default=0) < _KILL_STEP and process.poll() is None:
        time.sleep(0.01)
        losses = _read_losses(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()

    first = _read_losses(folder)
    subprocess.run(command, check=True, capture_output=True)
    resumed_step = max(first) // 200 * 200
    return first, {step: loss for step, loss in _read_losses(folder).items() if step > resumed_step}


def _read_losses(folder: Path) -> dict[int, float]:
    """Returns the training loss of each report by its step; later lines replace earlier ones."""
    path = folder / "metrics.jsonl"
    losses = {}
    # The last line may be incomplete.
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        record = json.loads(line)
        if record["kind"] == "train":
            losses[record["step"]] = record["metrics"]["training_loss"]
    return losses


def draw_killed_run(
    whole: dict[int, float], first: dict[int, float], last: dict[int, float]
) -> Figure:
    """Draws the losses of a run that was killed over those of one that was not."""
    figure, axes = plt.subplots(figsize=(7.5, 3.2))
    axes.plot([*whole], [*whole.values()], color=_GREY, linewidth=6, label="never killed")
    axes.plot([*first], [*first.values()], color=_BLUE, label="until kill -9")
    axes.plot([*last], [*last.values()], color=_ORANGE, label="the same command again")
    axes.axvline(max(first), color=_INK, linestyle=":", linewidth=1)
    axes.text(max(first) + 8, 0.6, "kill -9", family="monospace")
    axes.axvline(min(last) - 20, color=_ORANGE, linestyle=":", linewidth=1)
    axes.text(min(last) - 28, 0.6, "newest checkpoint", color=_ORANGE, ha="right")
    same_count = sum(whole[step] == loss for step, loss in last.items())
    axes.set_title(f"{same_count} of {len(last)} reports after the resume have the same bits")
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def draw_loop() -> Figure:
    """Draws the loops of a run and what happens at their boundaries."""
    figure, axes = _create_canvas(9, 2.6)
    for number in range(3):
        left = 0.02 + number * 0.33
        _draw_box(axes, left, 0.45, 0.18, 0.3, "loop: 100 steps\nin TensorFlow", _BLUE)
        _draw_box(axes, left + 0.195, 0.45, 0.115, 0.3, "boundary\nin Python", _ORANGE)
    axes.text(0.5, 0.9, "trainer.steps_per_loop=100", ha="center", family="monospace")
    text = (
        "At a boundary: reports and callbacks; every checkpoint_interval steps a checkpoint;\n"
        "every validation_interval steps an evaluation, and the best weights are kept"
    )
    axes.text(0.5, 0.15, text, ha="center", va="center")
    return figure


def draw_checkpoint_life() -> Figure:
    """Draws how a checkpoint is written, used and deleted."""
    stages = (
        "saved\nin the\nbackground",
        "committed:\nckpt-400\n.commit.json",
        "evaluated\nby the run\nor a sidecar",
        "best so far?\ncopied to\nbest_ckpt/",
        "deleted when\nnewer ones\nare complete",
    )
    figure, axes = _create_canvas(9, 2.2)
    for number, stage in enumerate(stages):
        left = 0.01 + number * 0.2
        color = _ORANGE if "best" in stage else _BLUE
        _draw_box(axes, left, 0.3, 0.155, 0.5, stage, color)
        if number:
            arrow = {"arrowstyle": "->", "color": _INK}
            axes.annotate("", (left, 0.55), (left - 0.045, 0.55), arrowprops=arrow)
    axes.text(0.5, 0.1, "A resume takes the newest checkpoint that is committed.", ha="center")
    return figure


def _create_canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure in inches without axes, whose coordinates go from 0 to 1."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    return figure, axes


def _draw_box(
    axes: Axes, left: float, bottom: float, width: float, height: float, text: str, color: str
) -> None:
    box = matplotlib.patches.FancyBboxPatch(
        (left, bottom),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.02",
        facecolor=f"{color}22",
        edgecolor=color,
    )
    axes.add_patch(box)
    axes.text(left + width / 2, bottom + height / 2, text, ha="center", va="center")


if __name__ == "__main__":
    main()

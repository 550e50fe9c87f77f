"""Draws the pictures of the pages from real runs: `python -m scripts.pictures [NAME ...]`.

They are written to docs/images/. All of them take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from scripts.examples import read_page
from scripts.gallery_pictures import TRAIN, reduce_palette, write_gallery
from scripts.source_files import ROOT

_IMAGES = ROOT / "docs" / "images"
_INK = "#24292f"
_BLUE = "#1f77b4"
_ORANGE = "#e8710a"
_GREY = "#b9c0c8"
_KILL_STEP = 460
_DIGITS = (
    *TRAIN,
    "--experiment=digits",
    "--params_override=steps_per_loop=20,summary_interval=20,validation_interval=200,"
    "checkpoint_interval=200,require_exact_resume=true",
)
# The experiment of the tutorial.
_RINGS = (*TRAIN, "--import_module=my_task.py", "--experiment=rings")
_CLI = Path(sys.executable).with_name("trainer-kit")
_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # The size and the capabilities of the terminal.
    "COLUMNS": "120",
    "TERM": "xterm-256color",
}
# Matches the sequence with which rich erases its display: the line of the cursor, then those above.
_ERASURE = re.compile(r"\r\x1b\[2K((?:\x1b\[1A\x1b\[2K)*)")


def main() -> None:
    """Draws the pictures that are named, or all."""
    writers = {
        "killed_run": write_killed_run,
        "diagrams": write_diagrams,
        "console": write_console,
        "comparison": write_comparison,
        "gallery": write_gallery,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(writers))
    names = parser.parse_args().names or [*writers]
    if unknown_names := set(names) - writers.keys():
        parser.error(f"{', '.join(sorted(unknown_names))}: give some of {', '.join(writers)}")

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            writers[name](Path(folder))


def write_killed_run(folder: Path) -> None:
    """Draws the losses of a run that was killed and those of one that was not."""
    whole = _train(folder / "whole")
    first, last = _train_and_kill(folder / "killed")
    _save(draw_killed_run(whole, first, last), "killed_run")


def write_diagrams(_: Path) -> None:
    """Draws the pictures that need no run."""
    _save(draw_loop(), "loop")
    _save(draw_checkpoint_life(), "checkpoint_life")


def write_console(folder: Path) -> None:
    """Draws what a terminal shows before the third evaluation of a run."""
    _write_task(folder)
    overrides = "trainer.train_steps=20000,steps_per_loop=1000,validation_interval=4000"
    command = [*_RINGS, "--model_dir=runs/long", f"--params_override={overrides}"]
    # This program of util-linux runs a command in a terminal.
    terminal = ["script", "--quiet", "--command", shlex.join(command), "/dev/null"]
    output = _run(terminal, folder)

    # The display is erased before the line of an evaluation is printed.
    end = output.index("validation | step 12000")
    screen = _erase_displays(output[: output.rindex("\r", 0, end)].replace("\r\n", "\n"))
    console = Console(record=True, file=io.StringIO(), width=int(_ENVIRONMENT["COLUMNS"]))
    console.print(Text.from_ansi(screen))
    svg = console.export_svg(title="python -m trainer_kit.train --experiment=rings ...")
    # The fonts are on another host.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (_IMAGES / "console.svg").write_text(svg)


def _erase_displays(text: str) -> str:
    """Applies the erasures in the output of a terminal, as the terminal does."""
    while erasure := _ERASURE.search(text):
        line_count = 1 + erasure[1].count("\x1b[1A")
        lines = text[: erasure.start()].split("\n")
        text = "\n".join([*lines[:-line_count], text[erasure.end() :]])
    return text


def write_comparison(folder: Path) -> None:
    """Draws the curves of several runs, by `trainer-kit compare` and by TensorBoard."""
    _write_task(folder)
    runs = folder / "runs" / "rates"
    for rate in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
        override = f"--params_override=learning_rate={rate}"
        _run([*_RINGS, f"--model_dir={runs}/rate_{rate}", override], folder)
    _run([_CLI, "compare", runs, f"--plot={_IMAGES / 'curves.png'}"], folder)

    if shutil.which("chromium") is None:
        print("tensorboard.png is left out; it needs chromium: apt-get install chromium")
        return
    # With more than two runs, TensorBoard repeats colors.
    pair = folder / "pair"
    pair.mkdir()
    for name in ("rate_0.002", "rate_0.01"):
        (runs / name).rename(pair / name)
    server = subprocess.Popen(
        [_CLI, "tensorboard", pair, "--port=0"],
        env=_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _save_screenshot(_read_address(server), _IMAGES / "tensorboard.png")
    finally:
        server.terminate()
        server.wait()


def _read_address(server: subprocess.Popen[str]) -> str:
    """Returns the address that TensorBoard prints when it serves."""
    assert server.stderr is not None
    for line in server.stderr:
        if address := re.search(r"http://\S+", line):
            return address[0]
    raise RuntimeError("TensorBoard has ended")


def _save_screenshot(address: str, path: Path) -> None:
    """Saves what a browser shows of TensorBoard."""
    time.sleep(5)  # until the runs are read
    cards = [{"plugin": "scalars", "tag": tag} for tag in ("accuracy", "loss")]
    query = urlencode({"smoothing": 0, "pinnedCards": json.dumps(cards, separators=(",", ":"))})
    # Without --disable-3d-apis some curves are missing.
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-3d-apis"]
    options = [f"--screenshot={path}", "--window-size=1400,640", "--virtual-time-budget=20000"]
    _run([*browser, *options, f"{address}?{query}#timeseries"], path.parent)
    reduce_palette(path)


def _write_task(folder: Path) -> None:
    """Writes the file of the tutorial."""
    page = ROOT / "docs" / "tutorial.md"
    files = read_page(page.name, page.read_text()).files
    (folder / "my_task.py").write_text(files["my_task.py"])


def _run(command: Sequence[str | Path], folder: Path) -> str:
    """Runs a command in a folder, and returns its output."""
    done = subprocess.run(command, cwd=folder, env=_ENVIRONMENT, check=True, stdout=subprocess.PIPE)
    # Not as text, which would change the line ends of a terminal.
    return done.stdout.decode()


def _save(figure: Figure, name: str) -> None:
    figure.savefig(_IMAGES / f"{name}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def _train(folder: Path) -> dict[int, float]:
    """Returns the losses of a whole run by step."""
    subprocess.run([*_DIGITS, f"--model_dir={folder}"], check=True, capture_output=True)
    return _read_losses(folder)


def _train_and_kill(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the losses of a run until it is killed, and those after the same command again."""
    command = [*_DIGITS, f"--model_dir={folder}"]
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

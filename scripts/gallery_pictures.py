"""Draws the pictures of docs/images/gallery from finished runs of the experiments.

`python -m scripts.gallery_pictures NAME RUN_FOLDER` writes docs/images/gallery/NAME.png. Each
experiment has a function `draw_NAME(run_folder)`.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

import trainer_kit as tk

GALLERY = Path(__file__).parents[1] / "docs" / "images" / "gallery"


def draw_image_folder(run_folder: str) -> Figure:
    """Returns held-out images with the class that the model finds; a wrong one is in red."""
    from trainer_kit.experiments.image_folder import (
        ImageFolderConfig,
        ImageFolderTask,
        list_classes,
    )

    task = ImageFolderTask(ImageFolderConfig())
    held_out = tk.DataConfig(global_batch_size=32, is_training=False)
    images, labels = next(task.build_inputs(held_out).as_numpy_iterator())
    found = tk.load_model(run_folder, "best").predict(images, verbose=0).argmax(axis=1)
    names = list_classes(task.find_folder())

    figure, axes = plt.subplots(3, 8, figsize=(8, 3.6), layout="constrained")
    for axis, image, label, answer in zip(axes.flat, images, labels, found, strict=False):
        axis.imshow(image.astype(np.uint8), interpolation="nearest")
        axis.set_title(names[answer], fontsize=9, color="black" if label == answer else "red")
        axis.axis("off")
    return figure


def draw_finetune_frozen(run_folder: str) -> Figure:
    """Returns the accuracy of the runs `head` and `all`, which lie in `run_folder`."""
    runs = {"head": "new head, frozen body", "all": "then all layers"}
    return draw_accuracy(Path(run_folder), runs, ylabel="accuracy on digits 5 to 9")


def draw_distillation(run_folder: str) -> Figure:
    """Returns the accuracy of `teacher`, `student` and `alone`, which lie in `run_folder`.

    `alone` is a student without a teacher.
    """
    runs = {
        "teacher": "teacher: 21,386 parameters, 1,437 images",
        "student": "student: 666 parameters, 200 images",
        "alone": "the same without a teacher",
    }
    return draw_accuracy(Path(run_folder), runs, ylabel="accuracy")


def draw_accuracy(folder: Path, runs: dict[str, str], ylabel: str) -> Figure:
    """Returns the held-out accuracy of some runs of a folder, given with their labels."""
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for name, label in runs.items():
        lines = (folder / name / "evals" / "validation.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        steps = [record["step"] for record in records]
        accuracy = [record["metrics"]["accuracy"] for record in records]
        axis.plot(steps, accuracy, marker="o", label=label)
    axis.set(xlabel="step", ylabel=ylabel)
    axis.legend(loc="lower right")
    return figure


def main() -> None:
    """Writes the picture of the experiment and the run that the command line names."""
    name, run_folder = sys.argv[1:]
    GALLERY.mkdir(parents=True, exist_ok=True)
    path = GALLERY / f"{name}.png"
    drawn = io.BytesIO()
    globals()[f"draw_{name}"](run_folder).savefig(drawn, dpi=80)
    # A palette makes the file several times smaller.
    Image.open(drawn).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()

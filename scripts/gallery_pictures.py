"""Draws what the experiments of the gallery have learned: `python -m scripts.pictures gallery`.

The pictures are written to docs/images/gallery/. An experiment NAME has a function `draw_NAME`,
which returns the figure of its finished run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

import trainer_kit as tk

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "gallery"
TRAIN = (sys.executable, "-m", "trainer_kit.train", "--mode=train_and_eval")
_ONE_RUN = {".": ""}
# The overrides by run, for experiments that need several runs.
_RUNS = {
    "finetune_frozen": {
        "first": "",
        "head": "{task: {first_digit: 5, init_checkpoint: [{path: first, exclude: [head]}]},"
        " trainer: {freeze: [body]}}",
        "all": "{task: {first_digit: 5, init_checkpoint: head}, learning_rate: 1e-3}",
    },
    "distillation": {
        "teacher": "",
        "student": "task: {teacher: teacher, width: 4, images: 200}",
        "alone": "task: {width: 4, images: 200}",
    },
}


def draw_text_classification(run_folder: str) -> Figure:
    """Returns the confusion matrix of the held-out docstrings."""
    from trainer_kit.experiments.text_classification import PACKAGES

    predictions = predict_held_out(run_folder)
    counts = np.zeros((len(PACKAGES), len(PACKAGES)), int)
    np.add.at(counts, (predictions["label"], predictions["outputs"].argmax(axis=1)), 1)

    figure = Figure(figsize=(5.5, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted package", ylabel="package of the docstring")
    axes.imshow(counts, cmap="Blues", vmax=counts.max() * 1.3)
    axes.set_xticks(range(len(PACKAGES)), PACKAGES, rotation=40, ha="right")
    axes.set_yticks(range(len(PACKAGES)), PACKAGES)
    for (row, column), count in np.ndenumerate(counts):
        axes.text(column, row, str(count or ""), ha="center", va="center")
    return figure


def draw_tabular(run_folder: str) -> Figure:
    """Returns the predicted price of each held-out car against its price."""
    predictions = predict_held_out(run_folder)
    highest = predictions["label"].max()

    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="price, in thousands", ylabel="predicted price", aspect="equal"
    )
    axes.plot([0, highest], [0, highest], color="tab:orange", linewidth=1)
    axes.scatter(predictions["label"], predictions["outputs"], s=4)
    return figure


def draw_time_series(run_folder: str) -> Figure:
    """Returns forecasts of a week of the held-out time, one made at each midnight."""
    midnights = slice(7 * 24, 14 * 24, 24)
    predictions = predict_held_out(run_folder)
    hours = np.arange(7 * 24)

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="hour", ylabel="bikes", xticks=range(0, 7 * 24 + 1, 24))
    axes.plot(hours, predictions["label"][midnights].ravel(), label="rented")
    axes.plot(hours, predictions["outputs"][midnights].ravel(), label="forecast of a whole day")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    return figure


def draw_recommender(run_folder: str) -> Figure:
    """Returns the two main directions of the films' vectors, in the colors of their genres."""
    from trainer_kit.experiments.recommender import GENRES

    model = tk.load_model(run_folder, "best")
    lookups = [layer for layer in model.layers if isinstance(layer, keras.layers.StringLookup)]
    films = np.array(lookups[1].get_vocabulary()[1:])
    vectors = model.get_layer("item_vector").embeddings.numpy()[1:]
    _, _, directions = np.linalg.svd(vectors - vectors.mean(axis=0))
    places = vectors @ directions[:2].T

    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.add_subplot(xticks=[], yticks=[], title="learned vectors of the films")
    for genre in GENRES:
        is_genre = np.char.startswith(films, genre)
        x, y = places[is_genre].T
        axes.scatter(x, y, s=12, label=genre)
    figure.legend(loc="outside right center")
    return figure


def predict_held_out(run_folder: str) -> dict[str, np.ndarray]:
    """Returns the labels and the outputs for the held-out data, by name."""
    predictions = tk.predict(run_folder)
    assert isinstance(predictions, dict)  # a path only with `output`
    return predictions


def draw_vae(run_folder: str) -> Figure:
    """Returns images decoded from a grid of latents, and held-out images with reconstructions."""
    from trainer_kit.experiments.vae import load_images

    vae = tk.load_model(run_folder, "best")
    places = np.linspace(-2, 2, 12, dtype=np.float32)
    latents = np.stack(np.meshgrid(places, places), axis=-1).reshape(-1, 2)
    decoded = compute_grey(vae.get_layer("decoder")(latents))
    _, held_out = load_images()
    originals = held_out[:24]
    reconstructions = compute_grey(vae(originals)["logits"])
    pairs = np.stack([originals.reshape(4, 6, 8, 8), reconstructions.reshape(4, 6, 8, 8)], axis=1)

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_tiles(left, decoded, columns=12)
    left.set_title("decoded from a plane of two numbers")
    draw_tiles(right, pairs, columns=6)
    right.set_title("held-out digits, each above its reconstruction")
    return figure


def draw_contrastive(run_folder: str) -> Figure:
    """Returns held-out digits as points, placed by t-SNE, by their pixels and by embeddings."""
    from sklearn.manifold import TSNE

    from trainer_kit.experiments.contrastive import load_images

    _, (images, labels) = load_images()
    embeddings = np.asarray(tk.load_model(run_folder, "best")(images)["embedding"])
    figure = Figure(figsize=(7.4, 3.7), layout="constrained")
    panels = {
        "raw pixels": images.reshape(-1, 64),
        "embeddings, learned without labels": embeddings,
    }
    for axes, (title, vectors) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        points = TSNE(metric="cosine", random_state=0).fit_transform(vectors)
        axes.set_title(title)
        axes.scatter(*points.T, s=0)  # sets the limits of the axes
        for (x, y), label in zip(points, labels, strict=True):
            axes.text(x, y, str(label), color=f"C{label}", fontsize=6, ha="center", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def draw_gan(run_folder: str) -> Figure:
    """Returns held-out digits beside generated ones."""
    from trainer_kit.experiments.gan import load_images

    model = tk.load_model(run_folder, "best")
    latents = np.random.default_rng(0).normal(size=(100, model.latent_size)).astype(np.float32)
    _, held_out = load_images()
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panels = {"real": held_out[:100], "generated": np.asarray(model(latents))}
    for axes, (title, images) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        axes.set_title(title)
        draw_tiles(axes, images, columns=10)
    return figure


def compute_grey(logits: Any) -> np.ndarray:
    """Returns the grey values in 0..1 of logits."""
    return 1 / (1 + np.exp(-np.asarray(logits)))


def draw_tiles(axes: Any, images: np.ndarray, columns: int) -> None:
    """Draws images of 8 x 8 pixels side by side, row by row, with a gap of a pixel."""
    padded = np.pad(
        images.reshape(-1, 8, 8), [(0, 0), (0, 1), (0, 1)], constant_values=images.max()
    )
    rows = padded.reshape(-1, columns, 9, 9).swapaxes(1, 2)
    axes.imshow(rows.reshape(-1, 9 * columns), cmap="gray")
    axes.axis("off")


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
    classes = tk.load_model(run_folder, "best").predict(images, verbose=0).argmax(axis=1)
    names = list_classes(task.find_folder())

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(3, 8)
    for axis, image, label, answer in zip(axes.flat, images, labels, classes, strict=False):
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
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    for name, label in runs.items():
        lines = (folder / name / "evals" / "validation.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        steps = [record["step"] for record in records]
        accuracy = [record["metrics"]["accuracy"] for record in records]
        axis.plot(steps, accuracy, marker="o", label=label)
    axis.set(xlabel="step", ylabel=ylabel)
    axis.legend(loc="lower right")
    return figure


def write_gallery(folder: Path) -> None:
    """Trains the experiments of the gallery in a folder, and draws them."""
    for draw in (
        draw_image_folder,
        draw_finetune_frozen,
        draw_text_classification,
        draw_tabular,
        draw_time_series,
        draw_recommender,
        draw_vae,
        draw_contrastive,
        draw_distillation,
        draw_gan,
    ):
        name = draw.__name__.removeprefix("draw_")
        run_folder = folder / name
        run_folder.mkdir()
        for run, override in _RUNS.get(name, _ONE_RUN).items():
            flags = [f"--experiment={name}", f"--model_dir={run}", f"--params_override={override}"]
            command = [*TRAIN, *flags]
            subprocess.run(command, cwd=run_folder, check=True, stdout=subprocess.DEVNULL)
        path = FOLDER / f"{name}.png"
        draw(str(run_folder)).savefig(path, dpi=90)
        reduce_palette(path)


def reduce_palette(path: Path) -> None:
    """Reduces a picture to 128 colors, which makes its file smaller."""
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)

"""Draws what an experiment of the gallery has learned, for docs/images/gallery.

`python -m scripts.gallery_pictures NAME RUN_FOLDER` draws the finished run of an experiment. Each
has a function `draw_NAME` that returns its figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import trainer_kit as tk

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "gallery"


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


def main() -> None:
    """Writes the picture of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("run_folder")
    arguments = parser.parse_args()

    FOLDER.mkdir(parents=True, exist_ok=True)
    draw = globals()[f"draw_{arguments.name}"]
    draw(arguments.run_folder).savefig(FOLDER / f"{arguments.name}.png", dpi=90)


if __name__ == "__main__":
    main()

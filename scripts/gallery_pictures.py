"""Draws what an experiment of the gallery has learned, for docs/images/gallery.

`python -m scripts.gallery_pictures NAME RUN_FOLDER` draws the finished run of an experiment. Each
has a function `draw_NAME` that returns its figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import trainer_kit as tk

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "gallery"


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
    lookups = [one for one in model.layers if isinstance(one, keras.layers.StringLookup)]
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

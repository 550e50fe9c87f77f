"""The results of a classifier: scores of each class, the confusion matrix and the worst rows."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from trainer_kit import files
from trainer_kit.errors import UsageError
from trainer_kit.serving.export_formats import Arrays, import_runtime
from trainer_kit.serving.prediction_files import to_list

_SHOWN_CLASSES = 30
_WORST_ROWS = 20


def write_report(parts: Iterable[Arrays], output_names: Sequence[str], output: Path) -> None:
    """Writes the results of a classifier to three files, and prints the scores of its classes.

    For `p.parquet`, `p.report.json` has the scores and the confusion matrix, `p.confusion.png` is a
    picture of the matrix, and `p.worst.csv` has the rows with the highest loss. Runs on the host.

    Args:
      parts: The columns of each part of the predictions, in order.
      output_names: The names of the columns that the model has computed.
      output: The path of the file of predictions.

    Raises:
      UsageError: When the predictions are not those of a classifier, or a package is missing.
      StorageError: When a file cannot be written.
    """
    import pandas

    metrics = import_runtime("sklearn.metrics", "evaluate")
    figures = import_runtime("matplotlib.figure", "evaluate")

    results: list[np.ndarray] = []
    worst_rows: list[pandas.DataFrame] = []
    row_count = 0
    for columns in parts:
        label, scores = read_scores(columns, output_names)
        if row_count == 0:
            # The first part decides: all logits of a smaller one may happen to be in 0..1.
            are_probabilities = not np.any((scores < 0) | (scores > 1))
        if scores.shape[1] == 1:
            # The number is for class 1 of two.
            others = 1 - scores if are_probabilities else np.zeros_like(scores)
            scores = np.hstack([others, scores])
        if are_probabilities:
            losses = -np.log(scores.clip(1e-30))
        else:
            losses = -tf.nn.log_softmax(scores).numpy()
        predicted = losses.argmin(axis=1)
        results.append(np.stack([label, predicted]))

        table = pandas.DataFrame(index=range(row_count, row_count + len(label)))
        for name, column in columns.items():
            if column.ndim == 1:
                table[name] = to_list(column)
        loss = losses[table.index - row_count, label]
        # An output that is not a number is as wrong as can be.
        loss[np.isnan(loss)] = np.inf
        table["predicted"] = predicted
        table["probability"] = np.exp(-loss)
        table["loss"] = loss
        worst_rows.append(table.nlargest(_WORST_ROWS, "loss"))
        row_count += len(label)

    label, predicted = np.concatenate(results, axis=1)
    classes = np.union1d(label, predicted)
    report = metrics.classification_report(label, predicted, output_dict=True, zero_division=0)
    matrix = pandas.DataFrame(metrics.confusion_matrix(label, predicted), classes, classes)
    report["classes"] = classes.tolist()
    report["confusion_matrix"] = matrix.to_numpy().tolist()

    rows = [report[str(number)] for number in classes]
    class_scores = pandas.DataFrame(rows, classes)
    lowest = class_scores.nsmallest(_SHOWN_CLASSES, "f1-score").sort_index()
    accuracy = report["accuracy"]
    print(f"accuracy {accuracy:.4f}; {len(lowest)} of {len(classes)} classes:")
    shown_scores = lowest.astype({"support": int})
    print(shown_scores.to_string(float_format="%.2f"))

    shown = lowest.index
    shown_matrix = matrix.loc[shown, shown].to_numpy()
    inches = 2 + 0.4 * len(shown)
    figure = figures.Figure([inches, inches], layout="constrained")
    display = metrics.ConfusionMatrixDisplay(shown_matrix, display_labels=shown)
    display.plot(ax=figure.add_subplot(), colorbar=False, cmap="Blues")
    picture = io.BytesIO()
    figure.savefig(picture)

    worst = pandas.concat(worst_rows).nlargest(_WORST_ROWS, "loss")
    worst_text = worst.to_csv(index_label="row")
    files.write_json(output.with_suffix(".report.json"), report)
    files.write_bytes(output.with_suffix(".confusion.png"), picture.getvalue())
    files.write_text(output.with_suffix(".worst.csv"), worst_text)
    stem = output.with_suffix("")
    print(f"the results are in {stem}.report.json, .confusion.png, .worst.csv")


def read_scores(columns: Arrays, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels, [rows], and the numbers of the model, [rows, classes] or [rows, 1].

    Args:
      columns: The columns of a part.
      names: The names of the columns that the model has computed.

    Raises:
      UsageError: When there are no such columns, or a label is no class of the model.
    """
    names = sorted({"logits", "probabilities"}.intersection(names))[:1] or names
    scores = columns[names[0]]
    label = columns.get("label", np.array(np.nan))
    if label.dtype.kind == "S" and np.char.isdigit(label).all():
        # The labels of a CSV file are texts.
        label = label.astype(np.int64)
    is_number = label.dtype.kind in "biuf"
    is_whole = is_number and np.array_equal(label, np.round(label))
    is_float = scores.dtype.kind == "f"
    has_scores = len(names) == 1 and is_float and scores.ndim <= 2
    if not is_whole or label.ndim > 1 or not has_scores:
        kinds = []
        for name, array in columns.items():
            row_shape = list(array.shape[1:])
            kinds.append(f"{name} {array.dtype}{row_shape}")
        raise UsageError(
            "evaluate: a classifier has a column `label` of whole numbers, and one output (or one"
            " called logits or probabilities) of floats, [] or [classes]; there is"
            f" {', '.join(kinds)}"
        )

    label = label.astype(np.int64)
    scores = scores.reshape(len(label), -1)
    last_class = max(1, scores.shape[1] - 1)
    lowest = label.min()
    highest = label.max()
    if lowest < 0 or highest > last_class:
        raise UsageError(
            f"evaluate: the labels are {lowest} to {highest}, and the classes of the model"
            f" 0 to {last_class}"
        )
    return label, scores

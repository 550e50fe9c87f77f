"""The results of a classifier: hand-computed values, kinds of outputs, refusals, the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import trainer_kit
from trainer_kit.cli.main import main
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.serving import classification_report
from trainer_kit.serving.classification_report import write_report
from trainer_kit.testing import tiny_experiment
from trainer_kit.testing.tiny_task import tiny_arrays

NAME = "tests_classified_rows"
LABELS = np.array([0, 0, 1, 1, 2])
PROBABILITIES = np.array(
    [[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1], [0.9, 0.06, 0.04]],
    "float32",
)


def read_results(output: Path) -> tuple[dict[str, Any], pandas.DataFrame]:
    """Returns the report and the worst rows beside an output, whose picture has to be a PNG."""
    report = json.loads(output.with_suffix(".report.json").read_text())
    assert output.with_suffix(".confusion.png").read_bytes().startswith(b"\x89PNG")
    return report, pandas.read_csv(output.with_suffix(".worst.csv"))


@pytest.mark.parametrize("are_logits", [False, True])
def test_scores_are_those_computed_by_hand(
    tmp_path: Path, are_logits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    # Logits are probabilities up to a constant.
    outputs = np.log(PROBABILITIES) + 3 if are_logits else PROBABILITIES
    files = np.array(["é.png", "b.png", "c.png", "d.png", "e.png"])
    columns = {"file": np.char.encode(files, "utf-8"), "label": LABELS, "outputs": outputs}
    parts = []
    for rows in (slice(0, 2), slice(2, 5)):
        parts.append({name: column[rows] for name, column in columns.items()})

    write_report(parts, ["outputs"], tmp_path / "p.parquet")

    report, worst = read_results(tmp_path / "p.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p.confusion.png",
        "p.report.json",
        "p.worst.csv",
    ]
    assert report["classes"] == [0, 1, 2]
    # Row 1 is a 0 that became a 1, and row 4 a 2 that became a 0.
    assert report["confusion_matrix"] == [[1, 1, 0], [0, 2, 0], [1, 0, 0]]
    assert report["accuracy"] == pytest.approx(3 / 5)
    assert report["0"] == pytest.approx(
        {"precision": 1 / 2, "recall": 1 / 2, "f1-score": 1 / 2, "support": 2}
    )
    assert report["1"] == pytest.approx(
        {"precision": 2 / 3, "recall": 1, "f1-score": 4 / 5, "support": 2}
    )
    assert report["2"] == {"precision": 0, "recall": 0, "f1-score": 0, "support": 1}
    assert worst["row"].tolist() == [4, 1, 3, 0, 2]
    assert worst["file"].tolist() == ["e.png", "b.png", "d.png", "é.png", "c.png"]
    assert worst["label"].tolist() == [2, 0, 1, 0, 1]
    assert worst["predicted"].tolist() == [0, 1, 1, 0, 1]
    np.testing.assert_allclose(worst["probability"], [0.04, 0.2, 0.6, 0.7, 0.8], rtol=1e-5)
    np.testing.assert_allclose(worst["loss"], -np.log(worst["probability"]), rtol=1e-4)
    printed = capsys.readouterr().out
    assert "accuracy 0.6000; 3 of 3 classes" in printed
    assert "1       0.67    1.00      0.80        2" in printed


@pytest.mark.parametrize(
    ("outputs", "predicted"),
    [
        ([[0.2], [0.9], [0.4]], [0, 1, 0]),
        ([0.2, 0.9, 0.4], [0, 1, 0]),
        ([[-1.0], [0.8], [0.4]], [0, 1, 1]),
        ([[0.2], [3.0], [0.4]], [1, 1, 1]),
    ],
)
def test_a_single_number_is_for_the_second_of_two_classes(
    tmp_path: Path, outputs: list[Any], predicted: list[int]
) -> None:
    array = np.array(outputs, "float32")
    labels = np.array([0, 1, 1])
    # In a part of its own, the last logit might be a probability.
    parts = [{"label": labels[rows], "outputs": array[rows]} for rows in ([0, 1], [2])]

    write_report(parts, ["outputs"], tmp_path / "p.csv")

    _, worst = read_results(tmp_path / "p.csv")
    assert worst.sort_values("row")["predicted"].tolist() == predicted
    numbers = array.ravel()
    expected = numbers if predicted[2] == 0 else 1 / (1 + np.exp(-numbers))
    expected[0] = 1 - expected[0]
    np.testing.assert_allclose(worst.sort_values("row")["probability"], expected, rtol=1e-5)


def test_an_output_that_is_not_a_number_is_the_worst(tmp_path: Path) -> None:
    outputs = PROBABILITIES.copy()
    outputs[3] = np.nan
    outputs[2] = [1, 0, 0]

    write_report([{"label": LABELS, "outputs": outputs}], ["outputs"], tmp_path / "p.npz")

    report, worst = read_results(tmp_path / "p.npz")
    assert worst["row"].tolist()[:2] == [3, 2]
    assert worst["loss"][0] == np.inf
    # The others are still read as probabilities.
    assert worst["probability"].tolist()[2:] == pytest.approx([0.04, 0.2, 0.7], rel=1e-4)
    assert report["confusion_matrix"] == [[1, 1, 0], [2, 0, 0], [1, 0, 0]]


def test_the_labels_of_a_csv_file_are_texts(tmp_path: Path) -> None:
    columns = {"label": LABELS.astype("S"), "outputs": PROBABILITIES}

    write_report([columns], ["outputs"], tmp_path / "p.csv")

    report, _ = read_results(tmp_path / "p.csv")
    assert report["accuracy"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("name", ["logits", "probabilities"])
def test_one_of_several_outputs_has_a_name(tmp_path: Path, name: str) -> None:
    outputs = np.log(PROBABILITIES) if name == "logits" else PROBABILITIES
    columns = {"label": LABELS, "embedding": np.ones((5, 7), "float32"), name: outputs}

    write_report([columns], ["embedding", name], tmp_path / "p.csv")

    report, _ = read_results(tmp_path / "p.csv")
    assert report["accuracy"] == pytest.approx(3 / 5)


def test_of_many_classes_the_lowest_scores_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each class is right once and wrong once, but for the first two, which are never wrong.
    labels = np.repeat(np.arange(40), 2)
    predicted = np.where(np.arange(80) % 2, labels, 2 + (labels - 1) % 38)
    predicted[:4] = labels[:4]
    outputs = np.eye(40, dtype="float32")[predicted] * 9

    write_report([{"label": labels, "outputs": outputs}], ["outputs"], tmp_path / "p.csv")

    report, worst = read_results(tmp_path / "p.csv")
    shown = capsys.readouterr().out
    assert "30 of 40 classes" in shown
    names = [line.split()[0] for line in shown.splitlines() if line[:3].strip().isdigit()]
    assert names == [str(number) for number in range(2, 32)]
    assert len(report["confusion_matrix"]) == 40
    assert len(worst) == 20


def test_all_shown_classes_may_lack_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification_report, "_SHOWN_CLASSES", 3)
    outputs = np.eye(6, dtype="float32")[:5] * 9

    write_report([{"label": np.full(5, 5), "outputs": outputs}], ["outputs"], tmp_path / "p.csv")

    report, _ = read_results(tmp_path / "p.csv")
    assert report["accuracy"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": None}, r"there is outputs float32\[3\]$"),
        ({"label": LABELS / 2}, r"there is label float64\[\], outputs float32\[3\]"),
        ({"label": np.ones((5, 3), int)}, r"there is label int64\[3\]"),
        ({"label": np.array([b"a"] * 5)}, r"there is label \|S1\[\]"),
        ({"outputs": np.ones((5, 2, 2), "float32")}, r"outputs float32\[2, 2\]"),
        ({"outputs": np.array([b"a"] * 5)}, r"outputs \|S1\[\]"),
        ({"other": np.ones((5, 3), "float32")}, r"other float32\[3\]"),
        ({"label": LABELS + 1}, "the labels are 1 to 3, and the classes of the model 0 to 2"),
        ({"label": LABELS - 1}, "the labels are -1 to 1"),
        ({"outputs": np.ones(5, "float32")}, "the classes of the model 0 to 1"),
    ],
)
def test_what_is_no_classifier_is_one_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    columns = {"label": LABELS, "outputs": PROBABILITIES, **changes}
    columns = {name: column for name, column in columns.items() if column is not None}
    names = [name for name in columns if name != "label"]

    with pytest.raises(UsageError, match=message):
        write_report([columns], names, tmp_path / "p.csv")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["sklearn.metrics", "matplotlib.figure"])
def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(
        UsageError, match=r"is not installed; pip install 'tf-trainer-kit\[export\]'"
    ):
        write_report([], ["outputs"], tmp_path / "p.csv")


def test_the_command_evaluates_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_experiment(train_steps=5)
    trainer_kit.register_experiment(NAME)(lambda: config)
    run = tmp_path / "run"
    launch(config, "train", str(run), experiment=NAME)
    output = tmp_path / "p.jsonl"
    arguments = [str(run), f"--output={output}", "--checkpoint=latest"]

    code = main(["predict", *arguments, "--evaluate"])

    assert code == ExitCode.DONE, capsys.readouterr().err
    points, labels = tiny_arrays(False)
    logits = trainer_kit.load_model(run, "latest")(points).numpy()
    predicted = logits.argmax(axis=1)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    report, worst = read_results(output)
    assert report["accuracy"] == pytest.approx((predicted == labels).mean())
    for index, number in enumerate(report["classes"]):
        counts = [((labels == number) & (predicted == other)).sum() for other in report["classes"]]
        assert report["confusion_matrix"][index] == counts
    assert worst["row"].tolist() == np.argsort(-losses)[:20].tolist()
    np.testing.assert_allclose(worst["loss"], np.sort(losses)[::-1][:20], rtol=1e-4)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["label"] for row in rows] == labels.tolist()
    np.testing.assert_allclose([row["outputs"] for row in rows], logits, rtol=1e-5)
    assert f"accuracy {report['accuracy']:.4f}" in capsys.readouterr().out

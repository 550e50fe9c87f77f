"""Predictors: with loaded weights, on the live weights of a training, and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from trainer_kit.compat.tensorpack.predict import (
    DataParallelOfflinePredictor,
    FeedfreePredictor,
    MultiProcessDatasetPredictor,
    MultiTowerOfflinePredictor,
    PredictConfig,
    SimpleDatasetPredictor,
)
from trainer_kit.compat.tensorpack.tfutils.varmanip import dump_session_params

from tests.engine.compat.tensorpack.programs.classifier import IMAGES, LABELS, Program
from trainer_kit.compat.tensorpack import (
    Callback,
    DataParallelInferenceRunner,
    InferenceRunner,
    MultiThreadAsyncPredictor,
    QueueInput,
    ScalarStats,
    SmartInit,
    tfv1,
)
from trainer_kit.compat.tensorpack.installed_package import DOOR
from trainer_kit.compat.tensorpack.program_graph import leave_default_graph
from trainer_kit.compat.tensorpack.tfutils.export import ModelExporter
from trainer_kit.errors import UsageError


class LivePredictions(Callback):
    """Predicts during a training, with predictors on several devices.

    Attributes:
      logits: What each predictor returned before the training and after each epoch.
      values_path: Where the values of the model are stored after each epoch.
    """

    def __init__(self, values_path: Path) -> None:
        self.logits: list[list[np.ndarray]] = []
        self.values_path = values_path

    def _setup_graph(self) -> None:
        self._predictors = [
            self.trainer.get_predictor(["images"], ["logits"], device=0),
            self.trainer.get_predictor(["images"], ["logits"], device=-1),
            self.trainer.get_predictor(["images"], ["logits"], device=1),
        ]

    def _before_train(self) -> None:
        self._predict()

    def _trigger_epoch(self) -> None:
        self._predict()
        dump_session_params(str(self.values_path))

    def _predict(self) -> None:
        # One that is created during the training takes the default session.
        late = self.trainer.get_predictor(["images"], ["logits"])
        predictors = [*self._predictors, late]
        self.logits.append([predict(IMAGES)[0] for predict in predictors])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LivePredictions]:
    """A run of two epochs, with predictions and several evaluations in each."""
    folder = tmp_path_factory.mktemp("predictors")
    program = Program(DOOR, tfv1)
    live = LivePredictions(folder / "values.npz")
    data = program.read_data()
    program.train(
        str(folder / "run"),
        2,
        [
            live,
            InferenceRunner(data, ScalarStats("cost", prefix="first")),
            InferenceRunner(
                QueueInput(data), ScalarStats("cost", prefix="queue"), "SecondTower", device=-1
            ),
            DataParallelInferenceRunner(
                data, ScalarStats("cost", prefix="parallel"), [0, 1], "ThirdTower"
            ),
        ],
        None,
    )
    leave_default_graph()
    return folder, live


def configure(run: tuple[Path, LivePredictions], **options: Any) -> PredictConfig:
    program = Program(DOOR, tfv1)
    names = {"input_names": ["images"], "output_names": ["logits"]}
    return PredictConfig(
        model=program.build_model(),
        session_init=SmartInit(str(run[0] / "run" / "checkpoint")),
        **{**names, **options},
    )


def test_live_predictors_follow_training(run: tuple[Path, LivePredictions]) -> None:
    before, first, second = run[1].logits

    for logits in (before, first, second):
        np.testing.assert_array_equal(logits[0], logits[1])
        np.testing.assert_array_equal(logits[0], logits[2])
        np.testing.assert_array_equal(logits[0], logits[3])
    assert np.abs(first[0] - before[0]).max() > 1e-3
    assert np.abs(second[0] - first[0]).max() > 1e-3


def test_several_inference_runners_agree(run: tuple[Path, LivePredictions]) -> None:
    records = json.loads((run[0] / "run" / "stats.json").read_text())

    assert len(records) == 2
    for record in records:
        assert record["queue_cost"] == pytest.approx(record["first_cost"], rel=1e-6)
        assert record["parallel_cost"] == pytest.approx(record["first_cost"], rel=1e-6)


def test_checkpoints_of_engine_load(run: tuple[Path, LivePredictions]) -> None:
    program = Program(DOOR, tfv1)
    folder = run[0] / "run"
    sources = [folder, folder / "checkpoint", folder / "ckpt-8", folder / "ckpt-8.index"]

    for source in [*sources, run[0] / "values.npz"]:
        predict = program.build_predictor(SmartInit(str(source)))
        logits, _ = predict(IMAGES, LABELS)
        np.testing.assert_array_equal(logits, run[1].logits[2][0])


def test_checkpoint_of_another_model_shows_differences(run: tuple[Path, LivePredictions]) -> None:
    program = Program(DOOR, tfv1)
    checkpoint = SmartInit(str(run[0] / "run"))

    with pytest.raises(UsageError) as error:
        program.build_predictor(checkpoint, model=program.build_model(filters=5))

    text = str(error.value)
    assert "[3, 3, 1, 3] saved, [3, 3, 1, 5] here" in text
    assert "learning_rate" in text
    assert "ignore_mismatch=True" in text
    relaxed = SmartInit(str(run[0] / "run"), ignore_mismatch=True)
    program.build_predictor(relaxed, model=program.build_model(filters=5))


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such checkpoint"):
        SmartInit(str(tmp_path / "model-7"))


def test_all_predictors_agree(run: tuple[Path, LivePredictions]) -> None:
    expected = run[1].logits[2][0]
    data = Program(DOOR, tfv1).read_data()

    both_inputs = {"input_names": ["images", "labels"]}
    results = SimpleDatasetPredictor(configure(run, **both_inputs), data).get_all_result()
    np.testing.assert_allclose(np.concatenate([result[0] for result in results]), expected, 1e-5)

    towers = MultiTowerOfflinePredictor(configure(run), [0, 1])
    np.testing.assert_array_equal(towers.get_predictor(2)[1](IMAGES)[0], expected)

    halves = DataParallelOfflinePredictor(configure(run), [0, 1])(IMAGES[:16], IMAGES[16:])
    np.testing.assert_allclose(np.concatenate(halves), expected, 1e-5)

    asynchronous = MultiThreadAsyncPredictor([towers.get_predictors()[0]], batch_size=4)
    asynchronous.start()
    futures = [asynchronous.put_task([image]) for image in IMAGES]
    np.testing.assert_allclose([future.result()[0] for future in futures], expected, 1e-5)

    feedfree = FeedfreePredictor(configure(run), QueueInput(data))
    np.testing.assert_allclose(feedfree()[0], expected[:8], 1e-5)
    np.testing.assert_allclose(feedfree()[0], expected[8:16], 1e-5)


def test_predictor_in_forked_processes_is_refused() -> None:
    with pytest.raises(UsageError, match="use SimpleDatasetPredictor"):
        MultiProcessDatasetPredictor(None, None, 2)


def test_unknown_tensor_gets_near_names(run: tuple[Path, LivePredictions]) -> None:
    program = Program(DOOR, tfv1)

    with pytest.raises(KeyError) as error:
        program.build_predictor(None, output_names=["logit"])
    assert "the graph has no tensor 'logit:0'; did you mean logits?" in str(error.value)
    with pytest.raises(UsageError, match="did you mean images"):
        program.build_predictor(None, input_names=["image"])

    predict = program.build_predictor(
        SmartInit(str(run[0] / "run")), output_names=["tower0/logits"]
    )
    np.testing.assert_array_equal(predict(IMAGES, LABELS)[0], run[1].logits[2][0])


def test_exported_predictors_compute_the_same(
    run: tuple[Path, LivePredictions], tmp_path: Path
) -> None:
    expected = run[1].logits[2][0]
    exporter = ModelExporter(configure(run))

    exporter.export_serving(str(tmp_path / "serving"))
    exporter.export_compact(str(tmp_path / "compact.pb"))

    with tf.init_scope():
        served = tf.saved_model.load(str(tmp_path / "serving"))
        outputs = served.signatures["prediction_pipeline"](tf.constant(IMAGES))
        np.testing.assert_allclose(next(iter(outputs.values())), expected, 1e-5)
    with tfv1.Session(graph=tfv1.Graph()) as session:
        graph_def = tfv1.GraphDef.FromString((tmp_path / "compact.pb").read_bytes())
        tfv1.import_graph_def(graph_def)
        logits = session.run("import/logits:0", {"import/images:0": IMAGES})
        np.testing.assert_allclose(logits, expected, 1e-5)

"""trainer.export: a run that ends exports its best weights once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from tests.builders import final_record, read_json, replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import PreemptedError, UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.run.progress import Progress
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.serving.export_formats import FORMATS
from trainer_kit.testing.tiny_task import FEATURES

NAME = "tests_export_at_end"
EXPORTED = linear_experiment(
    train_steps=20,
    # The lower the accuracy the better, so that the best weights are not the last ones.
    best_checkpoint_eval_metric="accuracy",
    best_checkpoint_metric_comp="lower",
    export=["saved_model"],
)
trainer_kit.register_experiment(NAME)(lambda: EXPORTED)


class EndRun(Callback):
    """Ends the run at step 10, as early stopping does, or as a SIGTERM does."""

    def __init__(self, is_preempted: bool) -> None:
        self._is_preempted = is_preempted

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step == 10 and self._is_preempted:
            run.trainer.request_stop()
        elif run.step == 10:
            run.stop("no longer improved")


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    return ReadyTrainer(EXPORTED, LinearTask)


def test_a_run_exports_its_best_weights_once(ready: ReadyTrainer, tmp_path: Path) -> None:
    def start() -> None:
        trainer = ready.again(tmp_path)
        launch(EXPORTED, "train_and_eval", str(tmp_path), experiment=NAME, trainer=trainer)

    start()

    best_step = read_json(tmp_path / "best_ckpt" / "info.json")["step"]
    folder = tmp_path / "export" / str(best_step)
    assert best_step == 10
    assert os.listdir(tmp_path / "export") == ["10"]
    assert read_json(folder / "export.json")["step"] == 10
    assert f"# {NAME}, step 10" in (folder / "README.md").read_text()
    features = np.ones((2, FEATURES), "float32")
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    expected = trainer_kit.load_model(tmp_path)(features)
    np.testing.assert_allclose(signature(inputs=tf.constant(features))["outputs"], expected)

    # A second start exports nothing, unless the export is missing, as after a kill.
    (folder / "README.md").write_text("mine")
    start()
    assert (folder / "README.md").read_text() == "mine"
    folder.rename(tmp_path / "moved")
    start()
    assert os.listdir(tmp_path / "export") == ["10"]


def test_an_early_end_is_exported_and_a_preempted_run_is_not(
    ready: ReadyTrainer, tmp_path: Path
) -> None:
    early = tmp_path / "early"
    preempted = tmp_path / "preempted"
    ends_early: dict[str, Any] = {"callbacks": [EndRun(False)], "trainer": ready.again()}

    launch(EXPORTED, "train", str(early), experiment=NAME, **ends_early)
    with pytest.raises(PreemptedError):
        launch(EXPORTED, "train", str(preempted), experiment=NAME, callbacks=[EndRun(True)])

    assert os.listdir(early / "export") == ["10"]
    assert not (preempted / "export").exists()


def test_two_replicas_in_bfloat16_are_exported_and_go_on(tmp_path: Path) -> None:
    config = EXPORTED.replace(runtime={"mixed_precision_dtype": "bfloat16"})
    strategy = replicas(2)

    with precision_scope(config.runtime):
        with strategy.scope():
            task = LinearTask(config.task)
        model, _ = run_experiment(strategy, task, "train", config, str(tmp_path), experiment=NAME)
        policy = keras.config.dtype_policy().name

    # Without a best, the latest weights.
    assert os.listdir(tmp_path / "export") == ["20"]
    record = read_json(tmp_path / "export" / "20" / "export.json")
    assert record["formats"]["saved_model"]["class_agreement"] == 1.0
    assert policy == "mixed_bfloat16"
    assert isinstance(model.trainable_variables[0].value, tf.distribute.DistributedValues)


def test_a_format_that_cannot_be_written_loses_nothing(
    ready: ReadyTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearTask, "postprocess", lambda self, outputs: outputs)
    config = EXPORTED.replace(trainer={"export": ["keras", "saved_model"]})

    with pytest.raises(UsageError, match=r"the run is complete, but trainer\.export: keras: the"):
        launch(config, "train", str(tmp_path), experiment=NAME, trainer=ready.again())

    assert final_record(tmp_path)["step"] == 20
    assert (tmp_path / "export" / "20" / "saved_model.pb").exists()
    # A start that has nothing to do says again what is missing.
    with pytest.raises(UsageError, match=r"export/20 has no keras; remove it to export again"):
        launch(config, "train", str(tmp_path), experiment=NAME, trainer=ready.again())


def test_the_config_names_the_formats_that_exist() -> None:
    config = linear_experiment(export=list(FORMATS))

    assert list(config.trainer.export) == list(FORMATS)


def test_an_export_counts_as_progress_and_may_be_cut() -> None:
    progress = Progress()
    progress.is_exporting = True

    assert progress.get_progress_token() != progress.get_progress_token()
    assert progress.save_late()

"""train_loop runs the functions of a loop by hand, with the numbers of the loop."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import replicas
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError

PAGE = Path(__file__).with_name("loops_by_hand.md").read_text(encoding="utf-8")
METRICS, FUNCTION = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RANDOM = np.random.RandomState(0)
X = RANDOM.rand(40, 784).astype("float32")
Y = RANDOM.randint(0, 10, 40)


def batches(random: bool = False) -> tf.data.Dataset:
    """Returns batches of 16 examples; the last one has 8. Random ones are shuffled twice, with
    noise between.
    """
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    if random:
        noisy = dataset.shuffle(40, seed=2).map(
            lambda x, y: (x + tf.random.uniform([784], seed=3), y)
        )
        dataset = noisy.shuffle(20, seed=4)
    return dataset.batch(16)


def document_names() -> dict[str, Any]:
    """Returns the names that the document uses and does not define, with the same weights each
    time.
    """
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]
    return {
        "keras": keras,
        "tf": tf,
        "time": time,
        "start_time": time.time(),
        "model": keras.Sequential([keras.Input((784,)), *layers]),
        "train_dataset": batches(),
        "val_dataset": batches(),
        "optimizer": keras.optimizers.SGD(learning_rate=1e-3),
        "loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "train_acc_metric": keras.metrics.SparseCategoricalAccuracy(name="acc"),
        "val_acc_metric": keras.metrics.SparseCategoricalAccuracy(name="acc"),
    }


def run_blocks(*blocks: str) -> dict[str, Any]:
    """Runs blocks of the document, and returns their names."""
    names = document_names()
    for block in blocks:
        exec(block.replace("reset_states", "reset_state"), names)
    return names


def build_train_step(names: dict[str, Any]) -> Any:
    """Returns the body of the document's loop as a function, with a condition on a tensor."""
    model = names["model"]
    loss_fn = names["loss_fn"]
    optimizer = names["optimizer"]

    def train_step(x_train: Any, y_train: Any) -> Any:
        with tf.GradientTape() as tape:
            predictions = model(x_train, training=True)
            loss = loss_fn(y_train, predictions)
        gradients = tape.gradient(loss, model.trainable_weights)
        if loss < 1e6:
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        names["train_acc_metric"].update_state(y_train, predictions)
        return loss

    return train_step


def common_arguments(names: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of train_loop that are the same in all tests."""
    return {"epochs": 2, "model": names["model"], "optimizer": names["optimizer"], "verbose": 0}


def assert_same_weights(names: dict[str, Any], expected: dict[str, Any]) -> None:
    weights = names["model"].get_weights()
    expected_weights = expected["model"].get_weights()
    for weight, expected_weight in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(weight, expected_weight, rtol=1e-6, atol=1e-6)


def test_metrics_are_those_that_the_loop_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run_blocks(METRICS)
    printed = re.findall(r"acc.*: (\d\.\d{4})", capsys.readouterr().out)
    assert len(printed) == 4

    names = document_names()

    def test_step(x_val: Any, y_val: Any) -> None:
        names["val_acc_metric"].update_state(y_val, names["model"](x_val, training=False))

    ends: list[Any] = []
    noting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append((batch, logs["acc"]))
    )
    # The rate of the document's optimizer, which the scheduler sets back.
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 1e-3)
    names["optimizer"].learning_rate = 0.5

    history = tk_keras.train_loop(
        build_train_step(names),
        batches(),
        **common_arguments(names),
        metrics=[names["train_acc_metric"]],
        callbacks=[noting, schedule],
        test_step=test_step,
        val_dataset=batches(),
        val_metrics=[names["val_acc_metric"]],
        model_dir=str(tmp_path),
    )
    assert history.model is names["model"]
    assert [batch for batch, _ in ends] == [0, 1, 2, 0, 1, 2]
    assert [accuracy for _, accuracy in ends[2::3]] == history.history["acc"]
    assert_same_weights(names, expected)
    rows = zip(history.history["acc"], history.history["val_acc"], strict=True)
    assert [f"{value:.4f}" for row in rows for value in row] == printed
    assert not (tmp_path / "best_ckpt").exists()  # test_step returns no loss


def test_a_tf_function_reads_the_orders_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_blocks(FUNCTION)
    losses = []
    data = batches(random=True)
    for _ in range(2):
        losses_of_batches = [float(expected["train_step"](x, y)) for x, y in data]
        losses.append(np.average(losses_of_batches, weights=[16, 16, 8]))

    names = run_blocks(FUNCTION)

    def test_step(batch: Any) -> Any:
        x_val, y_val = batch
        return names["loss_fn"](y_val, names["model"](x_val, training=False))

    history = tk_keras.train_loop(
        names["train_step"],
        batches(random=True),
        **common_arguments(names),
        test_step=test_step,
        val_dataset=batches(),
        model_dir=str(tmp_path),
    )
    assert_same_weights(names, expected)
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-6)
    assert list(history.history) == ["loss", "val_loss"]
    warning = "train_step updates the metric 'acc', which is not in metrics; it is not reported"
    assert warning in caplog.text
    assert (tmp_path / "best_ckpt").exists()


def test_one_optimizer_of_two_models_resumes_with_any_callbacks(tmp_path: Path) -> None:
    def train_two_models(epochs: int, callbacks: Any, folder: Path) -> list[Any]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(8)])
        decoder = keras.Sequential([keras.Input((8,)), keras.layers.Dense(784)])
        variables = [*model.trainable_variables, *decoder.trainable_variables]
        optimizer = keras.optimizers.SGD(1.0, momentum=0.9)

        def train_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((decoder(model(x)) - x) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        tk_keras.train_loop(
            train_step,
            batches(),
            epochs=epochs,
            model=model,
            optimizer=optimizer,
            callbacks=callbacks,
            verbose=0,
            model_dir=str(folder),
        )
        return [variable.numpy().tolist() for variable in variables]

    expected = train_two_models(3, None, tmp_path / "straight")
    for epochs in (1, 2, 3):
        keras.layers.Dense(1)  # Keras counts layers in their names
        callbacks = [keras.callbacks.Callback()] if epochs == 2 else None
        resumed = train_two_models(epochs, callbacks, tmp_path / "stopped")

    assert resumed == expected


def test_scalars_of_a_dict_are_means_over_the_examples(tmp_path: Path) -> None:
    names = document_names()
    sums = [float(tf.reduce_sum(x)) for x, _ in batches()]

    def train_step(x: Any, y: Any) -> dict[str, Any]:
        return {
            "loss": names["loss_fn"](y, names["model"](x)),
            "sum": tf.reduce_sum(x),
            "inputs": x,
        }

    def test_step(x: Any, y: Any) -> dict[str, Any]:
        return {"loss": tf.reduce_max(x), "sum": tf.reduce_sum(x), "labels": y}

    history = tk_keras.train_loop(
        train_step,
        batches(),
        **common_arguments(names),
        test_step=test_step,
        val_dataset=batches(),
        model_dir=str(tmp_path),
    ).history
    assert list(history) == ["loss", "sum", "val_loss", "val_sum"]
    np.testing.assert_allclose(
        history["sum"], [np.average(sums, weights=[16, 16, 8])] * 2, rtol=1e-6
    )
    np.testing.assert_allclose(history["val_sum"], history["sum"], rtol=1e-6)
    assert (tmp_path / "best_ckpt").exists()


def test_each_epoch_of_some_steps_begins_at_the_start(tmp_path: Path) -> None:
    def train_step(x: Any, y: Any) -> tuple[Any, Any]:
        return tf.reduce_sum(x), x  # the first part is the loss

    history = tk_keras.train_loop(
        train_step,
        batches(),
        **common_arguments(document_names()),
        steps_per_epoch=1,
        model_dir=str(tmp_path),
    ).history

    first_sum = np.sum(X[:16])
    assert history.keys() == {"loss"}
    np.testing.assert_allclose(history["loss"], [first_sum, first_sum], rtol=1e-6)


def step_that_returns(value: Any) -> Any:
    return lambda x, y: value


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"train_step": step_that_returns(None)}, r"train_step returned no loss.*return loss"),
        (
            {"train_step": step_that_returns({"error": 1.0})},
            r"train_step returned no loss.*return a dict",
        ),
        ({"train_step": lambda x, y: (x, 1.0)}, r"a tuple that does not begin with the loss"),
        ({"train_step": lambda x, y, z: 1.0}, r"train_step\(x, y, z\) cannot be called .* 2 parts"),
        (
            {"step_per_epoch": 3},
            r"train_loop has no argument 'step_per_epoch'; did you mean steps_per_epoch",
        ),
        (
            {"model": tf.Module()},
            r"model is a Module; train_loop takes a Keras model.*trainer_kit\.Task",
        ),
        ({"test_step": step_that_returns(None)}, r"val_dataset is missing.*both or none"),
        (
            {"test_step": step_that_returns(None), "val_dataset": batches},
            r"evaluation has no result.*val_metrics",
        ),
    ],
)
def test_a_mistake_is_reported(mistake: dict[str, Any], message: str, tmp_path: Path) -> None:
    names = document_names()
    arguments = {
        "train_step": build_train_step(names),
        "train_ds": batches(),
        **common_arguments(names),
        **mistake,
    }
    if "val_dataset" in arguments:
        arguments["val_dataset"] = batches()

    with pytest.raises(UsageError, match=message):
        tk_keras.train_loop(**arguments, model_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_model_on_several_replicas_is_refused(tmp_path: Path) -> None:
    with replicas(2).scope():
        names = document_names()
    with pytest.raises(UsageError, match=r"2 replicas.*call fit"):
        tk_keras.train_loop(
            build_train_step(names), batches(), **common_arguments(names), model_dir=str(tmp_path)
        )

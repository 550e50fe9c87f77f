"""Compares a fit that is killed in its third epoch with one that is not: Keras's BackupAndRestore, and trainer_kit.

    python -m scripts.keras_resume

Prints, for both, how far weights and history of the killed and restarted fit are from those of an unbroken one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

EPOCHS, STEPS, KILLED_AT = 8, 20, 50  # step 50 is in the middle of the third epoch
DOORS = ("keras", "keras_each_5_batches", "trainer_kit")


def main() -> None:
    """Runs each door unbroken and killed, and prints the differences; first those of two unbroken fits of Keras."""
    print(f"{EPOCHS} epochs of {STEPS} steps; killed with SIGKILL in step {KILLED_AT}, then started again")
    print(f"{'door':<22}{'weights':>12}{'val_loss':>12}{'rate':>12}   epochs in the history")
    _print_row("keras, not killed", *(_result("keras", kills=False) for _ in range(2)))
    for door in DOORS:
        _print_row(door, *(_result(door, kills=kills) for kills in (False, True)))


def _print_row(name: str, whole: Any, again: Any) -> None:
    pairs = zip(whole["weights"], again["weights"], strict=True)
    weights = max(np.abs(np.subtract(one, other)).max() for one, other in pairs)
    loss, rate = (abs(again["history"][log][-1] - whole["history"][log][-1]) for log in ("val_loss", "learning_rate"))
    epochs = f"{len(again['history']['loss'])} of {len(whole['history']['loss'])}"
    print(f"{name:<22}{weights:>12.3g}{loss:>12.3g}{rate:>12.3g}   {epochs}")


def _result(door: str, *, kills: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        if kills:
            code, _ = _run(door, folder, KILLED_AT)
            assert code == -signal.SIGKILL, code
        code, output = _run(door, folder, 0)
    assert code == 0, code
    return json.loads(output.splitlines()[-1])


def _run(door: str, folder: str, kill: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "scripts.keras_resume", door, folder, str(kill)]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    return ended.returncode, ended.stdout


def train(door: str, folder: str, kill: int) -> None:
    """Trains with dropout, Adam and ReduceLROnPlateau, and prints history and weights; kills itself at a step."""
    import keras

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    random = np.random.RandomState(0)
    x = random.randn(STEPS * 32 + 200, 8).astype("float32")
    y = x[:, :3].argmax(1)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.03)
    callbacks = [plateau, *_killing(model, kill)]
    options = {"epochs": EPOCHS, "validation_data": (x[-200:], y[-200:]), "verbose": 0}
    history = _fit(door, folder, model, x[:-200], y[:-200], callbacks=callbacks, **options)
    print(json.dumps({"history": history.history, "weights": [one.tolist() for one in model.get_weights()]}))


def _killing(model: Any, kill: int) -> list[Any]:
    import keras

    def end(batch: int, logs: Any) -> None:
        if model.optimizer.iterations == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    return [keras.callbacks.LambdaCallback(on_train_batch_end=end)] if kill else []


def _fit(door: str, folder: str, model: Any, x: Any, y: Any, *, callbacks: list[Any], **options: Any) -> Any:
    if door == "trainer_kit":
        from trainer_kit.compat import keras as tk_keras

        return tk_keras.fit(model, x, y, callbacks=callbacks, **options, model_dir=folder)
    import keras

    often: dict[str, Any] = {"save_freq": 5} if door == "keras_each_5_batches" else {}
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", **often)
    return model.fit(x, y, callbacks=[backup, *callbacks], **options)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))

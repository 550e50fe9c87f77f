"""The file about a divergence: the command that repeats it, the first bad variable, gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit import apply_gradients, train
from trainer_kit.callbacks.recovery import (
    compute_gradient_norms,
    find_nonfinite_examples,
    find_nonfinite_variable,
    format_rerun_command,
)
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer_creation import create_trainer

OVERRIDES = (
    "trainer.train_steps=13,trainer.steps_per_loop=1,trainer.summary_interval=1,"
    "trainer.recovery_max_trials=0"
)


def _run_commands(commands: str) -> list[str]:
    """Returns the arguments that `commands` give to python, which does nothing but print them."""
    shell = f'python() {{ printf "%s\\n" "$@"; }}; {commands}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, with a space in its path, and two checkpoints with similar names."""
    folder = tmp_path / "my run"
    folder.mkdir()
    for name in ("ckpt-10.index", "ckpt-10.data-00000-of-00001", "ckpt-100.index"):
        (folder / name).write_text(name)

    return folder


@pytest.mark.parametrize(
    "dropped",
    [
        "--model_dir {} --max_restarts 3 --from_step 5",
        "--model_dir={} --max_restarts=3 --from_step=5",
        "-max_restarts=3 -model_dir {}",
    ],
)
def test_command_repeats_the_run_with_its_flags_elsewhere(
    folder: Path, dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [
        "--experiment=digits",
        "--config_file",
        "my config.yaml",
        "--params_override=task.name='it is'",
        "--eval_name",
        "model_dir",
    ]
    flags = [flag.format(folder) for flag in dropped.split()]
    monkeypatch.setattr(sys, "argv", [train.__file__, *flags, *kept])
    again = f"{folder}/diverged/again"

    commands = format_rerun_command(str(folder), str(folder / "ckpt-10"), 13)

    assert _run_commands(commands) == [
        "-m",
        "trainer_kit.train",
        *kept,
        f"--model_dir={again}",
        f"--params_override={OVERRIDES}",
    ]
    assert sorted(os.listdir(again)) == ["ckpt-10.data-00000-of-00001", "ckpt-10.index"]


@pytest.mark.parametrize("program", ["program.py", "train.py"])
def test_for_another_program_a_comment_says_how_to_repeat_it(
    folder: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(folder / program), "--experiment=digits"])
    commands = format_rerun_command(str(folder), str(folder / "ckpt-10"), 13)
    again = folder / "diverged" / "again"

    assert _run_commands(commands) == []
    assert sorted(os.listdir(again)) == ["ckpt-10.data-00000-of-00001", "ckpt-10.index"]
    assert commands.endswith(
        f"# then run your program again with model_dir={again} and {OVERRIDES}"
    )


def test_without_a_checkpoint_the_run_is_repeated_from_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [train.__file__, "--experiment=digits"])

    assert _run_commands(format_rerun_command(str(folder), None, 13))[2:4] == [
        "--experiment=digits",
        f"--model_dir={folder}/diverged/again",
    ]
    assert os.listdir(folder / "diverged" / "again") == []


def _build_module() -> tf.Module:
    module = tf.Module()
    module.count = tf.Variable(7, name="count")
    module.first = tf.Variable([1.0, 2.0], name="first")
    module.second = tf.Variable([3.0], name="second", dtype=tf.bfloat16)
    return module


def _build_keras() -> keras.Model:
    layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *layers], name="net")


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize(
    ("make", "places", "names"),
    [
        (_build_keras, (1, 3), ("net/dense/bias", "net/dense_1/kernel")),
        (_build_module, (1, 2), ("first:0", "second:0")),
    ],
)
def test_first_variable_that_is_not_finite_is_named(
    make: Any, places: tuple[int, int], names: tuple[str, str], bad: float
) -> None:
    model = make()

    assert find_nonfinite_variable(model) is None

    for place, name in ((places[1], names[1]), (places[0], names[0])):
        values = model.variables[place].numpy().copy()
        values.flat[-1] = bad
        model.variables[place].assign(values)
        assert find_nonfinite_variable(model) == name


def _create_trainer(task_type: type[TinyTask] = TinyTask, precision: str | None = None) -> Any:
    clipped = {"optimizer": {"type": "adam", "adam": {"global_clipnorm": 1e-3}}}
    runtime = {"mixed_precision_dtype": precision}  # the optimizer goes by it, the layers do not
    config = tiny_experiment().replace(trainer={"optimizer_config": clipped}, runtime=runtime)
    return create_trainer(config, task_type(config.task))


@pytest.mark.parametrize("precision", ["float16", None])  # the loss of float16 is scaled
def test_norms_are_taken_before_clipping_and_leave_no_trace(precision: str | None) -> None:
    trainer = _create_trainer(precision=precision)
    points, labels = next(iter(trainer.train_dataset))
    weights = [variable.value for variable in trainer.model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = trainer.task.build_losses(labels, trainer.model(points, training=True))

    expected = [float(tf.norm(gradient)) for gradient in tape.gradient(loss, weights)]
    norms = compute_gradient_norms(trainer, trainer.next_batch())

    assert list(norms) == [
        f"sequential/{layer}/{name}"
        for layer in ("dense", "dense_1")
        for name in ("kernel", "bias")
    ]
    assert list(norms.values()) == pytest.approx(expected, rel=1e-5)
    assert not tf.config.functions_run_eagerly()

    trainer.train(tf.constant(1))  # in graph, where a look at the gradients would fail

    assert int(trainer.global_step) == 2


class _GraphOnly(TinyTask):
    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        loss = self.build_losses(inputs[1], model(inputs[0], training=True))
        variables = model.trainable_variables
        apply_gradients(
            optimizer, zip(tf.gradients(loss, [v.value for v in variables]), variables, strict=True)
        )
        return {self.loss: loss}


def test_a_step_that_cannot_run_eagerly_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer = _create_trainer(_GraphOnly)

    assert compute_gradient_norms(trainer, trainer.next_batch()) == {}
    assert (
        "the norms of the gradients could not be computed: tf.gradients is not supported when eager"
        in caplog.text
    )

    trainer.train(tf.constant(1))  # in graph again

    assert int(trainer.global_step) == 1


def test_examples_that_are_not_finite_are_found_beside_scalars() -> None:
    values = tf.constant([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    words = tf.ragged.constant([["a"], [], ["b"]])
    batch = {
        "rate": tf.constant(0.5),
        "values": values,
        "words": words,
        "number": tf.constant([1, 2, 3]),
    }

    assert find_nonfinite_examples(tf.distribute.get_strategy(), batch) == [1, 2]

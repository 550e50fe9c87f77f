"""Whether op determinism is enabled, in a separate process: TensorFlow cannot disable it."""

from __future__ import annotations

import tensorflow as tf

from tests.fork_server import ForkServer
from trainer_kit.checkpoints.state.random_state import prepare_process_generators
from trainer_kit.runtime.determinism import is_op_determinism_enabled


def _ask_in_graph() -> bool:
    answers = []
    tf.function(lambda: answers.append(is_op_determinism_enabled()))()
    return answers[0]


def enable() -> None:
    """The answer is not remembered. The seed makes the process's generators."""
    assert not is_op_determinism_enabled()
    assert not _ask_in_graph()
    tf.random.set_seed(3)
    tf.config.experimental.enable_op_determinism()
    assert is_op_determinism_enabled()
    assert _ask_in_graph()
    state = prepare_process_generators(5)["tensorflow"]
    assert (
        state.numpy() == tf.random.Generator.from_seed(tf.compat.v1.get_seed(5)).state.numpy()
    ).all()
    assert prepare_process_generators(6)["tensorflow"] is state


def test_the_answer_is_no_until_it_is_enabled() -> None:
    assert not is_op_determinism_enabled()

    with ForkServer() as server:
        ended = server.run(enable)

    assert ended.code == 0, ended.text

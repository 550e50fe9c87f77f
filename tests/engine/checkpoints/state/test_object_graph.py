"""The message in which TensorFlow writes the objects of a checkpoint. The rest is in test_restore.py."""

from __future__ import annotations

import pytest

from trainer_kit.checkpoints.state import object_graph as module
from trainer_kit.errors import TrainerKitError


def test_without_the_message_the_error_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MESSAGE", "tensorflow.NoSuchMessage")
    with pytest.raises(TrainerKitError, match="install the TensorFlow of requirements"):
        module.object_graph(b"")

"""Environment variables that have to be right before TensorFlow and Keras are imported."""

from __future__ import annotations

import os

from trainer_kit.errors import UsageError

# Devices of NVIDIA, also under Windows' subsystem for Linux, of AMD, and of TPUs.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")


def prepare_environment() -> None:
    """Checks and sets the variables of a command. It is called before TensorFlow is imported.

    TensorFlow's notes are left out. Its errors are left out, too, in a single process without a
    GPU, which would begin with an error of `cuInit`. A value of TF_CPP_MIN_LOG_LEVEL is kept.

    Raises:
      UsageError: When Keras would not run on TensorFlow.
    """
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        raise UsageError(
            f"KERAS_BACKEND={backend}: trainer_kit trains with TensorFlow; unset it, or set it to"
            " tensorflow"
        )
    needs_errors = "TF_CONFIG" in os.environ or any(map(os.path.exists, _DEVICES))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if needs_errors else "3")

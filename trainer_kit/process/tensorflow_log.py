"""What TensorFlow itself prints on the terminal of a command."""

from __future__ import annotations

import os

# The devices of an NVIDIA driver, also under Windows' subsystem for Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


def quiet_tensorflow() -> None:
    """Leaves out TensorFlow's notes. To be called before TensorFlow is imported.

    Its errors are left out, too, on a machine without a GPU: each of its processes would begin with
    an error of `cuInit`. A value of TF_CPP_MIN_LOG_LEVEL that the user has set is kept.
    """
    has_driver = any(map(os.path.exists, _DRIVERS))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if has_driver else "3")

"""The data and the choice of optimizer that all contenders share. No TensorFlow, because PyTorch uses it too."""

from __future__ import annotations

import numpy as np

BATCH, CLASSES = 32, 10
EXAMPLES = 1797  # as many as there are scanned digits
LENGTH, VOCABULARY, WIDTH, HEADS, BLOCKS = 16, 64, 32, 4, 2  # of the transformer
RATE = 0.01  # learning rate


def optimizer_name(net: str) -> str:
    """Returns the optimizer's name for a net: adam for the transformer, else sgd."""
    return "adam" if net == "transformer" else "sgd"


def arrays(net: str, examples: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Returns random features and labels: float32 [examples, 64] or [examples, 32, 32, 3] and int32 [examples].

    For the transformer both are int32 [examples, 16].
    """
    random = np.random.default_rng(0)
    if net == "transformer":
        text = random.integers(0, VOCABULARY, (examples, LENGTH + 1)).astype(np.int32)
        return text[:, :-1], text[:, 1:]
    shape = (32, 32, 3) if net == "conv" else (64,)
    return random.random((examples, *shape), np.float32), random.integers(0, CLASSES, examples).astype(np.int32)

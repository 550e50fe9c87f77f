"""Scanned handwritten digits and a small dense net.

Importing this registers it, without TensorFlow.
"""

from trainer_kit.experiments.digits_mlp.config import DigitsMlpConfig, digits_mlp

__all__ = ["DigitsMlpConfig", "digits_mlp"]

"""Scanned handwritten digits and a small convolutional net.

Importing this registers it, without TensorFlow.
"""

from trainer_kit.experiments.digits.config import DigitsConfig, digits

__all__ = ["DigitsConfig", "digits"]

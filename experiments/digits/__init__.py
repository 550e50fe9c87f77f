"""Scanned handwritten digits and a small convolutional net. Importing this registers the experiment, without TensorFlow."""

from experiments.digits.config import DigitsConfig, digits

__all__ = ["DigitsConfig", "digits"]

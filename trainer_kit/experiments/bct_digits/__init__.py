"""Backward-compatible embeddings of digits. Importing this registers it, without TensorFlow."""

from trainer_kit.experiments.bct_digits.config import BctDigitsConfig, OldModelConfig, bct_digits

__all__ = ["BctDigitsConfig", "OldModelConfig", "bct_digits"]

"""Python's own library, character by character, and a small transformer.

Importing this registers it, without TensorFlow.
"""

from trainer_kit.experiments.char_lm.config import CharLmConfig, char_lm

__all__ = ["CharLmConfig", "char_lm"]

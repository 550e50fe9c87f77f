"""A GAN on scanned handwritten digits. Importing this registers it, without TensorFlow."""

from trainer_kit.experiments.gan_digits.config import GanDigitsConfig, gan_digits

__all__ = ["GanDigitsConfig", "gan_digits"]

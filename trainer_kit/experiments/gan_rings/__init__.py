"""A GAN on eight clusters of points in a ring. Importing this registers it, without TensorFlow."""

from trainer_kit.experiments.gan_rings.config import GanRingsConfig, gan_rings

__all__ = ["GanRingsConfig", "gan_rings"]

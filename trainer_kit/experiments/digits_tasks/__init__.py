"""Two tasks on images of digits that share a net.

Importing this registers it, without TensorFlow.
"""

from trainer_kit.experiments.digits_tasks.config import DigitsTasksConfig, LabelConfig, digits_tasks

__all__ = ["DigitsTasksConfig", "LabelConfig", "digits_tasks"]

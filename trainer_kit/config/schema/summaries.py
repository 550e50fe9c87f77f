"""Config of the summaries that a run writes of named tensors."""

from __future__ import annotations

from typing import Literal

from trainer_kit.config.schema.base import Config, configclass


@configclass
class SummaryConfig(Config):
    """A summary of a tensor, with its value in the last step of a training loop or of an evaluation.

    Attributes:
      tensor: The name of the tensor, of trainer_kit.expose or of a layer.
      type: What is written: `scalar` reports the tensor with the metrics of the loop; `histogram` and `image` go to
        TensorBoard. An image is a tensor [batch, height, width, channels], of which the first three are shown.
      of: Which steps expose the tensor: those of training, of evaluation, or both.
    """

    tensor: str
    type: Literal["scalar", "histogram", "image"] = "scalar"
    of: Literal["training", "evaluation", "both"] = "training"

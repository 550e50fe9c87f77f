"""PyTorch Lightning, where torch and lightning are installed: the same nets, batches, optimizers and metrics.

The function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from torch import nn

from scripts.benchmarks import samples
from scripts.benchmarks.pacer import Pacer


class _Block(nn.Module):
    """A causal block of the transformer, like the one in `nets`."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(samples.WIDTH) for _ in range(2)])
        self.attention = nn.MultiheadAttention(samples.WIDTH, samples.HEADS, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(samples.WIDTH, 4 * samples.WIDTH), nn.ReLU(), nn.Linear(4 * samples.WIDTH, samples.WIDTH)
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(samples.LENGTH))

    def forward(self, features: Any) -> Any:
        normed = self.norms[0](features)
        features = features + self.attention(normed, normed, normed, attn_mask=self.mask, need_weights=False)[0]
        return features + self.dense(self.norms[1](features))


class _Step(lightning.LightningModule):
    """A net, its loss, its accuracy and its optimizer."""

    def __init__(self, net: str) -> None:
        super().__init__()
        self._adam, self.net = samples.optimizer_name(net) == "adam", _net(net)

    def training_step(self, batch: Any, number: int) -> Any:
        features, labels = batch
        logits = self.net(features).flatten(0, -2)
        labels = labels.flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("training_loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", (logits.detach().argmax(-1) == labels).float().mean(), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adam if self._adam else torch.optim.SGD
        return kind(self.parameters(), lr=samples.RATE)


class _Turns(lightning.Callback):
    """Callback that takes turns at the ends of epochs, so that nothing is called during an epoch."""

    def __init__(self, pacer: Pacer, steps: int) -> None:
        self._pacer, self._steps = pacer, steps

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._pacer.done(self._steps)


def fit(pacer: Pacer, folder: str, *, net: str, epoch: int) -> None:
    """Trains with Lightning's Trainer in epochs of `epoch` steps; data in memory, without checkpoints or logger."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    features, labels = (torch.from_numpy(array) for array in samples.arrays(net, epoch * samples.BATCH))
    if net == "conv":
        features = features.permute(0, 3, 1, 2).contiguous()  # channels come first
    data = torch.utils.data.TensorDataset(features, labels.long())
    loader = torch.utils.data.DataLoader(data, samples.BATCH, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Turns(pacer, epoch)],
        default_root_dir=folder,
    )
    trainer.fit(_Step(net), loader)


def _net(net: str) -> nn.Module:
    if net == "dense":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, samples.CLASSES))
    if net == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, samples.CLASSES),
        )
    blocks = [_Block() for _ in range(samples.BLOCKS)]
    embedding, norm = nn.Embedding(samples.VOCABULARY, samples.WIDTH), nn.LayerNorm(samples.WIDTH)
    return nn.Sequential(embedding, *blocks, norm, nn.Linear(samples.WIDTH, samples.VOCABULARY))

"""Predictions for arrays: Keras' predict and trainer_kit's.

Each function is run by a process of its own, takes its turns from a Pacer and never returns.
"""

from __future__ import annotations

import keras

import trainer_kit as tk
from scripts.benchmarks import nets
from scripts.benchmarks.pacer import Pacer


def predict(pacer: Pacer, folder: str, *, net: str, rows: int, is_ours: bool = False) -> None:
    """Predicts all rows again and again.

    Args:
      pacer: The pacer that assigns the turns.
      folder: Not used.
      net: See nets.build.
      rows: The number of rows.
      is_ours: Whether trainer_kit predicts.
    """
    del folder
    model = nets.build(keras, net)
    features, _ = nets.arrays(net, rows)
    while True:
        if is_ours:
            tk.predict(model, features, batch_size=nets.BATCH)
        else:
            model.predict(features, batch_size=nets.BATCH, verbose=0)
        pacer.report_steps(rows)

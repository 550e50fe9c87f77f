"""Draws all learning-rate schedules of the config, with settings as an example, into one picture.

    python -m scripts.draw_schedules schedules.png

It needs the extra `experiments`. Each panel has the settings of its schedule as its title.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from matplotlib.figure import Figure

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.optimizers.learning_rate import create_learning_rate

STEPS, COLUMNS = 1000, 4
EXAMPLES: dict[str, dict[str, Any]] = {
    "constant": {"learning_rate": 0.1},
    "stepwise": {"boundaries": [300, 600], "values": [0.1, 0.03, 0.01]},
    "exponential": {"initial_learning_rate": 0.1, "decay_steps": 300, "decay_rate": 0.5},
    "polynomial": {"initial_learning_rate": 0.1, "decay_steps": 800, "power": 2.0},
    "cosine": {"initial_learning_rate": 0.1, "decay_steps": 1000},
    "cosine_restarts": {"initial_learning_rate": 0.1, "first_decay_steps": 140, "m_mul": 0.8},
    "one_cycle": {"max_learning_rate": 0.1, "total_steps": 1000},
    "inverse_time": {"initial_learning_rate": 0.1, "decay_steps": 100, "decay_rate": 0.5},
    "power": {"initial_learning_rate": 0.1},
    "power_linear": {"initial_learning_rate": 0.1, "total_decay_steps": 1000, "linear_decay_fraction": 0.5},
    "power_with_offset": {"initial_learning_rate": 0.1, "offset": 200, "pre_offset_learning_rate": 0.02},
    "step_cosine_with_offset": {"boundaries": [0, 300, 1000], "values": [0.1, 0.03, 0.0]},
}


def draw(path: Path) -> None:
    """Writes the picture to `path`, as PNG."""
    rows = -(-len(EXAMPLES) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 2.6 * rows), layout="constrained")
    for number, (kind, settings) in enumerate(EXAMPLES.items(), start=1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        axes.plot(range(STEPS + 1), _rates(kind, settings), lw=1.5)
        axes.set_title(f"{kind}\n{', '.join(f'{name}={value}' for name, value in settings.items())}", fontsize=7)
        axes.set_ylim(bottom=0.0)
        axes.tick_params(labelsize=7)
    figure.savefig(path, format="png", dpi=110)


def _rates(kind: str, settings: dict[str, Any]) -> list[float]:
    section: Any = {"type": kind, kind: settings}
    rate = create_learning_rate(OptimizationConfig(learning_rate=section))
    if isinstance(rate, float):
        return [rate] * (STEPS + 1)
    rates = tf.function(lambda: tf.map_fn(rate, tf.range(STEPS + 1), fn_output_signature=tf.float32))()
    return [float(one) for one in rates]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the schedules into the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path("schedules.png"), help="The file of the picture.")
    draw(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()

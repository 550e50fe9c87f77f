"""Time series forecasting: bikes rented in each of the next 24 hours, from the week before.

The model is a small convolutional net over windows of the series.

Data: 80 weeks of an invented hourly series with a trend, daily and weekly seasons, and weather that
lasts for days. The last fifth of the time is held out. For your own series, set `task.path` to a
CSV file and `task.column`; its rows are equally far apart in time.

Run:
  python -m trainer_kit.train --experiment=time_series --mode=train_and_eval --model_dir=runs/series

Expected: a mean absolute error of 13.2 bikes, within 0.3. The same hour of the day before: 23.7; of
the week before: 27.3.

Cost: half a minute on two CPU cores.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd

import trainer_kit as tk


@tk.configclass
class TimeSeriesConfig(tk.TaskConfig):
    """The settings of the task; `--params_override=task.horizon=48` changes one.

    Attributes:
      path: The CSV file of your series; empty means an invented series.
      column: The column of the file that is predicted.
      history: The number of values that the net sees.
      horizon: The number of values that it predicts, which follow the history.
      width: The number of filters of each convolution.
    """

    path: str = ""
    column: str = "value"
    history: int = 7 * 24
    horizon: int = 24
    width: int = 32


@tk.register_task(TimeSeriesConfig)
class TimeSeriesTask(tk.Task):
    """Predicts the next values of a series from those before."""

    def build_model(self) -> keras.Model:
        """Returns the net: values, float32 [batch, history], to the next ones [batch, horizon]."""
        layers = keras.layers
        config = self.task_config
        values = keras.Input((config.history,))
        # The trend leaves the range of the training part. So the net sees and predicts how far
        # values are from the mean of their own window.
        mean = keras.ops.mean(values, axis=1, keepdims=True)
        scale = keras.ops.std(values, axis=1, keepdims=True) + 1e-3
        features = keras.ops.expand_dims((values - mean) / scale, axis=-1)
        for _ in range(3):
            features = layers.Conv1D(config.width, 5, 2, "same", activation="relu")(features)
        forecast = layers.Dense(config.horizon)(layers.Flatten()(features))
        return keras.Model(values, forecast * scale + mean)

    def build_inputs(self, params: tk.DataConfig, input_context: Any = None) -> tk.ArraySource:
        """Returns windows in two parts, float32 [batch, history] and [batch, horizon]."""
        config = self.task_config
        series = read_series(config.path, config.column)
        training, held_out = split_series(series, config.history)
        part = training if params.is_training else held_out
        windows = np.lib.stride_tricks.sliding_window_view(part, config.history + config.horizon)
        return tk.ArraySource((windows[:, : config.history], windows[:, config.history :]), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the mean absolute error of the batch."""
        return keras.losses.MeanAbsoluteError()(labels, model_outputs)

    def build_metrics(self, training: bool = True) -> list[Any]:
        """Returns the mean absolute error over all hours, in the unit of the series."""
        return [keras.metrics.MeanAbsoluteError("mean_absolute_error")]


def split_series(series: np.ndarray, history: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training part and the held-out part of a series, each [hours].

    The held-out part is later, so that no future value is trained on. It begins with a history from
    the training part, which is known when its first value is predicted.
    """
    end = len(series) * 4 // 5
    return series[:end], series[end - history :]


def read_series(path: str, column: str) -> np.ndarray:
    """Returns the series, float32 [values]."""
    if path:
        return pd.read_csv(path)[column].to_numpy("float32")
    return make_series()


def make_series(weeks: int = 80) -> np.ndarray:
    """Returns bikes that were rented in each hour, float32 [hours]."""
    random = np.random.default_rng(0)
    hours = np.arange(weeks * 7 * 24)
    trend = 100 + 0.01 * hours
    day = np.sin(2 * np.pi * hours / 24 - 2) + 0.5 * np.sin(4 * np.pi * hours / 24 - 1)
    week = np.where(hours // 24 % 7 < 5, 1.0, -0.5)  # other hours are busy at weekends

    weather = np.zeros(len(hours))
    for hour in hours[1:]:
        weather[hour] = 0.98 * weather[hour - 1] + random.normal(0, 0.02)
    noise = random.normal(0, 4, len(hours))
    return ((trend + 40 * day * week) * np.exp(weather) + noise).astype("float32")


@tk.register_experiment("time_series")
def time_series() -> tk.ExperimentConfig:
    """Returns the config: 2,000 steps of Adam, with a cosine."""
    train = {"is_training": True, "seed": 1, "global_batch_size": 64}
    held_out = {"is_training": False, "global_batch_size": 64}
    steps = {"train_steps": 2000, "steps_per_loop": 200, "validation_interval": 400}
    adam = {"optimizer": "adam", "learning_rate": 0.002, "schedule": "cosine"}
    best = {"best_checkpoint_eval_metric": "mean_absolute_error"}
    trainer = {**steps, **best, "best_checkpoint_metric_comp": "lower", "optimizer_config": adam}
    data = {"train_data": train, "validation_data": held_out}
    config = tk.ExperimentConfig(task=TimeSeriesConfig())
    return config.replace(task=data, trainer=trainer, runtime={"random_seed": 1})

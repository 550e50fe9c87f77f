"""The types of objects of TF Model Garden, and of those that come from either framework.

They serve readers and type checkers. Other modules import them under TYPE_CHECKING, so that none of
them has to import all of Model Garden.
"""

from __future__ import annotations

from typing import TypeAlias

import orbit
import tf_keras
from official.core import base_task
from official.modeling.hyperparams import base_config

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.training.base_trainer import BaseTrainer

# Every config object of Model Garden, also a section.
GardenConfig: TypeAlias = base_config.Config
GardenTask: TypeAlias = base_task.Task
# The config of an experiment. Those of Model Garden that train several tasks have no common base
# but the class of all its configs.
ExperimentParams: TypeAlias = ExperimentConfig | GardenConfig
# A trainer that the engine can drive, by itself or in a TrainerAdapter.
AdaptableTrainer: TypeAlias = BaseTrainer | orbit.StandardTrainer
# Model Garden's own optimizers and loss-scale wrappers are subclasses of these.
GardenOptimizer: TypeAlias = tf_keras.optimizers.Optimizer | tf_keras.optimizers.legacy.Optimizer

"""Configuration, data, optimizer, loop and log of a training run."""

from training.config import TrainConfig, parse_config
from training.data import load_samples
from training.log import RunLog
from training.loop import data_order, number_of_steps, train

__all__ = ["RunLog", "TrainConfig", "data_order", "load_samples", "number_of_steps", "parse_config", "train"]

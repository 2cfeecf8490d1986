"""Configuration, data, optimizer, loop and log of a training run."""

from training.config import TrainConfig, parse_config
from training.data import DataFormat, load_samples
from training.log import RunLog
from training.loop import Run, data_order, loss_weights, number_of_steps, train
from training.schedule import check_schedule

__all__ = [
    "DataFormat",
    "Run",
    "RunLog",
    "TrainConfig",
    "check_schedule",
    "data_order",
    "load_samples",
    "loss_weights",
    "number_of_steps",
    "parse_config",
    "train",
]

"""Configuration, data, optimizer, loop and log of a training run."""

from training.config import TrainConfig, parse_config
from training.data import DataFormat, load_samples
from training.head import attach_loss_head, choose_cross_entropy
from training.log import RunLog
from training.loop import Run, data_order, loss_weights, number_of_steps, train

__all__ = [
    "DataFormat",
    "Run",
    "RunLog",
    "TrainConfig",
    "attach_loss_head",
    "choose_cross_entropy",
    "data_order",
    "load_samples",
    "loss_weights",
    "number_of_steps",
    "parse_config",
    "train",
]

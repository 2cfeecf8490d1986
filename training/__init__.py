"""Configuration, data, optimizer, loop and log of a training run."""

from typing import TYPE_CHECKING

from moe.lazy import import_on_demand

if TYPE_CHECKING:
    from training.adapters import lora_of
    from training.alike import check_resumed, compare_data, compare_models, start_facts
    from training.balance import choose_balance, correction_biases
    from training.config import TrainConfig, parse_config
    from training.data import print_preview
    from training.determinism import compute_deterministically
    from training.elastic import fit_to_ranks
    from training.engine import assemble, place
    from training.facts import first_lines, untrained
    from training.inputs import Inputs, make_prompts, read_inputs
    from training.log import RunLog
    from training.loop import Run, data_order, number_of_steps, train
    from training.memory import beside, forecast, measured_peak
    from training.output import clear_output, output_directory
    from training.products import choose_products
    from training.profiling import check_profile
    from training.schedule import check_schedule
    from training.tf32 import compute_in_tf32
    from training.trackers import check_trackers
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "Inputs",
    "Run",
    "RunLog",
    "TrainConfig",
    "assemble",
    "beside",
    "check_profile",
    "check_resumed",
    "check_schedule",
    "check_trackers",
    "choose_balance",
    "choose_products",
    "clear_output",
    "compare_data",
    "compare_models",
    "compute_deterministically",
    "compute_in_tf32",
    "correction_biases",
    "data_order",
    "first_lines",
    "fit_to_ranks",
    "forecast",
    "lora_of",
    "make_prompts",
    "measured_peak",
    "number_of_steps",
    "output_directory",
    "parse_config",
    "place",
    "print_preview",
    "read_inputs",
    "start_facts",
    "train",
    "untrained",
]

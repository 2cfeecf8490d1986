"""Configuration, data, optimizer, loop and log of a training run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "training":  # `python -m training` in a checkout: its own modules, whatever is installed
    sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "public"))

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.training.config.train_config import TrainConfig, parse_config
    from expertmesh.training.data import print_preview
    from expertmesh.training.engine import Engine, assemble, place
    from expertmesh.training.facts import dispatch_lines, first_lines, pipeline_lines, replica_lines
    from expertmesh.training.finished import Finished, find_finished, held_line
    from expertmesh.training.foresight.rank_memory import Forecast, NoForecast, beside, forecast, measured_peak
    from expertmesh.training.inputs import Inputs, make_prompts, read_inputs
    from expertmesh.training.loop import Run, Trained, data_order, number_of_steps, order_facts, train
    from expertmesh.training.optim.schedule import check_schedule
    from expertmesh.training.output import clear_output, output_directory
    from expertmesh.training.resume import find_resume
    from expertmesh.training.start import check_apart, prepare_process, start_engine
    from expertmesh.training.watch.alike import compare_data, start_facts
    from expertmesh.training.watch.log import RunLog
    from expertmesh.training.watch.profiling import check_profile
    from expertmesh.training.watch.trackers import check_trackers
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "Engine",
    "Finished",
    "Forecast",
    "Inputs",
    "NoForecast",
    "Run",
    "RunLog",
    "TrainConfig",
    "Trained",
    "assemble",
    "beside",
    "check_apart",
    "check_profile",
    "check_schedule",
    "check_trackers",
    "clear_output",
    "compare_data",
    "data_order",
    "dispatch_lines",
    "find_finished",
    "find_resume",
    "first_lines",
    "forecast",
    "held_line",
    "make_prompts",
    "measured_peak",
    "number_of_steps",
    "order_facts",
    "output_directory",
    "parse_config",
    "pipeline_lines",
    "place",
    "prepare_process",
    "print_preview",
    "read_inputs",
    "replica_lines",
    "start_engine",
    "start_facts",
    "train",
]

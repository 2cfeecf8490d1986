"""report.html: one self-contained page about a run, made from what the run has written to its output directory."""

from typing import TYPE_CHECKING

from expertmesh.moe.base.lazy import import_on_demand

if TYPE_CHECKING:
    from expertmesh.training.report.history import History, read_history, read_record
    from expertmesh.training.report.page import State, sweep_reports, write_report
    from expertmesh.training.report.profiles import BETWEEN, PROFILES
else:
    __getattr__ = import_on_demand(__name__)

__all__ = [
    "BETWEEN",
    "PROFILES",
    "History",
    "State",
    "read_history",
    "read_record",
    "sweep_reports",
    "write_report",
]

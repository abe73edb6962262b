"""Pipeline schedules as values: who does what, in which order. Pure Python.

`make` makes one of those that papers describe, `check` proves that any schedule can be run and counts what it holds.
"""

from __future__ import annotations

from meshwright.schedule.actions import Action, Kind, Schedule
from meshwright.schedule.check import Checked, check
from meshwright.schedule.errors import ScheduleError
from meshwright.schedule.registry import NAMES, bubble, find, formula, make

__all__ = [
    "NAMES",
    "Action",
    "Checked",
    "Kind",
    "Schedule",
    "ScheduleError",
    "bubble",
    "check",
    "find",
    "formula",
    "make",
]

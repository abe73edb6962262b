"""How a schedule hears "no"."""

from __future__ import annotations

from meshwright.spec.errors import UserError


class ScheduleError(UserError):
    """A schedule that cannot be run: where, and what would mend it. Ranks and actions of a rank count from 0."""

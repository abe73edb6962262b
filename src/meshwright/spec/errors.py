"""The two ways in which a user hears "no" from Meshwright."""

from __future__ import annotations


class UserError(Exception):
    """Wrong input: what is wrong, where it was written, what would be right. Exit code 2, no traceback."""


class RunError(Exception):
    """A run that failed while running, for a reason a user can read. Exit code 1, no traceback."""


class FailsAgainError(RunError):
    """A run that failed and would fail again in the same way, so that nobody is to restart it."""

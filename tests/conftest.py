"""Fixtures for every test."""

from __future__ import annotations

import os

# Several tests run beside each other, and a thread that waits for its share of an operation does so without pause.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests are imported by path (importlib mode), so their folder is not on the path by itself; test ranks get it too.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks

# Nothing is timed: machines are shared.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The session's pool of test ranks; see tests/ranks.py."""
    with Ranks() as pool:
        yield pool

"""Fixtures for the tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to train in but for a text of some pages, text.txt; the working directory from here on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {i}: {i * i}\n" for i in range(400)))
    return tmp_path

"""Shared by the tests of deployments."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployments import Federated


@pytest.fixture
def federated(tmp_path: Path) -> Federated:
    return Federated(tmp_path / "data")

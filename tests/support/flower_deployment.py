"""Makes scripts/flower importable for tests, and says why they are skipped where Flower is not installed."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
sys.path.append(str(Path(__file__).parents[2] / "scripts" / "flower"))

import keys  # noqa: E402
from deployment import Deployment, free_port, marked  # noqa: E402

__all__ = ["Deployment", "free_port", "keys", "marked"]

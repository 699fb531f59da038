"""The default model, fetched and converted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.stack.model import fetch_default
from services.worker.native.prepare import prepare

CACHE = Path(__file__).parents[3] / ".headrace" / "models"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a directory of float32 weights."""
    return prepare(fetch_default(CACHE, lambda what, share: None), CACHE, lambda loading: None)

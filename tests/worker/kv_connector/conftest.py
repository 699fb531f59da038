"""The patience of all tests of this folder."""

from __future__ import annotations

import pytest

from services.worker.kv_connector import embedding_store


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kvbm answers an engine's embeddings late only where a test has it so."""
    monkeypatch.setattr(embedding_store, "WAIT_S", 30.0)

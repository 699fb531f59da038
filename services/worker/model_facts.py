"""Finds the facts of a model that this worker does not compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Loading, Ready
from services.worker.model.facts import facts_of


def find_facts(config: WorkerConfig, report: Callable[[Loading], None]) -> Ready:
    """Return the facts that the model's files say; those of a GGUF file are converted first, which takes long and is
    reported. Raise ModelError."""
    source = Path(config.model)
    if not source.is_dir():
        from services.worker.native.prepare import prepare  # here: it imports NumPy

        source = prepare(source, Path(config.cache), report)
    return facts_of(source, block_size=config.block_size, capacity_blocks=config.capacity_blocks)

"""The worker's process: `python -m services.worker --config worker.toml`."""

from __future__ import annotations

from services.worker.config import WorkerConfig
from services.worker.model.card import served_name
from services.worker.model_check import check_files
from services.worker.service import serve
from shared.runtime.lifecycle import run

CLOSING_S = 15.0
"""Seconds after the drain for the engine's end, the last frames and the registration."""


def main() -> None:
    """Run until a signal, then end the process with an exit status."""
    run("worker", WorkerConfig, serve, drain_limit_s, check=check_files, labels=served_labels)


def served_labels(config: WorkerConfig) -> dict[str, str]:
    """Return the labels of all series of the worker."""
    return {"model": served_name(config)}


def drain_limit_s(config: WorkerConfig) -> float:
    """Return the seconds from the first signal to the forced end."""
    return config.drain_s + CLOSING_S


if __name__ == "__main__":
    main()

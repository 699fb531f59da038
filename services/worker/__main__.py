"""The worker's process: `python -m services.worker --config worker.toml`."""

from __future__ import annotations

from services.worker.config import WorkerConfig
from services.worker.model_check import check_files
from services.worker.service import serve
from shared.runtime.lifecycle import Process, run

CLOSING_S = 15.0
"""Beyond the drain: the engine's end, the last frames, the registration."""


def main() -> None:
    """Runs until a signal; ends the process with a status."""
    run("worker", WorkerConfig, _process, serve, check=check_files)


def _process(config: WorkerConfig) -> Process:
    return Process.of(config, config.drain_s + CLOSING_S)


if __name__ == "__main__":
    main()

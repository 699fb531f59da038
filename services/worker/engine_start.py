"""Starts the engine that the settings name."""

from __future__ import annotations

from services.worker.config import WorkerConfig
from services.worker.engine.contract import Engine
from services.worker.engine.process import EngineProcess


async def start_engine(config: WorkerConfig, model_name: str, instance: str) -> Engine:
    """Start an engine: in a process of its own, or in this one if it computes nothing."""
    if config.engine != "attached":
        return await EngineProcess.start(config, model_name, instance)
    from services.worker.attached.local_engine import LocalEngine  # here: it imports HTTP's client

    return await LocalEngine.start(config, model_name, instance)


async def start_standby(config: WorkerConfig, model_name: str, instance: str) -> Engine:
    """Start an engine that stands by."""
    return await EngineProcess.start(config, model_name, instance, stands_by=True)

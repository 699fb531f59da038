"""A service that does nothing, run as a process by test_lifecycle.py; `mode` says how it misbehaves."""

from __future__ import annotations

import asyncio
from typing import Literal, NoReturn

from shared.config import ServiceConfig
from shared.errors import ModelError
from shared.metrics import counter
from shared.runtime.lifecycle import Service, run
from shared.runtime.runtime import Runtime


class SmallConfig(ServiceConfig, frozen=True, forbid_unknown_fields=True):
    mode: Literal["good", "stubborn", "crash", "model", "idle tasks", "uncancellable"] = "good"
    drain_limit_s: float = 30.0


async def serve(runtime: Runtime, config: SmallConfig) -> None:
    counter("headrace_small_starts", "", "Starts of the small service").make(runtime.registry).inc()
    match config.mode:
        case "crash":
            raise ValueError("a bug")
        case "model":
            runtime.tasks.create_task(refuse())
        case "idle tasks":
            runtime.tasks.create_task(asyncio.Event().wait())
    runtime.health.progress = 42
    runtime.health.ready()
    while config.mode in ("stubborn", "uncancellable"):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if config.mode == "stubborn":
                raise
    await runtime.stopping.wait()


def check(config: SmallConfig) -> None:
    if config.mode == "model":
        raise ModelError("model.safetensors: torn")


async def refuse() -> NoReturn:
    raise ModelError("model.safetensors: torn")


def main() -> NoReturn:
    run(Service("worker", SmallConfig, serve, lambda config: config.drain_limit_s, check=check))


if __name__ == "__main__":
    main()

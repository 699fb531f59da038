"""Engines of vLLM's shape that run over one real kvbm: how tests make them, ask them, and wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from services.worker.vllm.connector.settings import ConnectorSettings
from tests.kvbm.store_rig import LIMIT_S, Store, until
from tests.worker.vllm.connector.vllm_shaped import Engine, Request

PROMPT = [1, 2, 1, 1, 2, 2, 1, 2, 1]
"""Four blocks can be loaded: the last token is always computed."""


def connector_settings(directory: Path, **fields: Any) -> ConnectorSettings:
    return ConnectorSettings(pool=str(directory / "pool"), timeout_s=1.0, verify=True, **fields)


@asynccontextmanager
async def engine(directory: Path, name: str, draw: Random | None = None, **fields: Any) -> AsyncIterator[Engine]:
    """Run an engine that is attached."""
    options = {key: fields.pop(key) for key in ("blocks", "ranks", "depth", "drafts") if key in fields}
    made = Engine(connector_settings(directory, **fields), draw or Random(0), time.monotonic, name=name, **options)
    try:
        yield made
    finally:
        made.close()


async def steps(engine: Engine, met: Callable[[], bool]) -> None:
    """Step until `met()` holds."""
    async with asyncio.timeout(LIMIT_S):
        while not met():
            engine.step()
            engine.half.blocks.validate()
            await asyncio.sleep(0.0005)


async def attached(engine: Engine) -> None:
    await steps(engine, lambda: bool(engine.half.link.kvbm))


async def answer(engine: Engine, name: str, prompt: list[int] = PROMPT, **fields: Any) -> Request:
    """Have the engine answer a prompt, and come to rest."""
    request = Request(name, prompt, fields.pop("most", 3), fields.pop("salt", ""))
    engine.add(request)
    await steps(engine, lambda: not engine.has_work)
    return request


async def no_ticket(store: Store) -> None:
    """Wait until the kvbm holds nothing for anybody."""

    def met() -> bool:
        now = [layout.tickets.statistics() for layout in store.service.layouts.open.values()]
        return not any(each.stores or each.fetches or each.expired for each in now)

    await until(met)

"""Small real programs as children of an `up`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deploy.local.stack.stack import Launch
from deploy.local.stack.supervise import Program

LIMIT_S = 180.0
STAYS = "while :; do sleep 0.02; done"


def launch(name: str, script: str, *, stage: int = 0, limit_s: float = 10.0, observe: str = "") -> Launch:
    return Launch(Program(name, stage, limit_s), ("/bin/sh", "-c", script), observe)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 files and processes offer nothing to wait on
            await asyncio.sleep(0.01)

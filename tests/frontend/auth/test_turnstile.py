from __future__ import annotations

import asyncio

import pytest

from services.frontend.auth.turnstile import Turnstile


async def entered(turnstile: Turnstile, key: str) -> asyncio.Task[None]:
    task = asyncio.create_task(turnstile.enter(key))
    await asyncio.sleep(0)
    return task


async def test_who_waits_enters_when_another_leaves() -> None:
    turnstile = Turnstile(1, 1)
    await turnstile.enter("a")
    waiting = await entered(turnstile, "a")
    other = await entered(turnstile, "b")
    assert not waiting.done()
    turnstile.leave("a", too_much=True)
    assert turnstile.is_slow("a")
    await other
    assert not waiting.done()
    turnstile.leave("b")
    await waiting


@pytest.mark.parametrize("called", [False, True])
async def test_one_that_is_cancelled_holds_no_place(called: bool) -> None:
    turnstile = Turnstile(1, 1)
    await turnstile.enter("a")
    waiting = await entered(turnstile, "b")
    if called:
        turnstile.leave("a")  # it is its turn, and it does not know yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not called:
        turnstile.leave("a")
    await turnstile.enter("c")

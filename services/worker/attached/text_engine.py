"""The engine of a server that takes and gives text alone: it says that the server lives, and has the model.

    shell ◀── Ready ──── the server lists the model
    shell ◀── Failed ─── a look finds it away, unhealthy, or without the model; the supervisor starts the engine again

Frontends send requests to the server themselves, since bytes that nothing here reads would only be copied on their way.
So this engine has no attempts, and its load is what routers have reserved.

A look asks for /health, which not each server has, and for /v1/models, which each has. It asks for no token: at a
provider each would cost money, and some servers only embed.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, assert_never

import msgspec
from msgspec import Meta, Struct

from services.worker.attached.engine import AttachedChannel
from services.worker.attached.server import Server
from services.worker.attached.vllm_api import VLLM
from services.worker.config import EngineConfig
from services.worker.contracts.messages import (
    BlockExplained,
    CancelAttempt,
    EncodeImage,
    EngineOrder,
    ExplainBlock,
    Failed,
    Operate,
    Operated,
    Prefetch,
    ProbeDevice,
    Ready,
    Snapshot,
    Submit,
    TakeEngineSnapshot,
)
from services.worker.engine.async_end import AsyncEnd
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.one_line import one_line
from shared.errors import MALFORMED, ConfigError, HeadraceError, InvalidRequest
from shared.messages.cards import KvLayout

BLOCK_UNITS = 64
"""Units of four bytes of text in a block: routers hash 256 bytes of a prompt at once."""
BLOCKS = 16_384
"""Blocks that a server is assumed to have: four million characters."""
CONTEXT_LENGTH = 1 << 20
"""Tokens of the context, if the server does not say."""


class _Listed(Struct):
    id: str
    max_model_len: Annotated[int, Meta(ge=1)] | None = None


class _Models(Struct):
    data: list[_Listed] | None


_MODELS = msgspec.json.Decoder(_Models)


async def run_text(config: EngineConfig, channel: AttachedChannel) -> Failed | None:
    """Serve until Shutdown, which gives None, or return why not. Raise ChannelClosed."""
    attached, server = config.worker.attached, None
    try:
        server = Server(attached, VLLM, 1)
        context_length = await _look(server, config.model_name, attached.url)
        channel.send(
            Ready(
                context_length=context_length,
                vocab_size=1,
                eos_token_ids=(),
                block_size=BLOCK_UNITS,
                capacity_blocks=config.worker.capacity_blocks or BLOCKS,
                kv_layout=KvLayout("float32", 1, 1, 1, BLOCK_UNITS),
                address=await server.find_address(),
                server=attached.url,
            )
        )
        end = AsyncEnd(channel, channel, handle=lambda order: _answer(channel, order), report=lambda: None)
        looking = asyncio.ensure_future(_look_again(server, config))
        try:
            await end.serve_beside(looking)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
    except ChannelClosed:
        raise
    except (ConfigError, InvalidRequest) as wrong:
        return Failed(reason=str(wrong), model=True)
    except Exception as wrong:  # noqa: BLE001 - the engine's edge: the shell learns of every failure
        return Failed(reason=str(wrong) if isinstance(wrong, HeadraceError) else one_line(wrong))
    finally:
        if server is not None:
            await server.close()
    return None


async def _look_again(server: Server, config: EngineConfig) -> None:
    while True:
        await asyncio.sleep(config.worker.attached.look_s)
        await _look(server, config.model_name, config.worker.attached.url)


async def _look(server: Server, name: str, url: str) -> int:
    """Return the context's length of a model. Raise ConfigError, InvalidRequest and Unavailable if it is not served."""
    await server.ask("/health", empty=range(201, 500))  # not each server has that path, or opens it
    listed = await server.ask("/v1/models", empty=(429,))  # one that limits questions lives
    if not listed:
        return CONTEXT_LENGTH
    try:
        models = _MODELS.decode(listed).data or []
    except MALFORMED as wrong:
        raise ConfigError(f"attached.url: {url}/v1/models is no list of models: {wrong}"[:500]) from None
    found = next((model for model in models if model.id == name), None)
    if found is None:
        has = ", ".join(model.id for model in models)[:200] or "none"
        raise ConfigError(f"attached.url: {url} has no model {name}; it has {has}")
    return found.max_model_len or CONTEXT_LENGTH


def _answer(channel: AttachedChannel, order: EngineOrder) -> None:
    """Answer what the shell asks of an engine: there are no blocks, and nothing to operate."""
    match order:
        case TakeEngineSnapshot(ticket):
            channel.send(Snapshot(ticket, -1, []))
        case ExplainBlock(ticket):
            channel.send(BlockExplained(ticket, [], []))
        case Operate(ticket, operation):
            channel.send(Operated(ticket, failed=f"{operation}: an attached server is not ours"))
        case Submit() | CancelAttempt() | Prefetch() | EncodeImage() | ProbeDevice():
            pass  # it has no attempts
        case _:
            assert_never(order)

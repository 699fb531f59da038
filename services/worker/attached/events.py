"""Reads the KV events of a server that is not ours, from wherever we came in.

The replay, if there is one, gives what came before. Where batches are lost, what is known is forgotten, and the reader
goes on with what comes; a number that goes backwards is a server that was started again.

The worker reads them, and not each router: so only it must reach the server, and one replay serves all routers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from services.worker.config import AttachedConfig
from services.worker.vllm.events import UNREAD_LIMIT, replay
from shared.errors import ConfigError, Unavailable
from shared.messages.kv_events import AllBlocksCleared, KvEvent

_KINDS = {"vllm": "vLLM 0.32", "sglang": "SGLang 0.5.23"}


async def read_events(
    config: AttachedConfig, decode: Callable[[bytes], list[KvEvent]], apply: Callable[[list[KvEvent]], None]
) -> None:
    """Read until cancelled, and pass each batch on. Raise Unavailable if the server was started again, ConfigError
    for an endpoint or for a batch that cannot be read."""
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.set_hwm(UNREAD_LIMIT)
        socket.subscribe(b"")
        socket.connect(config.events)
        following, latest = 0, -1  # the number that comes next, and the last one that was published to us
        missed = await replay(context, config.replay, 0) if config.replay else []
        while True:
            for number, payload in missed:
                if number >= following:
                    if following and number > following:
                        apply([AllBlocksCleared()])
                    following = number + 1
                    apply(decode(payload))
            _, sequence, payload = await socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number <= latest:
                raise Unavailable(f"attached.events: the server was started again: event {number} follows {latest}")
            latest = number
            missed = await replay(context, config.replay, following) if config.replay and number > following else []
            missed.append((number, payload))
    except zmq.ZMQError as wrong:
        raise ConfigError(f"attached.events: {config.events}, attached.replay: {config.replay}: {wrong}") from None
    # A ValueError is also raised for a message of other frames.
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise ConfigError(
            f"attached.events: {config.events} publishes no events as {_KINDS[config.kind]} has them: {wrong}"
        ) from None
    finally:
        context.destroy(linger=0)

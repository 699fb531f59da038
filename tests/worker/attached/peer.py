"""A small server with vLLM's paths, for tests of what a real one does not do at will: be slow, wrong or another."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer

from services.worker.attached.server import TEXT
from tests.servers import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SIZES = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="64",engine="0"} 1.0\n'


class Peer:
    """One server. `said` replaces what a path answers; `seen` has the headers of requests."""

    def __init__(self, model: Path, port: int = 0) -> None:
        self.url = f"http://127.0.0.1:{port or free_port()}"
        self.said: dict[str, Handler] = {}
        self.lines = ['{"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}', "[DONE]"]
        self.seen: list[dict[str, str]] = []
        self.bodies: list[dict[str, object]] = []
        self.tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
        self.models: list[dict[str, object]] = [
            {"id": "tiny", "root": str(model), "max_model_len": 100},
            {"id": "lora", "parent": "tiny"},
        ]
        self.events: dict[str, object] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.headers))
        if request.path in self.said:
            return await self.said[request.path](request)
        match request.path:
            case "/v1/models":
                return web.json_response({"data": self.models})
            case "/tokenize":
                return web.json_response({"tokens": self.tokens})
            case "/version":
                return web.json_response({"version": "0.32.0"})
            case "/kv_event_sources":
                return web.json_response(self.events)
            case "/metrics":
                return web.Response(text=SIZES)
            case "/v1/completions":
                self.bodies.append(await request.json())
                return web.Response(text="".join(f"data: {line}\n\n" for line in self.lines))
        return web.Response()


@asynccontextmanager
async def answering(peer: Peer, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """Let it answer at an address, and the port of its URL; with `tls` over https."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", peer.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, address, int(peer.url.rpartition(":")[2]), ssl_context=tls).start()
    try:
        yield peer
    finally:
        await runner.cleanup()


def says(status: int, text: str = "") -> Handler:
    """Return what answers a path with this."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer

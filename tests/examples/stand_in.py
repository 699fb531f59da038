"""Stands in for the program `vllm`: `serve MODEL --port N …` has vLLM's API, and answers at once without arithmetic."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from aiohttp import web

from benchmarks.gateways_server import Answers, Body

TEXTS = ("/v1/chat/completions", "/v1/completions")


class StandIn:
    """One server."""

    def __init__(self, model: str) -> None:
        self._answers = Answers(Path(model), model)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in self._answers.gets:
            return web.Response(body=self._answers.gets[request.path])
        if request.path not in TEXTS:
            return web.Response(status=404)
        body = msgspec.json.decode(await request.read(), type=Body)
        if not body.stream:
            return web.Response(body=self._answers.whole(request.path, body.tokens), content_type="application/json")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        lines, end = self._answers.streamed(request.path, body)
        for number in range(body.tokens):
            await answer.write(event(lines[number % len(lines)]))
        await answer.write(event(end) + b"data: [DONE]\n\n")
        return answer


def event(chunk: bytes) -> bytes:
    """Return what a chunk of HTTP/1.1 has in it."""
    return chunk.partition(b"\r\n")[2].removesuffix(b"\r\n")


def main() -> None:
    """Serve; the flags of the real program that mean nothing here are passed over."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    flags, _ = parser.parse_known_args()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", StandIn(flags.model).answer)
    web.run_app(app, host="127.0.0.1", port=flags.port, print=None)


if __name__ == "__main__":
    main()

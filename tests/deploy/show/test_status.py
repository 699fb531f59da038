"""deploy/local/show/status.py: what it asks the frontends. The other tests of `status` run a whole `up`."""

from __future__ import annotations

from aiohttp import web

from deploy.local.show.status import model_faults
from tests.servers import free_port

FAULT = "model m: the chat template, line 1: unexpected '}'"


async def test_a_frontend_that_cannot_serve_a_model_says_why() -> None:
    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"reasons": ["the bus is down", FAULT]}, status=503)

    app = web.Application()
    app.router.add_get("/health", health)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert await model_faults("f1", f"http://127.0.0.1:{port}") == [f"frontend f1: {FAULT}"]
        assert await model_faults("f1", f"http://127.0.0.1:{port}/other") == []
    finally:
        await runner.cleanup()
    assert await model_faults("f1", f"http://127.0.0.1:{port}") == []

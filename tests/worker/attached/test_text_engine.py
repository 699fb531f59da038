"""services/worker/attached/text_engine.py: a worker that says that a server lives which takes text alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.worker.attached.text_engine import BLOCK_UNITS, CONTEXT_LENGTH
from services.worker.config import AttachedConfig, WorkerConfig
from shared.errors import ModelError
from shared.messages.generate import Refused
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering, says
from tests.worker.shell import WORKER, Shell, request, running_worker

NAME = "org/tiny:8b"


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    """A server without paths of vLLM's own."""
    one = Peer(write_tiny_model(tmp_path / "tiny"))
    one.models = [{"id": NAME, "owned_by": "library"}, {"id": "other"}]
    one.said["/health"] = says(404)
    return one


def config(peer: Peer, **attached: Any) -> WorkerConfig:
    settings = AttachedConfig(url=peer.url, kind="text", look_s=0.01, limit_s=5.0, **attached)
    return WorkerConfig(model=NAME, model_name=NAME, engine="attached", attached=settings)


async def announced(shell: Shell) -> None:
    await shell.peer.until(lambda: (NAME, WORKER) in shell.directory.cards)


async def test_a_server_that_lists_the_model_is_announced_with_its_url_and_address(peer: Peer) -> None:
    async with answering(peer), running_worker(config(peer)) as shell:
        await announced(shell)
        card = shell.directory.cards[NAME, WORKER]
        assert (card.server, card.address) == (peer.url, peer.url.removeprefix("http://"))
        assert (card.tokenizer_digest, card.block_size, card.context_length) == ("text", BLOCK_UNITS, CONTEXT_LENGTH)
        assert shell.directory.instances[WORKER].events is None
        assert not peer.bodies, "no token is asked for"


async def test_the_context_is_what_the_server_says(peer: Peer) -> None:
    peer.models[0]["max_model_len"] = 4096
    async with answering(peer), running_worker(config(peer)) as shell:
        await announced(shell)
        assert shell.directory.cards[NAME, WORKER].context_length == 4096


async def test_an_attempt_is_refused_since_requests_go_to_the_server_itself(peer: Peer) -> None:
    async with answering(peer), running_worker(config(peer)) as shell:
        await announced(shell)
        assert isinstance(await shell.peer.generate(request("r", [5, 6], model=NAME)), Refused)


@pytest.mark.parametrize("fault", ["unhealthy", "without the model", "gone"])
async def test_a_server_that_goes_away_is_withdrawn_and_comes_back_by_itself(peer: Peer, fault: str) -> None:
    models = peer.models
    async with running_worker(config(peer)) as shell:
        async with answering(peer):
            await announced(shell)
            if fault == "unhealthy":
                peer.said["/health"] = says(503)
            elif fault == "without the model":
                peer.models = [{"id": "another"}]
            if fault != "gone":
                await shell.peer.until(lambda: not shell.directory.cards)
        await shell.peer.until(lambda: not shell.directory.cards)
        peer.said["/health"], peer.models = says(200), models
        async with answering(peer):
            await announced(shell)


async def test_a_server_that_limits_questions_lives(peer: Peer) -> None:
    asked = asyncio.Event()

    async def limits(_: web.Request) -> web.StreamResponse:
        asked.set()
        return web.Response(status=429)

    async with answering(peer), running_worker(config(peer)) as shell:
        await announced(shell)
        peer.said["/v1/models"] = limits
        await asked.wait()
        seen = len(peer.seen)
        await shell.peer.until(lambda: len(peer.seen) > seen + 4)
        assert shell.directory.cards


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (200, "<html>hello</html>", "/v1/models is no list of models: JSON is malformed"),
        (200, '{"data": 5}', "/v1/models is no list of models: Expected `array | null`"),
        (200, '{"data": null}', f" has no model {NAME}; it has none"),
        (200, json.dumps({"data": [{"id": f"m{number}"} for number in range(10_000)]}), f" has no model {NAME}; it "),
        (302, "", "/v1/models answers 302"),
        (401, "", "/v1/models answers 401"),
        (404, "", "/v1/models answers 404"),
    ],
)
async def test_what_is_no_such_server_ends_the_worker_with_one_line(
    peer: Peer, status: int, text: str, said: str
) -> None:
    peer.said["/v1/models"] = says(status, text)
    async with answering(peer):
        with pytest.raises(BaseExceptionGroup) as wrong:
            async with running_worker(config(peer)) as shell:
                await shell.peer.until(lambda: False)
        ended = wrong.value
        while isinstance(ended, BaseExceptionGroup):
            ended = ended.exceptions[0]
        assert isinstance(ended, ModelError)
        assert said in str(ended)
        assert len(str(ended).splitlines()) == 1
        assert len(str(ended)) < 600


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "text", "events": "tcp://127.0.0.1:5"}, "events is set, but kind is text"),
        ({"kind": "text", "grammars": True}, "grammars is set, but kind is text, for which it is not built"),
    ],
)
def test_settings_that_mean_nothing_for_it_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AttachedConfig(url="http://127.0.0.1:1", **settings)


def test_it_needs_the_models_name() -> None:
    with pytest.raises(ValueError, match="model_name, the model's name on the server, is empty"):
        WorkerConfig(model="m", engine="attached", attached=AttachedConfig(url="http://127.0.0.1:1", kind="text"))

"""The suite for pickers, with our own and with a wrong one, and what only ours can be asked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import yaml

from services.frontend.picker.messages import (
    DESTINATION,
)
from services.frontend.picker.wire import MESSAGES, METHOD
from tests.picker import envoy, ours
from tests.picker.__main__ import main, table
from tests.picker.cases import CASES, EVENTS, JSON, Rig, run_cases
from tests.picker.environment import RUNS_HERE
from tests.picker.servers import SimulatedServer
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "picker.md"
needs_envoy = pytest.mark.skipif(not RUNS_HERE, reason="there is no wheel of Envoy for this machine")


@needs_envoy
async def test_every_case_holds_for_our_picker_and_its_choices_are_explained(tmp_path: Path) -> None:
    async with ours.rig(tmp_path) as (rig, up):
        outcomes = await run_cases(rig)
        assert outcomes == dict.fromkeys(CASES, ""), table(outcomes) + up.logs()
        _, _, headers = await rig.post("none", rig.body(), EVENTS)
        told = await ours.explained(up, "tiny", headers["x-request-id"])
        [decision] = told["decisions"]
        assert decision["candidates"]
        status, _, headers = await rig.post("none", b"{", JSON)
        assert status == 200
        notes = (await ours.explained(up, "tiny", headers["x-request-id"]))["decisions"]
        assert notes, "a request whose prompt was not read is explained, too"


class WrongPicker:
    """A picker that forgets the metadata, ignores subsets, and never ends a stream."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def process(self, messages: Any, context: Any) -> None:
        async for message in messages:
            reply = MESSAGES["ProcessingResponse"]()
            if message.HasField("request_headers"):
                option = reply.request_headers.response.header_mutation.set_headers.add()
                option.header.key, option.header.raw_value = DESTINATION, self._endpoint.encode()
                await context.write(reply)


@asynccontextmanager
async def wrong_picker(endpoint: str) -> AsyncIterator[str]:
    """Run it and yield its HOST:PORT."""
    address = f"127.0.0.1:{free_port()}"
    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handler = grpc.stream_stream_rpc_method_handler(
        WrongPicker(endpoint).process,
        request_deserializer=MESSAGES["ProcessingRequest"].FromString,
        response_serializer=MESSAGES["ProcessingResponse"].SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def test_a_wrong_picker_is_found_out(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    servers = [SimulatedServer(f"127.0.0.1:{free_port()}", model) for _ in range(2)]
    async with wrong_picker(servers[0].address) as address, aiohttp.ClientSession() as http:
        outcomes = await run_cases(Rig(address, servers, {}, http, "tiny"), ["health", "places", "killed, fail-open"])
    health, places, killed = outcomes.values()
    assert health.startswith("AioRpcError")
    assert places == f"FULL_DUPLEX_STREAMED: header {servers[0].address!r}, metadata ''"
    assert killed.startswith("(not run: it needs --kill and --start")
    assert "| **fails**: AioRpcError" in table(outcomes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--picker 127.0.0.1:1 --server 127.0.0.1:2", "--picker needs two or more --server"),
        ("--kill x", "--kill, --start and --restart need each other"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_document_has_every_case() -> None:
    text = PAGE.read_text()
    assert [what for what in CASES if f"| {what} |" not in text] == []


def test_the_documents_configuration_is_the_one_that_runs_here() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    asking, policy = map(yaml.safe_load, blocks[:2])
    assert asking == envoy.ext_proc("none")
    assert policy == envoy.servers_cluster([])["load_balancing_policy"]

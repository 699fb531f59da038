"""deploy/nats/cluster.conf on a real server with JetStream: what workers and block stores can read through streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import subjects
from shared.bus.nats_connection import sync
from tests.clusters import nats_users
from tests.event_planes import with_jetstream
from tests.servers import nats_server

ANSWER_LIMIT_S = 60.0
CHAT = subjects.client("default", "chat")
MARKER = subjects.events("default", "marker")
TO_A_WORKER = subjects.worker("default", "b2", "generate")
ANSWERS = "_INBOX_clients.>"
LAST = b"the last"
LEAK = "_INBOX_services.spy.>"
EVERYTHING = [MARKER, CHAT, TO_A_WORKER, ANSWERS]


def in_one_account() -> str:
    """The rules with JetStream where the users are, as before it had an account of its own."""
    apart = nats_users()
    services = next(line for line in apart.splitlines() if "service: { account: EVENTS" in line)
    return apart.replace(services, "").replace("HEADRACE {", "HEADRACE {\n    jetstream: enabled", 1)


@asynccontextmanager
async def connected(url: str, user: str, inbox: str) -> AsyncIterator[Client]:
    client = await nats.connect(url, user=user, password=user, inbox_prefix=inbox)
    yield client
    await client.close()


async def api(client: Client, question: str, **settings: Any) -> dict[str, Any]:
    """Ask JetStream as any client can. Return its answer."""
    asked = client.request(f"$JS.API.STREAM.{question}", json.dumps(settings).encode(), timeout=ANSWER_LIMIT_S)
    answer: dict[str, Any] = json.loads((await asked).data)
    assert "error" not in answer, answer
    return answer


async def ask_a_frontend(url: str) -> None:
    """A client's question, its answer, and what the frontend sends to a worker."""
    async with (
        connected(url, "frontend", "_INBOX_services") as frontend,
        connected(url, "alice", "_INBOX_clients.alice") as alice,
    ):

        async def answer(message: Msg) -> None:
            await frontend.publish(TO_A_WORKER, b"a prompt")
            await frontend.publish(message.reply, b"an answer")

        await frontend.subscribe(CHAT, cb=answer)
        await sync(frontend)
        replies = await alice.subscribe(inbox := alice.new_inbox())
        await alice.publish(CHAT, b"a question", reply=inbox)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            while (await replies.next_msg(timeout=ANSWER_LIMIT_S)).data != b"an answer":
                pass  # a stream that takes the question tells its sender so
        await sync(frontend)


async def taken(url: str, user: str, *, changes: bool, hears: bool) -> tuple[set[str], set[bytes]]:
    """Return the subjects that a stream of this user takes, and what it hears of them through the stream. Wait until
    it has the last message, and, if it `hears` anything, has heard it."""
    heard = set[bytes]()

    async def hear(message: Msg) -> None:
        heard.add(message.data)

    stream: dict[str, Any] = {"name": "spy", "storage": "memory", "retention": "limits", "no_ack": True}
    wanted = {"subjects": EVERYTHING, "republish": {"src": ">", "dest": LEAK}}
    async with connected(url, user, "_INBOX_services") as spy:
        await spy.subscribe(LEAK, cb=hear)
        if changes:
            await api(spy, "CREATE.spy", **stream, subjects=[MARKER])
        await api(spy, "UPDATE.spy" if changes else "CREATE.spy", **stream, **wanted)
        await ask_a_frontend(url)
        await spy.publish(MARKER, LAST)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            while MARKER not in (counts := await counted(spy)) or (hears and LAST not in heard):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await sync(spy)
    return set(counts), heard


async def counted(client: Client) -> dict[str, int]:
    """Return how many messages of each subject the stream has."""
    found = await api(client, "INFO.spy", subjects_filter=">")
    counts: dict[str, int] = found["state"].get("subjects", {})
    return counts


@pytest.mark.parametrize("user", ["worker", "kvbm"])
@pytest.mark.parametrize("changes", [False, True], ids=["made", "changed"])
async def test_no_question_or_answer_is_read_through_a_stream_that_a_worker_or_a_block_store_makes(
    tmp_path: Path, user: str, changes: bool
) -> None:
    with nats_server(tmp_path, with_jetstream(tmp_path) + nats_users()) as server:
        subjects_taken, heard = await taken(server.url, user, changes=changes, hears=False)
    assert subjects_taken == {MARKER}, "an event, which the user may publish, and nothing else"
    assert heard == set()


async def test_it_would_be_read_if_jetstream_were_in_the_account_of_the_users(tmp_path: Path) -> None:
    """The spy of the test above is a real one."""
    with nats_server(tmp_path, with_jetstream(tmp_path) + in_one_account()) as server:
        subjects_taken, heard = await taken(server.url, "kvbm", changes=False, hears=True)
    assert {CHAT, TO_A_WORKER, MARKER} < subjects_taken
    assert {b"a question", b"a prompt", b"an answer"} < heard

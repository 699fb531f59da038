"""services/frontend/requests/images_apart.py: an encode worker is waited for, and no longer than it may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBus
from shared.hashing import salted_image_key
from shared.messages.encode import ENCODE, ENCODED, Encode, Encoded
from shared.messages.select import Overlap, Select, Selected, SelectReply
from tests.frontend.images.samples import data_uri, picture
from tests.frontend.images.test_reader import TEMPLATE, eyes
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, Seen, World, clients
from tests.tiny_model import write_tiny_model

RED, BLUE = picture(colour=255), picture("JPEG", (30, 20), colour=0)
CHAT: Any = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": data_uri(RED)}},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": {"url": data_uri(BLUE, "image/jpeg")}},
        ],
    }
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("seeing"), marks=("<image>",))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


class ScriptedEncoder:
    """An encode worker that says what a test says."""

    def __init__(self, w: World) -> None:
        self._bus = MemoryBus(w.broker)
        self.orders: Seen[Encode] = Seen()
        self.answer: Encoded | None = Encoded()
        """None means no answer, as of a frozen worker."""
        self.waiting: list[Message] = []
        self.held = False
        """Answers are given by `release`."""

    async def start(self) -> None:
        await self._bus.subscribe(subjects.worker(NAMESPACE, "e1", "encode"), self._on_order)

    async def _on_order(self, message: Message) -> None:
        if self.answer is not None and not self.held:
            await self._bus.publish(message.reply, ENCODED.encode(self.answer))
        self.waiting.append(message)
        self.orders.add(ENCODE.decode(message.payload))

    async def release(self) -> None:
        for message in self.waiting:
            await self._bus.publish(message.reply, ENCODED.encode(Encoded()))


@asynccontextmanager
async def apart(
    seeing: Path, *, images: tuple[int, ...] = (0, 1), wait_s: float = DEADLINE_S
) -> AsyncIterator[tuple[World, ScriptedEncoder]]:
    """A frontend whose router has images encoded by e1, before w1 or w2 answers."""
    async with eyes(seeing) as w:

        def choose(select: Select) -> SelectReply:
            worker = next(each for each in w.router.workers if each not in select.excluded)
            chosen = Selected(select.request, select.attempt, worker, 0, "r1", Overlap(), "")
            return replace(chosen, encode="e1", encode_images=images, encode_wait_s=wait_s)

        w.router.answer = choose
        encoder = ScriptedEncoder(w)
        await encoder.start()
        yield w, encoder


async def ask(w: World, **more: Any) -> str:
    async with clients(w) as (client, _), asyncio.timeout(DEADLINE_S):
        answer = await client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=more)
        return answer.choices[0].message.content or ""


def counted(w: World) -> tuple[float, float]:
    return w.metric("headrace_images_apart_total", outcome="encoded"), w.metric(
        "headrace_images_apart_total", outcome="failed"
    )


async def test_images_are_encoded_before_their_worker_hears_of_the_request(seeing: Path) -> None:
    async with apart(seeing) as (w, encoder):
        encoder.held = True
        asking = asyncio.ensure_future(ask(w, cache_salt="a tenant's"))
        orders = await encoder.orders.at_least(2)
        assert w.workers[0].generates.all == []
        await encoder.release()
        assert await asking == "fine"
        [sent] = w.workers[0].generates.all
        [select] = w.router.asked.all
        keys = [salted_image_key(image.key, "a tenant's") for image in sent.images]
        assert {order.key for order in orders} == set(keys)
        assert keys[0] != sent.images[0].key, "another tenant's is another key"
        assert {order.pixels for order in orders} == {image.pixels for image in sent.images}
        assert {order.model for order in orders} == {MODEL}
        assert select.image_hashes == keys[0][:8] + keys[1][:8]
        assert select.image_ends == tuple(image.start + image.tokens for image in sent.images)
        assert counted(w) == (2, 0)


async def test_only_the_images_that_the_router_names_are_sent(seeing: Path) -> None:
    async with apart(seeing, images=(1, 7)) as (w, encoder):
        assert await ask(w) == "fine"
        [order] = encoder.orders.all
        assert order.pixels == w.workers[0].generates.all[0].images[1].pixels
        assert counted(w) == (1, 0)


@pytest.mark.parametrize("answer", [Encoded("64 images wait already"), None])
async def test_a_worker_that_refuses_or_says_nothing_costs_no_more_than_its_time(
    seeing: Path, answer: Encoded | None
) -> None:
    async with apart(seeing, wait_s=0.1 if answer is None else DEADLINE_S) as (w, encoder):
        encoder.answer = answer
        assert await ask(w) == "fine"
        assert counted(w) == (0, 2)


async def test_an_encode_worker_that_is_gone_is_not_waited_for(seeing: Path) -> None:
    async with apart(seeing) as (w, _):
        choose = w.router.answer

        def gone(select: Select) -> SelectReply | None:
            chosen = choose(select)
            assert isinstance(chosen, Selected)
            return replace(chosen, encode="e9")

        w.router.answer = gone
        assert await ask(w) == "fine"
        assert counted(w) == (0, 2)


async def test_a_client_that_leaves_meanwhile_has_nothing_computed(seeing: Path) -> None:
    async with apart(seeing) as (w, encoder):
        encoder.held = True
        asking = asyncio.ensure_future(ask(w))
        await encoder.orders.at_least(2)
        asking.cancel()
        await w.workers[0].cancels.at_least(1)
        await encoder.release()
        encoder.held = False
        assert await ask(w) == "fine"
        assert len(w.workers[0].generates.all) == 1, "the first request was never sent"

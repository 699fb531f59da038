"""services/frontend/requests/turn_waits.py: requests wait until their model is awake, in a whole frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from services.frontend.config import LimitsConfig
from shared import subjects
from shared.bus.contract import Message, Subscription
from shared.bus.memory_bus import MemoryBus
from shared.hashing import unpack_tokens
from shared.messages.cards import ASLEEP, INSTANCE, MODEL_CARD, Instance, TurnTaker
from shared.messages.codec import JSON_HEADER
from shared.messages.frames import SHUTTING_DOWN
from shared.messages.generate import Accepted, Generate, GenerateReply, Refused
from shared.messages.turns import MODEL_TURN, WANT_MODEL, ModelTurn, WantModel
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, Seen, World, card_entry, clients, world

DEVICE = "cpu"
LORA = "sql@0123456789abcdef"
LIMITS = LimitsConfig(drain_s=0.0, deadline_s=60.0)
ASKED = {"model": MODEL, "prompt": "count", "max_tokens": 16, "temperature": 0}


class ScriptedDecider:
    """Says what a test says, and notes what frontends want."""

    def __init__(self, w: World, device: str = DEVICE) -> None:
        self._device = device
        self._bus = MemoryBus(w.broker)
        self.wants: Seen[WantModel] = Seen()
        self.turn = ModelTurn(MODEL, "asleep", why="other has its turn")
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(subjects.turns(NAMESPACE, self._device), self._on_want)

    async def die(self) -> None:
        assert self._subscription is not None
        await self._subscription.unsubscribe()

    async def _on_want(self, message: Message) -> None:
        self.wants.add(WANT_MODEL.decode(message.payload))
        await self._bus.publish(message.reply, MODEL_TURN.encode(self.turn))

    async def waited_for(self, waiting: int) -> None:
        """Until a frontend says that this number of requests waits."""
        seen = len(self.wants.all)
        while not any(want.waiting == waiting for want in self.wants.all[seen:]):
            await self.wants.at_least(len(self.wants.all) + 1)


def entries(directory: Path, *, state: str, awake: bool, worker: str = "w1", device: str = DEVICE) -> dict[str, bytes]:
    """What a worker publishes: its address book entry, and its card while it is awake."""
    [(key, card)] = card_entry(worker, directory, lora=(LORA,)).items()
    turns = TurnTaker(device, MODEL_CARD.decode(card, JSON_HEADER))
    entry = Instance(NAMESPACE, "worker", worker, 1, "here", 1, 0.0, "0", state=state, turns=turns)
    own = {subjects.instance_key(NAMESPACE, "worker", worker): INSTANCE.encode(entry, JSON_HEADER)}
    return own | ({key: card} if awake else {})


class TurnWorld:
    def __init__(self, w: World, decider: ScriptedDecider) -> None:
        self.w, self.decider = w, decider
        self.published: dict[str, bytes] = {}

    async def show(self, *, state: str = "", awake: bool = False) -> None:
        self.published.clear()
        self.published.update(entries(self.w.directory, state=state, awake=awake))
        await self.w.registrations["w1"].publish()


@asynccontextmanager
async def sleeping(directory: Path, limits: LimitsConfig = LIMITS) -> AsyncIterator[TurnWorld]:
    """A frontend that knows one model, which sleeps."""
    async with world(directory, announced=False, limits=limits) as w:
        decider = ScriptedDecider(w)
        await decider.start()
        await w.announce_router()
        w.router.workers = ["w1"]
        turns = TurnWorld(w, decider)
        turns.published.update(entries(directory, state=ASLEEP, awake=False))
        await w.announce("w1", turns.published)
        await w.ready()
        yield turns


async def ask(w: World, model: str = MODEL) -> tuple[int, str]:
    """Status and text of a completion, or the message of its error."""
    asked = ASKED | {"model": model}
    async with aiohttp.ClientSession(w.url) as http, http.post("/v1/completions", json=asked) as answer:
        body = await answer.json()
        return answer.status, body["choices"][0]["text"] if answer.status == 200 else body["error"]["message"]


async def test_a_sleeping_model_is_listed_and_a_request_for_it_waits_until_it_is_awake(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w = turns.w
        w.say("one two three")
        async with clients(w) as (client, _):
            assert [model.id async for model in client.models.list()] == [MODEL, "sql"]
        asking = asyncio.ensure_future(ask(w))
        await turns.decider.waited_for(1)
        assert w.router.asked.all == []
        await turns.show(awake=True)
        assert await asking == (200, "one two three")
        await turns.decider.wants.until(WantModel("f1", MODEL, 0, 0.0))
        assert w.metric("headrace_turn_waits_total", outcome="woken") == 1
        assert await ask(w) == (200, "one two three")
        assert w.metric("headrace_turn_wait_seconds_count") == 1


async def test_requests_that_wait_are_reported_to_the_decider_as_one_number_and_again_after_it_was_killed(
    directory: Path,
) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        turns.w.say("one")
        asking = [asyncio.ensure_future(ask(turns.w)) for _ in range(3)]
        await turns.decider.waited_for(3)
        await turns.decider.die()
        next_decider = ScriptedDecider(turns.w)
        await next_decider.start()
        await next_decider.waited_for(3)
        await turns.show(awake=True)
        assert await asyncio.gather(*asking) == [(200, "one")] * 3


async def test_a_wait_has_an_end_which_says_why(directory: Path) -> None:
    limits = replace(LIMITS, asleep_s=0.3)
    async with sleeping(directory, limits) as turns, asyncio.timeout(DEADLINE_S):
        said = f"the model '{MODEL}' is asleep, and was not woken within 0.3 s: "
        assert await ask(turns.w) == (503, said + "other has its turn")
        await turns.decider.die()
        assert await ask(turns.w) == (503, said + "the process that decides whose turn it is does not answer")
        assert turns.w.metric("headrace_turn_waits_total", outcome="late") == 2


async def test_a_model_that_could_not_wake_fails_its_requests_at_once(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        turns.decider.turn = ModelTurn(MODEL, "asleep", failed="no memory")
        said = f"the model '{MODEL}' is asleep, and could not wake: no memory"
        assert await asyncio.gather(*(ask(turns.w) for _ in range(3))) == [(503, said)] * 3


async def test_a_client_that_leaves_waits_no_longer(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        asking = asyncio.ensure_future(ask(turns.w))
        await turns.decider.waited_for(1)
        asking.cancel()
        await turns.decider.wants.until(WantModel("f1", MODEL, 0, 0.0))
        assert turns.w.metric("headrace_turn_waits_total", outcome="left") == 1


async def test_a_request_whose_deadline_passes_while_it_waits_gets_504(directory: Path) -> None:
    limits = replace(LIMITS, deadline_s=0.3)
    async with sleeping(directory, limits) as turns, asyncio.timeout(DEADLINE_S):
        status, said = await ask(turns.w)
        assert (status, said) == (504, "the request's deadline has passed")


async def test_a_stream_whose_worker_falls_asleep_goes_on_at_its_next_turn(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w, worker = turns.w, turns.w.workers[0]
        tokens, worker.output = w.say("one two three"), None
        await turns.show(awake=True)
        asking = asyncio.ensure_future(ask(w))
        [offered] = await worker.generates.at_least(1)
        await worker.send(offered, 0, tokens[:2])
        await turns.show(state="draining")
        await worker.send(offered, 2, [], "error", error=SHUTTING_DOWN)
        await turns.decider.waited_for(1)
        await turns.show(awake=True)
        again = (await worker.generates.at_least(2))[1]
        assert unpack_tokens(again.tokens)[again.prompt_tokens :] == tokens[:2]
        await worker.send(again, 2, [*tokens[2:], 2], "stop")
        assert await asking == (200, "one two three")


async def test_a_request_for_a_lora_of_a_model_that_falls_asleep_waits_for_its_next_turn(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w = turns.w
        w.say("one")
        await turns.show(awake=True)
        assert await ask(w, "sql") == (200, "one")
        await turns.show(state="draining")
        await w.until("/v1/models", lambda listed: len(listed["data"]) == 2)
        asking = asyncio.ensure_future(ask(w, "sql"))
        await turns.decider.waited_for(1)
        await turns.show(awake=True)
        assert await asking == (200, "one")
        offered = (await w.workers[0].generates.at_least(2))[1]
        assert (offered.model, offered.lora) == (MODEL, LORA)


async def test_a_request_that_comes_as_its_worker_falls_asleep_waits_for_the_next_turn(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w, worker = turns.w, turns.w.workers[0]
        w.say("one")
        await turns.show(awake=True)

        def refuse(offered: Generate) -> GenerateReply:
            return Refused(offered.request, offered.attempt, "draining", "this worker is draining")

        worker.answer = refuse
        asking = asyncio.ensure_future(ask(w))
        await worker.generates.at_least(1)
        await turns.show(state=ASLEEP)
        await turns.decider.waited_for(1)
        worker.answer = lambda offered: Accepted(offered.request, offered.attempt)
        await turns.show(awake=True)
        assert await asking == (200, "one")


async def test_a_request_waits_if_its_router_knows_first_that_the_model_falls_asleep(directory: Path) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w = turns.w
        w.say("one")
        await turns.show(awake=True)
        assert await ask(w) == (200, "one")
        w.router.workers, asked = [], len(w.router.asked.all)
        asking = asyncio.ensure_future(ask(w))
        await w.router.asked.at_least(asked + 1)
        await turns.show(state=ASLEEP)
        await turns.decider.waited_for(1)
        w.router.workers = ["w1"]
        await turns.show(awake=True)
        assert await asking == (200, "one")


async def test_a_wait_for_routers_that_do_not_know_of_a_turn_has_an_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.requests.calls.SELECT_LIMIT_S", 0.2)
    async with sleeping(directory, replace(LIMITS, asleep_s=0.5)) as turns, asyncio.timeout(DEADLINE_S):
        turns.w.router.workers = []
        await turns.show(awake=True)
        said = f"the model '{MODEL}' has woken, but no router knew of it within 0.5 s"
        assert await ask(turns.w) == (503, said)


@pytest.mark.parametrize("broken", [DEVICE, "other"])
async def test_a_model_that_cannot_wake_on_one_device_wakes_on_another_one(directory: Path, broken: str) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w = turns.w
        w.say("one")
        other = ScriptedDecider(w, "other")
        await other.start()
        await w.announce("w2", entries(directory, state=ASLEEP, awake=False, worker="w2", device="other"))
        failing, waking = (turns.decider, other) if broken == DEVICE else (other, turns.decider)
        failing.turn = ModelTurn(MODEL, "asleep", failed="no memory")
        asking = asyncio.ensure_future(ask(w))
        await waking.waited_for(1)
        await turns.show(awake=True)
        assert await asking == (200, "one")


async def test_a_model_whose_worker_has_gone_is_waited_for_until_it_is_not_expected_any_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sleeping(directory) as turns, asyncio.timeout(DEADLINE_S):
        w = turns.w
        w.say("one")
        await w.leave("w1")
        asking = asyncio.ensure_future(ask(w))
        await turns.decider.waited_for(1)
        await w.announce("w1", turns.published)
        await turns.show(awake=True)
        assert await asking == (200, "one")
        monkeypatch.setattr("services.frontend.models.registry.RESTART_S", 0.05)
        await w.leave("w1")
        await w.until("/health", lambda health: not health["ready"])
        assert await ask(w) == (503, f"no worker serves the model '{MODEL}' now")

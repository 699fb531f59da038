"""A fleet whose services are restarted in turn under load: two of each, and clients that compare greedy answers."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path

import aiohttp
import nats

from shared import subjects
from shared.bus.contract import LAST_HEADER
from shared.messages.cards import ServiceName
from tests.integration.fleet import Fleet

PROMPTS = [f"The mill at the {place} turns" for place in ("river", "dam", "bridge", "weir", "sea")]
SHORT_TOKENS, LONG_TOKENS = 40, 1200
WORKER_DRAIN_S = 0.02
"""Far shorter than a long answer takes, on any machine, so that some are handed back."""
PATIENT = ("--limits-drain-s", "120", "--limits-rescue-s", "120")
"""A long answer ends while its frontend drains, and finds another worker, on any machine."""
LIMIT_S = 180.0

NUMBERS = (1, 2)
ORDER: tuple[ServiceName, ...] = ("worker", "router", "frontend")
"""The order in which docs/upgrade.md puts a new version in place of an old one."""
Question = tuple[str, int]


def start(services: Fleet, service: ServiceName, number: int, model: str, tree: Path | None = None) -> None:
    """Start a service with the modules of a tree, or of this one."""
    worker = ("--model", model, "--threads", "1", "--drain-s", str(WORKER_DRAIN_S))
    flags: dict[ServiceName, tuple[str, ...]] = {"worker": worker, "frontend": PATIENT}
    services.start(service, f"{service} {number}", *flags.get(service, ()), tree=tree)


def body(question: Question) -> dict[str, object]:
    prompt, tokens = question
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


class Clients:
    """Ask one question after the other until the test stops them; every answer is kept."""

    def __init__(self, services: Fleet, nats_url: str, namespace: str) -> None:
        self.answers: dict[Question, set[str]] = {}
        self.answered = 0
        self.stopping = False
        self._services = services
        self._nats_url = nats_url
        self._namespace = namespace

    async def over_http(self, length: int, turn: int) -> None:
        """As a balancer does: a frontend that is down or says that it is about to end is passed over."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:
            for number in count(turn):
                if self.stopping:
                    return
                question = (PROMPTS[number % len(PROMPTS)], length)
                text = None
                async with asyncio.timeout(LIMIT_S):
                    for other in count(number):
                        text = await self._ask(http, self._services.services[f"frontend {other % 2 + 1}"].url, question)
                        if text is not None:
                            break
                        await asyncio.sleep(0.01)
                self._keep(question, text)

    async def _ask(self, http: aiohttp.ClientSession, url: str, question: Question) -> str | None:
        if not url:
            return None  # it has just been started
        try:
            response = await http.post(f"{url}/v1/completions", json=body(question), headers={"Connection": "close"})
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionResetError):
            return None
        async with response:
            if response.status == 503 and "about to end" in await response.text():
                return None
            assert response.status == 200, await response.text()
            lines = (await response.text()).replace(": waiting\n\n", "").split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])

    async def over_nats(self, length: int) -> None:
        client = await nats.connect(self._nats_url)
        subject = subjects.client(self._namespace, "completions")
        for number in count():
            if self.stopping:
                break
            question = (PROMPTS[number % len(PROMPTS)], length)
            inbox = client.new_inbox()
            replies = await client.subscribe(inbox)
            await client.publish(subject, json.dumps(body(question)).encode(), reply=inbox)
            text = ""
            async with asyncio.timeout(LIMIT_S):
                async for message in replies.messages:
                    headers = message.headers or {}
                    assert "Headrace-Status" not in headers, message.data
                    text += json.loads(message.data)["choices"][0]["text"]
                    if LAST_HEADER in headers:
                        break
            await replies.unsubscribe()
            self._keep(question, text)
        await client.close()

    def _keep(self, question: Question, text: str | None) -> None:
        assert text is not None
        self.answers.setdefault(question, set()).add(text)
        self.answered += 1

    async def answer_more(self) -> None:
        """Until a few more answers came, so that every state of the fleet has been under load."""
        due = self.answered + 8
        async with asyncio.timeout(LIMIT_S):
            while self.answered < due:  # noqa: ASYNC110 - answers come one by one from many tasks
                await asyncio.sleep(0.01)


async def restart_each_in_turn(
    services: Fleet, nats_url: str, namespace: str, model: str, tree: Path | None = None
) -> None:
    """Restart every service under load, with the modules of a tree or of this one; no client may see more than a pause,
    and some requests are handed back by a worker."""
    clients = Clients(services, nats_url, namespace)
    handed_back = 0.0
    async with asyncio.TaskGroup() as tasks:
        asking = [
            *(tasks.create_task(clients.over_http(SHORT_TOKENS, turn)) for turn in range(2)),
            *(tasks.create_task(clients.over_http(LONG_TOKENS, turn)) for turn in range(2)),
            tasks.create_task(clients.over_nats(SHORT_TOKENS)),
            tasks.create_task(clients.over_nats(LONG_TOKENS)),
        ]
        for service in ORDER:
            for number in NUMBERS:
                await clients.answer_more()
                name = f"{service} {number}"
                if service == "frontend":
                    handed_back += services.services[name].metric("headrace_model_migration_total")
                status, _ = await asyncio.to_thread(services.services[name].stop)
                log = services.services[name].log.read_text()
                assert status == 0, log[-4000:]
                assert "draining" in log
                start(services, service, number, model, tree)
                await asyncio.to_thread(services.wait_ready, name)
        await clients.answer_more()
        clients.stopping = True
        await asyncio.gather(*asking)
    assert len(clients.answers) == 2 * len(PROMPTS)
    assert {len(texts) for texts in clients.answers.values()} == {1}, "greedy answers are alike, whoever gave them"
    assert handed_back > 0, "no answer outlasted a worker"

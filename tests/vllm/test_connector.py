"""Two plain `vllm serve` on a CPU, which join no Headrace, over one kvbm with a disk: answers are those of a vLLM
without a connector, whatever was evicted, killed or aborted, and nothing is left behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import nats
import pytest

from shared import subjects
from shared.messages import kvbm as wire
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.kvbm.store_rig import kvbm_of
from tests.tiny_model import write_tiny_model
from tests.vllm.serve import BLOCK, Serve, answers_alone, completion, connector
from tests.worker.vllm.environment import LIMIT_S, needs_vllm

pytestmark = needs_vllm
PROMPTS = [[5 + (index * step + step) % 290 for index in range(400)] for step in (7, 11, 13)]
"""Each has twelve blocks that can be loaded."""


class World:
    """A kvbm, two engines on it, and the answers of one without a connector."""

    def __init__(self, folder: Path, services: Fleet, nats_url: str, model: Path) -> None:
        self.pool = folder / "pool"
        self._folder, self._services, self._nats_url = folder, services, nats_url
        self.start_kvbm()
        self.right = answers_alone(model, PROMPTS)
        self.engines = [Serve(model, folder / f"engine {each}.log", connector(self.pool)) for each in range(2)]

    def start_kvbm(self) -> None:
        flags = ("--pool-directory", str(self.pool), "--pool-size-bytes", str(64 << 20))
        disk = (
            "--disk-directory",
            str(self._folder / "disk"),
            "--disk-min-free-bytes",
            "0",
            "--tiers-disk-sightings",
            "1",
        )
        self._services.start("kvbm", "kvbm", *flags, *disk)
        self._services.wait_ready("kvbm")

    def kill_kvbm(self) -> None:
        self.kvbm.kill()

    @property
    def kvbm(self) -> Service:
        return self._services.services["kvbm"]

    def layout(self) -> wire.LayoutState:
        """Return what the kvbm says of the one layout."""

        async def ask() -> bytes:
            client = await nats.connect(self._nats_url)
            try:
                subject = subjects.kvbm("connector", kvbm_of(self.pool), "stat")
                return bytes((await client.request(subject, b"", timeout=60)).data)
            finally:
                await client.close()

        state = wire.KVBM_STATE.decode(asyncio.run(ask()), {"Content-Type": "application/json"})
        [layout] = state.layouts
        return layout

    def on_disk(self) -> int:
        disk = self.layout().disk
        return 0 if disk is None else disk.blocks

    def stored(self, blocks: int) -> None:
        eventually(lambda: self.layout().host.blocks >= blocks, limit_s=LIMIT_S, what=f"{blocks} blocks are stored")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("connector")
    model = write_tiny_model(folder / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    where = ("--namespace", "connector", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as services:
        one = World(folder, services, nats_url, model)
        try:
            for serve in one.engines:
                serve.start()
                serve.attach()
            yield one
        finally:
            for serve in one.engines:
                serve.kill()


def test_what_one_engine_has_computed_both_load_and_answer_alike(world: World) -> None:
    one, other = world.engines
    assert [one.ask(prompt)[0] for prompt in PROMPTS] == world.right
    world.stored(36)
    one.forget()
    for serve in (one, other):
        answers = [serve.ask(prompt) for prompt in PROMPTS]
        assert answers == [(tokens, 12 * BLOCK) for tokens in world.right]
        assert serve.metric("headrace_loaded_blocks_total") >= 36


def test_requests_that_are_aborted_and_preempted_leave_nothing(world: World) -> None:
    one = world.engines[0]
    one.forget()
    draw = Random(1)
    plans = [(draw.randrange(3), draw.choice((0, 0, 0.02, 0.1, 0.3)), draw.randint(20, 300)) for _ in range(200)]

    def run(plan: tuple[int, float, int]) -> list[int] | None:
        which, abort_s, most = plan
        prompt = PROMPTS[which]
        if not abort_s:
            return one.ask(prompt, most)[0]
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=LIMIT_S)
        body = json.dumps(completion(prompt, most, stream=True))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        time.sleep(abort_s)
        connection.close()
        return None

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(run, plans))
    for (which, _, most), tokens in zip(plans, answers, strict=True):
        if tokens is not None:
            assert len(tokens) == most
            assert tokens[:8] == world.right[which]
    assert one.metric("num_preemptions_total") > 0
    eventually(
        lambda: world.layout().tickets == {"store": 0, "fetch": 0, "expired": 0},
        limit_s=LIMIT_S,
        what="no ticket is open",
    )
    one.forget()  # it succeeds only where no block is held


def test_while_the_kvbm_is_frozen_requests_are_computed_and_after_it_blocks_are_exchanged_again(world: World) -> None:
    one = world.engines[0]
    for prompt in PROMPTS:
        one.ask(prompt)
    world.stored(36)
    kvbm = world.kvbm.process
    kvbm.send_signal(signal.SIGSTOP)
    try:
        one.forget()
        assert [one.ask(prompt)[0] for prompt in PROMPTS] == world.right
        eventually(
            lambda: one.ask([7, 8, 9], 2)[0] and one.metric("headrace_kvbm_attached") == 0,
            limit_s=LIMIT_S,
            what="the engine has given it up",
        )
    finally:
        kvbm.send_signal(signal.SIGCONT)
    one.attach()
    one.forget()
    assert [one.ask(prompt) for prompt in PROMPTS] == [(tokens, 12 * BLOCK) for tokens in world.right]


def test_after_kills_of_engine_and_kvbm_the_answers_are_right(world: World) -> None:
    one, other = world.engines
    for prompt in PROMPTS:
        one.ask(prompt)
    world.stored(36)
    one.kill()
    one.start()
    one.attach()
    assert [one.ask(prompt) for prompt in PROMPTS] == [(tokens, 12 * BLOCK) for tokens in world.right]
    eventually(
        lambda: (world.layout().disk or world.layout().host).blocks >= 36, limit_s=LIMIT_S, what="blocks are on disk"
    )
    world.kill_kvbm()
    other.forget()
    assert [other.ask(prompt)[0] for prompt in PROMPTS] == world.right
    world.start_kvbm()
    for serve in (one, other):
        serve.attach()
        serve.forget()
        tokens = [serve.ask(prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in tokens] == world.right
    world.kill_kvbm()
    one.kill()
    world.start_kvbm()
    one.start()
    one.attach()
    eventually(lambda: world.on_disk() >= 36, limit_s=LIMIT_S, what="kvbm has found its blocks on disk again")
    from_disk = [one.ask(prompt) for prompt in PROMPTS]
    assert [answer for answer, _ in from_disk] == world.right
    assert sum(cached for _, cached in from_disk) > 0, "the disk outlives both"

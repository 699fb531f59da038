"""Two workers and their kvbm, in processes of their own: what one computed the other loads, and answers the same.

The model is small and its arithmetic real; tokens are greedy and compared with a worker's that has no kvbm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from services.frontend.auth.accounts import Account, cache_salt
from shared.api_keys import KeyEntry
from tests.integration.fleet import fleet
from tests.integration.kinds import CPU, GPU, Kind, params
from tests.integration.machine import (
    ATTACHED,
    BLOCK_TOKENS,
    WORKERS,
    Answer,
    Machine,
    Wire,
    eventually,
    full_blocks,
    prompt,
    settled,
)
from tests.tiny_model import write_tiny_model

LONG = 3000
"""Tokens of a prompt that takes several steps."""
POOL_BLOCKS = 3000
"""More than all the prompts here have …"""
SMALL_BLOCKS = 500
"""… and fewer."""
RECOMPUTED, DISCARDED = "headrace_not_finite_sequences_total", "headrace_kvbm_discarded_blocks_total"


@contextmanager
def running(folder: Path, nats_url: str, kind: Kind, pool_blocks: int) -> Iterator[Machine]:
    # Where its ends are not tied, every token of an answer hangs on all keys and values before it, as nearly equal
    # logits do on rounding, which in 16 bits is too much; a model whose ends are tied says its last token again.
    model = write_tiny_model(folder / "tiny", context_length=8192, tied=kind.dtype != "float32")
    pool_bytes = pool_blocks * (8 << 10 if kind.dtype == "float32" else 4 << 10)
    with kind.pool(folder) as pool, fleet(folder, nats_url, *Machine.where(folder)) as processes:
        flags = (*kind.flags, "--capacity-blocks", "4096")
        machine = Machine(processes, folder, model, pool_bytes, *flags, pool=pool)
        machine.start_kvbm()
        for name in WORKERS:
            machine.start_worker(name)
        processes.wait_ready()
        yield machine


@pytest.fixture(scope="module", params=params((*CPU, *GPU)))
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_url: str
) -> Iterator[Machine]:
    with running(tmp_path_factory.mktemp("machine"), nats_url, request.param, POOL_BLOCKS) as one:
        yield one


@pytest.fixture(scope="module", params=params((CPU[0], GPU[0])))
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Machine]:
    """A machine whose pool is soon full."""
    with running(tmp_path_factory.mktemp("small"), nats_url, request.param, SMALL_BLOCKS) as one:
        yield one


@pytest.fixture
async def wire(machine: Machine, nats_url: str) -> AsyncIterator[Wire]:
    async with settled(machine, nats_url) as one:
        yield one


def loaded(tokens: list[int]) -> int:
    """Tokens of a prompt that can be loaded."""
    return full_blocks(tokens) * BLOCK_TOKENS


async def test_what_one_worker_computed_the_other_one_loads_and_answers_the_same(wire: Wire) -> None:
    asked = prompt(200, "shared")
    alone = await wire.ask("alone", asked)
    assert await wire.compute("first", asked) == alone == Answer(alone.tokens, 0, 0, 0)
    assert await wire.ask("second", asked) == Answer(alone.tokens, loaded(asked), loaded(asked), 0)


async def test_keys_with_salts_of_their_own_find_nothing_of_each_other_in_any_tier(wire: Wire) -> None:
    """What a key finds is what its answer says and how long it takes: tokens of the prompt that are not computed."""
    asked = prompt(200, "salted")
    accounts = [Account(name, KeyEntry("0" * 64, salt="own"), 0.0) for name in ("alice", "bob", "carol")]
    alice, bob, carol = (cache_salt(account, "", "") for account in accounts)
    answer = await wire.compute("first", asked, "disk", alice)
    nothing = Answer(answer.tokens, 0, 0, 0)
    assert await wire.ask("first", asked, salt=bob) == nothing, "its device has alice's blocks"
    assert await wire.ask("second", asked, salt=carol) == nothing, "host memory and disk have them"
    assert await wire.ask("second", asked) == nothing
    assert await wire.ask("first", asked, salt=alice) == Answer(answer.tokens, loaded(asked), 0, 0)
    assert await wire.ask("second", asked, salt=alice) == Answer(answer.tokens, loaded(asked), loaded(asked), 0)


async def test_the_half_of_a_prompt_is_loaded_and_the_rest_computed_in_steps_among_other_requests(wire: Wire) -> None:
    start = prompt(LONG, "start")
    asked = start + prompt(LONG, "rest")
    others = [prompt(50 + 20 * number, number) for number in range(6)]
    alone = [await wire.ask("alone", other, 200) for other in others]
    await wire.compute("first", start)
    begun = [await wire.begin("second", other, 200) for other in others[:3]]
    middle = await wire.begin("second", asked)
    begun += [await wire.begin("second", other, 200) for other in others[3:]]
    tokens = (await wire.ask("alone", asked)).tokens
    assert await wire.end("second", middle) == Answer(tokens, loaded(start), loaded(start), 0)
    assert [await wire.end("second", other) for other in begun] == alone


async def test_what_a_killed_worker_computed_outlives_it(machine: Machine, wire: Wire) -> None:
    asked = prompt(LONG, "killed")
    answer = await wire.compute("first", asked)
    machine.process("first").kill()
    assert await wire.ask("second", asked) == Answer(answer.tokens, loaded(asked), loaded(asked), 0)
    machine.start_worker("first")
    await wire.attached()
    assert await wire.ask("first", asked) == Answer(answer.tokens, loaded(asked), loaded(asked), 0)


async def test_without_a_kvbm_blocks_are_computed_and_with_the_next_one_they_come_from_disk(
    machine: Machine, wire: Wire
) -> None:
    asked, between = prompt(LONG, "on disk"), prompt(LONG, "between")
    answer = await wire.compute("first", asked, "disk")
    machine.process("first").kill()  # or it would offer the next kvbm what its device has
    machine.process("kvbm").kill()
    assert await wire.ask("second", between) == await wire.ask("alone", between)
    machine.start_worker("first")
    machine.start_kvbm()
    await wire.attached()
    await wire.until_state(lambda layout: layout.disk is not None and layout.disk.state == "on", "its disk is read")
    assert await wire.ask("second", asked) == Answer(answer.tokens, loaded(asked), 0, loaded(asked))


async def test_a_frozen_kvbm_costs_its_blocks_and_nothing_else(machine: Machine, wire: Wire) -> None:
    asked, after = prompt(LONG, "frozen"), prompt(LONG, "thawed")
    answer = await wire.compute("first", asked)
    stream = await wire.begin("second", prompt(20, "stream"), 1000)
    machine.freeze_kvbm()
    try:
        assert await wire.ask("second", asked) == Answer(answer.tokens, 0, 0, 0)
        assert len((await wire.end("second", stream)).tokens) == 1000
        await wire.linked("second", False)
    finally:
        machine.thaw_kvbm()
    await wire.attached()
    answer = await wire.compute("first", after)
    assert await wire.ask("second", after) == Answer(answer.tokens, loaded(after), loaded(after), 0)


async def test_requests_go_on_while_the_kvbm_is_killed_and_comes_back(machine: Machine, wire: Wire) -> None:
    prompts = [prompt(400, ("restart", number)) for number in range(8)]
    alone = [(await wire.ask("alone", each, 100)).tokens for each in prompts]
    for each in prompts[::2]:
        await wire.compute("first", each)

    async def answers(name: str) -> list[list[int]]:
        begun = [await wire.begin(name, each, 100) for each in prompts]
        return [(await wire.end(name, each)).tokens for each in begun]

    async with asyncio.TaskGroup() as asking:
        both = [asking.create_task(answers(name)) for name in ATTACHED]
        machine.process("kvbm").kill()
        machine.start_kvbm()
    assert [each.result() for each in both] == [alone, alone]


async def test_tickets_of_cancelled_requests_end_and_their_blocks_are_free(wire: Wire) -> None:
    asked, new = prompt(LONG, "cancelled"), prompt(LONG, "cancelled while it is stored")
    answer = await wire.compute("first", asked)
    for _ in range(8):
        await wire.cancel("second", await wire.begin("second", asked))
        await wire.cancel("first", await wire.begin("first", new))
    await wire.nothing_held()
    assert (await wire.ask("second", asked)).tokens == answer.tokens
    assert (await wire.ask("first", new)).tokens == (await wire.ask("alone", new)).tokens


async def test_damaged_blocks_in_memory_end_no_engine_and_leave_the_kvbm(machine: Machine, wire: Wire) -> None:
    asked = [prompt(400, ("damaged", number)) for number in range(4)]
    computed = [(await wire.compute("first", each)).tokens for each in asked]
    second = machine.process("second")
    before = {name: second.metric(name) for name in ("headrace_engine_starts_total", RECOMPUTED, DISCARDED)}
    machine.damage_pool()
    answers = [await wire.ask("second", each) for each in asked]
    assert [each.tokens for each in answers] == computed
    assert [each.cached for each in answers] == [0] * len(asked), "nothing that is damaged was used"

    await asyncio.to_thread(machine.fleet.wait_ready, "kvbm")
    evicted = {"tier": "host", "reason": "discarded"}

    async def told() -> bool:
        twice = await asyncio.to_thread(second.metric, RECOMPUTED) >= before[RECOMPUTED] + len(asked)
        named = await asyncio.to_thread(second.metric, DISCARDED) >= before[DISCARDED] + sum(map(full_blocks, asked))
        kvbm = machine.process("kvbm")
        gone = await asyncio.to_thread(partial(kvbm.metric, "headrace_kvbm_evicted_blocks_total", **evicted)) > 0
        return twice and named and gone

    await eventually(told, "each of them was computed twice, and its blocks have left kvbm's memory")
    assert second.metric("headrace_engine_starts_total") == before["headrace_engine_starts_total"]
    second.kill()
    machine.start_worker("second")
    await wire.attached()
    assert [(await wire.ask("second", each)).tokens for each in asked] == computed
    assert machine.process("second").metric(RECOMPUTED) == 0, "what it was given is right"


async def test_a_pool_that_is_full_gives_what_it_has(small: Machine, nats_url: str) -> None:
    prompts = [prompt(LONG, ("full", number)) for number in range(4)]
    async with settled(small, nats_url) as wire:
        alone = [(await wire.ask("alone", each)).tokens for each in prompts]
        assert [(await wire.ask("first", each)).tokens for each in prompts] == alone
        await wire.until_state(
            lambda layout: layout.disk is not None and layout.disk.blocks > layout.host.capacity_blocks,
            "blocks have left memory",
        )
        answers = [await wire.ask("second", each) for each in prompts]
        assert [each.tokens for each in answers] == alone
        assert all(each.cached == each.host + each.disk for each in answers)
        assert any(each.disk for each in answers)

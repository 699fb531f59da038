"""A prompt that one engine has computed for another, in the six ways in which a hand-over goes wrong elsewhere and the
answer is another prompt's text: here blocks are named by their content, and what is missing is computed.

Each engine fails if it reads a byte that is not of exactly the prefix that it computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.kv_connector import socket_client
from tests.kvbm.store_rig import serving, settings
from tests.worker.vllm.connector.engines import answer, attached, engine, no_ticket, steps
from tests.worker.vllm.connector.vllm_shaped import Engine, Request

LONG = [1 + (index * index) % 2 for index in range(31)]
FULL = 15
"""Its full blocks."""


async def prefilled(one: Engine, prompt: list[int], salt: str = "") -> list[int]:
    """Have the engine compute a prompt for another one; return the tokens with which that one goes on."""
    request = Request("prefill", prompt, 1, salt)
    request.hands_over = "1"
    one.add(request)
    stored: list[str] = []

    def said() -> bool:
        stored.extend((one.half.new_stats() or (None, None, []))[2])
        return bool(stored)

    await steps(one, said)
    return request.tokens


async def test_blocks_that_were_evicted_since_are_computed(tmp_path: Path) -> None:
    small = settings(tmp_path, size_bytes=1 << 19)
    async with (
        serving(tmp_path, pool=small.pool) as store,
        engine(tmp_path, "a", blocks=60) as one,
        engine(tmp_path, "b", blocks=60) as other,
    ):
        await attached(one)
        await attached(other)
        tokens = await prefilled(one, LONG)
        for each in range(12):
            await answer(one, f"r{each}", LONG, salt=f"{each}")
        assert (await answer(other, "decode", tokens)).loaded_blocks < FULL
        await no_ticket(store)


async def test_blocks_whose_slots_get_other_bytes_while_they_are_read_are_computed(tmp_path: Path) -> None:
    small = settings(tmp_path, size_bytes=1 << 19)
    async with (
        serving(tmp_path, pool=small.pool) as store,
        engine(tmp_path, "a", blocks=60) as one,
        engine(tmp_path, "b", blocks=60) as other,
    ):
        await attached(one)
        await attached(other)
        for turn in range(6):
            tokens = await prefilled(one, LONG, salt=f"{turn}")
            decode = Request(f"decode {turn}", tokens, 3, f"{turn}")
            other.add(decode)
            for each in range(4):  # both step; the slots are given to others meanwhile
                one.add(Request(f"r{turn} {each}", LONG, 3, f"{turn} {each}"))

            def ended() -> bool:
                one.step()
                return not (one.has_work or other.has_work)

            await steps(other, ended)
            assert decode.state == "finished"
        await no_ticket(store)


async def test_another_prompt_of_the_same_length_gets_nothing_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a", blocks=60) as one, engine(tmp_path, "b", blocks=60) as other:
        await attached(one)
        await attached(other)
        tokens = await prefilled(one, LONG)
        assert (await answer(other, "foreign", [3 - token for token in tokens])).loaded_blocks == 0
        assert (await answer(other, "salted", tokens, salt="another tenant")).loaded_blocks == 0
        assert (await answer(other, "decode", tokens)).loaded_blocks == FULL


async def test_what_comes_after_the_stored_blocks_is_computed(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a", blocks=60) as one, engine(tmp_path, "b", blocks=60) as other:
        await attached(one)
        await attached(other)
        tokens = await prefilled(one, LONG)
        assert (await answer(other, "longer", [*tokens, *LONG])).loaded_blocks == FULL
        assert (await answer(other, "shorter", tokens[:9])).loaded_blocks == 0, "the device has them"


@pytest.mark.parametrize("stepped", [1, 4, 8])
async def test_what_an_engine_that_ends_has_not_stored_is_computed(tmp_path: Path, stepped: int) -> None:
    async with serving(tmp_path) as store, engine(tmp_path, "b", blocks=60) as other:
        await attached(other)
        async with engine(tmp_path, "a", blocks=60) as one:
            await attached(one)
            one.add(Request("prefill", LONG, 1, ""))
            for _ in range(stepped):
                one.step()
        assert (await answer(other, "decode", [*LONG, 1])).loaded_blocks <= FULL
        await no_ticket(store)


async def test_a_hand_over_outlives_no_kvbm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    async with engine(tmp_path, "a", blocks=60) as one, engine(tmp_path, "b", blocks=60) as other:
        async with serving(tmp_path):
            await attached(one)
            await attached(other)
            tokens = await prefilled(one, LONG)
        assert (await answer(other, "decode", tokens)).loaded_blocks == 0
        async with serving(tmp_path):
            await steps(one, lambda: bool(one.half.link.kvbm))
            await attached(other)
            assert (await answer(other, "again", LONG, salt="new")).loaded_blocks == 0

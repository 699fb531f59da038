"""Workers on a GPU, as processes with their kvbm, give a CPU's answers, and blocks keep their bytes on every way.

first ⇄ kvbm ⇄ second, which compares each block it loads with the pool's        alone, without a kvbm: on their device
                                                                                  reference, on a CPU in float32

The same tests run with a CPU if there is no GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shared.hashing import unpack_tokens
from shared.messages.cards import Pooling
from tests.integration.fleet import fleet
from tests.integration.kinds import CPU, GPU, GPU_16_BITS, Kind, params
from tests.integration.machine import BLOCK_TOKENS, Machine, Wire, full_blocks, prompt, settled
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

SHAPE: dict[str, Any] = {
    **{"context_length": 8192, "hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 512},
    **{"layers": 4, "tied": False},
}
"""Without tied embeddings, each token of an answer depends on all before; with them, it repeats one."""
PATIENT = ("--kvbm-wait-s", "60", "--kvbm-timeout-s", "4")
"""A slow machine must not make loading blocks lose against computing them."""
POOL_BYTES = 256 << 20
VECTORS_APART = 1e-5
"""The largest length of the difference of two vectors of length 1, if all compute in float32."""
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
LENGTHS = (1, 2, 16, 17, 33, 100, 257, 700, 1500, 2600)
"""Lengths of prompts, from one token to several steps."""
MOST_BEHIND = 0.3
"""A 16-bit worker may draw a token that a float32 worker finds less likely than its best one. This is the largest such
difference, as a natural logarithm. Logits are about 1 large here, and a bfloat16 has 8 bits."""


class WorkerRig(NamedTuple):
    machine: Machine
    kind: Kind


@contextmanager
def running(folder: Path, nats_url: str, kind: Kind) -> Iterator[WorkerRig]:
    """Run the module's workers; no loaded block may differ from the pool's."""
    model = write_tiny_model(folder / "tiny", **SHAPE)
    with kind.pool(folder) as pool, fleet(folder, nats_url, *Machine.where(folder)) as processes:
        machine = Machine(
            processes, folder, model, POOL_BYTES, *kind.flags, *PATIENT, "--capacity-blocks", "2048", pool=pool
        )
        machine.start_kvbm()
        machine.start_worker("first")
        machine.start_worker("second", "--kvbm-verify", "true")
        machine.start_worker("alone")
        machine.start_worker("reference", "--device", "cpu", "--kv-dtype", "float32")
        processes.wait_ready()
        yield WorkerRig(machine, kind)
        for name in ("first", "second"):
            assert machine.process(name).metric("headrace_kvbm_differing_blocks_total") == 0


@pytest.fixture(scope="module", params=params((CPU[0], *GPU), cpu_stands_in=True))
def exact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_url: str
) -> Iterator[WorkerRig]:
    with running(tmp_path_factory.mktemp("exact"), nats_url, request.param) as rig:
        yield rig


@pytest.fixture
async def wire(exact: WorkerRig, nats_url: str) -> AsyncIterator[Wire]:
    async with settled(exact.machine, nats_url) as one:
        yield one


@pytest.fixture(scope="module", params=params((CPU[1], *GPU_16_BITS), cpu_stands_in=True))
def narrow(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_url: str
) -> Iterator[WorkerRig]:
    with running(tmp_path_factory.mktemp("narrow"), nats_url, request.param) as rig:
        yield rig


@pytest.fixture
async def narrow_wire(narrow: WorkerRig, nats_url: str) -> AsyncIterator[Wire]:
    async with settled(narrow.machine, nats_url) as one:
        yield one


async def test_in_float32_all_workers_answer_the_same_alone_batched_and_from_loaded_blocks(wire: Wire) -> None:
    prompts = [prompt(length, ("alike", length)) for length in LENGTHS]
    expected = [(await wire.ask("reference", each, 40)).tokens for each in prompts]
    assert [(await wire.ask("alone", each, 40)).tokens for each in prompts] == expected
    batched = [await wire.begin("first", each, 40) for each in prompts]
    assert [(await wire.end("first", each)).tokens for each in batched] == expected
    for each in prompts:
        await wire.compute("first", each)
    loaded = [await wire.begin("second", each, 40) for each in prompts]
    answers = [await wire.end("second", each) for each in loaded]
    assert [each.tokens for each in answers] == expected
    whole = [full_blocks(each) * BLOCK_TOKENS for each in prompts]
    # Where the kvbm or its answers are held up by a busy machine, a worker computes instead.
    assert all(answer.host in (0, tokens) for answer, tokens in zip(answers, whole, strict=True))
    assert any(answer.host for answer in answers)


def test_a_worker_shows_the_gpu_that_its_engine_computes_on_and_one_on_a_cpu_shows_none(exact: WorkerRig) -> None:
    first, reference = exact.machine.process("first"), exact.machine.process("reference")
    if exact.kind.device == "cuda":
        shows = "the GPU that all share is shown, with what the engine has allocated of it"
        used = first.metric("headrace_gpu_memory_bytes", state="used")
        eventually(lambda: first.metric("headrace_gpu_memory_used_bytes") > used > 0, limit_s=60.0, what=shows)
    assert reference.metric("headrace_gpu_memory_size_bytes") == 0


async def test_a_cpu_worker_loads_blocks_of_gpu_workers_and_they_load_its_blocks(exact: WorkerRig, wire: Wire) -> None:
    machine = exact.machine
    cpu = ("--device", "cpu", "--kv-dtype", "float32", "--kvbm-verify", "true")
    theirs, its = prompt(1500, "theirs"), prompt(1500, "its")
    first = await wire.compute("first", theirs)
    machine.start_worker("cpu", *cpu)
    machine.fleet.wait_ready("cpu")
    await wire.linked("cpu", True)
    answer = await wire.ask("cpu", theirs)
    assert (answer.tokens, answer.host) == (first.tokens, full_blocks(theirs) * BLOCK_TOKENS)
    computed = await wire.compute("cpu", its)
    answer = await wire.ask("second", its)
    assert (answer.tokens, answer.host) == (computed.tokens, full_blocks(its) * BLOCK_TOKENS)
    assert machine.process("cpu").metric("headrace_kvbm_differing_blocks_total") == 0
    machine.process("cpu").stop()


@pytest.mark.parametrize("level", [1, 2])
async def test_a_worker_that_slept_gets_its_blocks_from_the_kvbm(exact: WorkerRig, wire: Wire, level: int) -> None:
    asked, other = prompt(1500, ("slept", level)), prompt(700, ("woken", level))
    expected = await wire.compute("second", asked)
    operated = await wire.operate("second", "sleep", level)
    assert (operated.failed, operated.state) == ("", "asleep")
    await wire.linked("second", False)
    again = await wire.operate("second", "sleep", level)
    assert again.failed == "sleep: the worker is asleep already"
    stored = await wire.compute("first", other)  # the kvbm and the other worker go on
    assert (await wire.operate("second", "wake")).failed == ""
    await wire.linked("second", True)
    await asyncio.to_thread(exact.machine.fleet.wait_ready, "second")
    for tokens, answer in ((asked, expected), (other, stored)):
        loaded = await wire.ask("second", tokens)
        assert (loaded.tokens, loaded.host) == (answer.tokens, full_blocks(tokens) * BLOCK_TOKENS)
    await wire.compute("second", prompt(300, ("stored again", level)))


async def test_in_float32_embeddings_are_the_references_after_loaded_blocks_too(wire: Wire) -> None:
    for length in (1, 33, 700, 2600):
        asked = prompt(length, ("embedded", length))
        await wire.compute("first", asked)  # "second" loads them: a mean computes all the same
        for pooling in POOLINGS:
            expected = await wire.embed("reference", asked, pooling)
            for name in ("alone", "first", "second"):
                assert np.linalg.norm(await wire.embed(name, asked, pooling) - expected) < VECTORS_APART


async def test_in_16_bits_loaded_blocks_give_the_numbers_that_a_workers_own_do(
    narrow: WorkerRig, narrow_wire: Wire
) -> None:
    # Answers of 8 tokens stay within the prompt's last block. Where they fill it, "first" goes on with the block that
    # it has cached before, which rounds differently: its tokens were computed among more rows.
    for length in (1, 2, 8, 17, 33, 100, 257, 692, 1496, 2600):
        asked = prompt(length, ("own", length))
        await narrow_wire.compute("first", asked)
        own = await narrow_wire.score("first", asked)  # but for the last ones, its tokens are in its own cache
        loaded = await narrow_wire.score("second", asked)
        if narrow.kind.device == "cuda":
            assert loaded == own
        else:  # each process has chosen other ways to multiply, which round differently
            assert [each.logprob for each in loaded.logprobs] == pytest.approx(
                [each.logprob for each in own.logprobs], abs=0.05
            )


async def test_in_16_bits_most_answers_are_a_lone_workers_and_the_others_differ_by_rounding(narrow_wire: Wire) -> None:
    prompts = [prompt(300, ("rounding", number)) for number in range(40)]
    for each in prompts:
        await narrow_wire.compute("first", each)
    loaded = [await narrow_wire.begin("second", each, 4) for each in prompts]
    answers = [(await narrow_wire.end("second", each)).tokens for each in loaded]
    alone = [(await narrow_wire.ask("alone", each, 4)).tokens for each in prompts]
    behind: list[float] = []
    for asked, one, other in zip(prompts, answers, alone, strict=True):
        parts = next((at for at in range(len(one)) if one[at] != other[at]), None)
        if parts is not None:
            behind += [await _behind(narrow_wire, [*asked, *one[:parts]], each[parts]) for each in (one, other)]
    print(f"{len(behind) // 2} of {len(prompts)} answers differ, where the tokens are behind by {behind}")
    assert len(behind) < len(prompts)
    assert max(behind, default=0.0) < MOST_BEHIND


async def _behind(wire: Wire, tokens: list[int], token: int) -> float:
    """Return how much less likely the token is than the best one, for the float32 worker."""
    [logprob] = (await wire.score("reference", tokens, 1)).logprobs
    top = dict(zip(unpack_tokens(logprob.top_tokens), logprob.top_logprobs, strict=True))
    return max(top.values()) - top[token]

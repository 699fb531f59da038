"""What every engine does that speaks the channel: one file of behaviours for the native, the echo and the vLLM engine,
and for a vLLM server that is attached.

vLLM is tested where its environment is installed (`./headrace install-vllm`)."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import reduce
from operator import xor
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.worker.config import WorkerConfig
from shared.messages.frames import NOT_BEGUN, UNFOLLOWABLE
from shared.messages.generate import Sampling
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.attached.vllm_server import VllmServer
from tests.worker.engine.driven_engine import LIMIT_S, DrivenEngine
from tests.worker.vllm.environment import LORA_DTYPE, ON_DEVICE, PYTHON, needs_vllm

BLOCK = 32
CONTEXT = 1024
ENGINES = [
    "native",
    "echo",
    "simulated",
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("attached", marks=needs_vllm),
]
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
SCHEMA = (
    '{"grammars": [{"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],'
    ' "additionalProperties": false}}]}'
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def prompt_of(number: int, length: int = 3 * BLOCK + 5) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    return [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(length)]


def config_of(engine: str, model: Path, attached: dict[str, object]) -> WorkerConfig:
    arguments = {"num_gpu_blocks_override": 64, "enforce_eager": True, "dtype": LORA_DTYPE}
    arguments |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, **ON_DEVICE}
    return msgspec.convert(
        {
            "model": str(model),
            "engine": engine,
            "block_size": BLOCK,
            "capacity_blocks": 0 if engine in ("vllm", "attached") else 64,
            "max_running": 4,
            "vllm": arguments if engine == "vllm" else {},
            "vllm_python": str(PYTHON),
            "attached": attached,
            "threads": 1,
        },
        WorkerConfig,
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=ENGINES)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DrivenEngine]:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    model = write_tiny_model(directory, hidden=128, heads=2, context_length=CONTEXT, tied=False, seed=3)
    attached: dict[str, object] = {}
    with ExitStack() as held:
        if request.param == "attached":
            server = VllmServer(model, directory.with_name("server.log"))
            held.callback(server.kill)
            await asyncio.to_thread(server.start)
            attached = server.settings
        driven = await DrivenEngine.start(config_of(request.param, model, attached))
        yield driven
        await driven.close()


async def answers_with_its_prompt(engine: DrivenEngine) -> bool:
    """Return whether this is the echo engine."""
    answer = await engine.answer("echoed", prompt_of(9), GREEDY)
    return answer == prompt_of(9)[: len(answer)]


async def test_it_says_what_it_serves(engine: DrivenEngine) -> None:
    facts = engine.facts
    assert (facts.context_length, facts.vocab_size, facts.block_size) == (CONTEXT, 320, BLOCK)
    assert facts.capacity_blocks == 64
    assert facts.eos_token_ids
    assert facts.min_tokens


async def test_a_prompt_has_the_same_greedy_answer_each_time(engine: DrivenEngine) -> None:
    first = await engine.answer("same-1", prompt_of(1), GREEDY)
    assert len(first) == 24
    assert engine.parts["same-1"][-1].finish == "length"
    assert await engine.answer("same-2", prompt_of(1), GREEDY) == first


async def test_a_continuation_goes_on_where_the_first_attempt_ended(engine: DrivenEngine) -> None:
    whole = await engine.answer("whole", prompt_of(2), GREEDY)
    rest = await engine.answer("rest", prompt_of(2), GREEDY, output=whole[:10])
    assert engine.parts["rest"][0].first == 10
    assert rest == whole[10:]


async def test_a_stop_token_is_the_last_one(engine: DrivenEngine) -> None:
    whole = await engine.answer("unstopped", prompt_of(3), GREEDY)
    stop = whole[5]
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(stop,))
    assert await engine.answer("stopped", prompt_of(3), sampling) == whole[: whole.index(stop) + 1]
    assert engine.parts["stopped"][-1].finish == "stop"


async def test_no_stop_token_comes_before_min_tokens(engine: DrivenEngine) -> None:
    whole = await engine.answer("early", prompt_of(3), GREEDY)
    sampling = msgspec.structs.replace(GREEDY, stop_token_ids=(whole[0],), min_tokens=7)
    answer = await engine.answer("late", prompt_of(3), sampling)
    assert len(answer) >= 7
    assert whole[0] not in answer[:7]


async def test_blocks_of_a_prompt_are_found_again(engine: DrivenEngine) -> None:
    await engine.answer("cold", prompt_of(4), GREEDY)
    assert engine.parts["cold"][0].cached_tokens == 0
    await engine.answer("warm", prompt_of(4), GREEDY)
    if engine.engine == "attached":
        pytest.skip("a vLLM server says only after the end how many tokens it found")
    assert engine.parts["warm"][0].cached_tokens == 3 * BLOCK


async def test_another_salt_finds_no_blocks(engine: DrivenEngine) -> None:
    await engine.answer("plain", prompt_of(5), GREEDY, salt="one")
    await engine.answer("salted", prompt_of(5), GREEDY, salt="two")
    assert engine.parts["salted"][0].cached_tokens == 0
    async with asyncio.timeout(LIMIT_S):  # an attached server's events come a moment later
        while not {"one", "two"} <= {block.salt for block in (await engine.snapshot()).blocks}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_events_snapshot_and_digest_name_the_same_blocks(engine: DrivenEngine) -> None:
    for number in range(20):  # more than fits, so that blocks are evicted
        engine.submit(f"many-{number}", prompt_of(100 + number, 5 * BLOCK), GREEDY)
    for number in range(20):
        await engine.ended(f"many-{number}")

    def agree() -> bool:
        return engine.digest == reduce(xor, engine.published, 0)

    await engine.until(lambda: agree() and engine.load.running == 0)
    snapshot = await engine.snapshot()
    assert {block.hash for block in snapshot.blocks} == engine.published
    assert len(snapshot.blocks) <= 64
    known: set[int | None] = {None}
    orphans = {block.parent for block in snapshot.blocks} - {block.hash for block in snapshot.blocks}
    for block in snapshot.blocks:
        assert block.parent in known or block.parent in orphans, "a parent comes after its child"
        known.add(block.hash)


async def test_a_cancelled_request_ends_and_gives_its_blocks_back(engine: DrivenEngine) -> None:
    engine.submit("endless", prompt_of(6), msgspec.structs.replace(GREEDY, max_tokens=900))
    await engine.until(lambda: len(engine.tokens("endless")) > 3)
    engine.cancel("endless")
    assert (await engine.ended("endless")).finish == "cancelled"
    await engine.answer("after", prompt_of(7), GREEDY)
    await engine.until(lambda: engine.load.held_blocks == 0 and engine.load.running == 0)


async def test_a_request_ends_at_its_deadline(engine: DrivenEngine) -> None:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=900)
    engine.submit("too-long", prompt_of(8), sampling, time_left_s=0.001)
    assert (await engine.ended("too-long")).finish == "deadline"


async def test_a_request_that_is_not_begun_in_time_says_so(engine: DrivenEngine) -> None:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=900)
    for number in range(4):  # as many as run at once
        engine.submit(f"busy-{number}", prompt_of(10 + number), sampling)
    await engine.until(lambda: all(engine.tokens(f"busy-{number}") for number in range(4)))
    engine.submit("waits", prompt_of(20), GREEDY, wait_left_s=0.0)
    last = await engine.ended("waits")
    for number in range(4):
        engine.cancel(f"busy-{number}")
        await engine.ended(f"busy-{number}")
    assert last.finish == "error"
    assert last.error.startswith(NOT_BEGUN)


async def test_each_token_has_its_log_probability(engine: DrivenEngine) -> None:
    await engine.answer("logprobs", prompt_of(21), msgspec.structs.replace(GREEDY, logprobs=2))
    entries = [entry for part in engine.parts["logprobs"] for entry in part.logprobs or ()]
    assert len(entries) == 24
    assert all(entry.logprob <= 0.0 for entry in entries)


async def test_each_token_of_a_prompt_has_its_log_probability_also_where_it_is_cached(engine: DrivenEngine) -> None:
    if not engine.facts.prompt_logprobs:
        pytest.skip("an engine without log-probabilities of prompts is asked for none")
    prompt, sampling = prompt_of(33, 20 * BLOCK + 5), msgspec.structs.replace(GREEDY, prompt_logprobs=3, max_tokens=4)
    await engine.answer("unscored", prompt, GREEDY)
    for request in ("scored", "scored again"):
        assert await engine.answer(request, prompt, sampling) == engine.tokens("unscored")[:4]
        parts = engine.parts[request]
        given = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        assert all(one.is_sound and one.size_bytes <= 256 << 10 for one in given)
        assert all(part.prompt_logprobs is None or not part.tokens for part in parts)
        assert next(at for at, part in enumerate(parts) if part.tokens) >= len(given), "all before the first token"
        assert [one.first for one in given] == [1 + sum(one.count for one in given[:at]) for at in range(len(given))]
        assert sum(one.count for one in given) == len(prompt) - 1
        logprobs = array("f", b"".join(one.logprobs for one in given))
        likeliest = array("f", b"".join(one.top_logprobs for one in given))
        assert len(likeliest) == 3 * len(logprobs)
        assert all(own <= best <= 0.0 for own, best in zip(logprobs, likeliest[::3], strict=True))
    # The same position without a prompt's log-probabilities: the token that is drawn after 40 of the prompt.
    await engine.answer("drawn", prompt[:40], msgspec.structs.replace(GREEDY, logprobs=3, max_tokens=1))
    [drawn] = engine.parts["drawn"][-1].logprobs or ()
    assert list(likeliest[3 * 39 : 3 * 40]) == pytest.approx(drawn.top_logprobs, abs=1e-3)


async def test_an_answer_follows_its_schema(engine: DrivenEngine) -> None:
    if await answers_with_its_prompt(engine):
        pytest.skip("an engine that echoes cannot follow a grammar that its prompt breaks")
    sampling = Sampling(max_tokens=60, temperature=0.0, grammar=SCHEMA)
    answer = await engine.answer("schema", prompt_of(22), sampling)
    last = engine.parts["schema"][-1]
    assert last.finish == "stop", last
    assert len(answer) > 5


async def test_a_grammar_that_is_none_is_an_error_of_that_request_alone(engine: DrivenEngine) -> None:
    if not engine.facts.grammars:
        pytest.skip("an engine without grammars is sent none")
    engine.submit("torn", prompt_of(23), Sampling(max_tokens=8, grammar="start: ( unclosed"))
    last = await engine.ended("torn")
    assert last.finish == "error"
    assert last.error.startswith(UNFOLLOWABLE)
    assert len(await engine.answer("next", prompt_of(23), GREEDY)) == 24


async def test_an_operation_that_it_cannot_do_is_refused_by_name(engine: DrivenEngine) -> None:
    for operation in ("clear", "sleep", "wake", "load_lora", "unload_lora"):
        if operation not in engine.facts.operations:
            assert operation in await engine.operate(operation, name="none", path="nowhere")


async def test_a_cleared_cache_finds_nothing(engine: DrivenEngine) -> None:
    if "clear" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    await engine.answer("before", prompt_of(24), GREEDY)
    assert engine.published
    assert await engine.operate("clear") == ""
    assert (engine.published, engine.digest) == (set(), 0)
    await engine.answer("cleared", prompt_of(24), GREEDY)
    assert engine.parts["cleared"][0].cached_tokens == 0


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_slept_answers_as_before(engine: DrivenEngine, level: int) -> None:
    if "sleep" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    whole = await engine.answer(f"awake-{level}", prompt_of(25), GREEDY)
    assert await engine.operate("sleep", level=level) == ""
    assert (engine.published, engine.digest) == (set(), 0)
    engine.submit(f"asleep-{level}", prompt_of(25), GREEDY)
    last = await engine.ended(f"asleep-{level}")
    assert (last.finish, last.error) == ("error", "the engine is asleep")
    assert await engine.operate("wake") == ""
    assert await engine.answer(f"again-{level}", prompt_of(25), GREEDY) == whole
    assert engine.parts[f"again-{level}"][0].cached_tokens == 0


async def test_a_cleared_cache_leaves_running_requests_alone(engine: DrivenEngine) -> None:
    if "clear" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    sampling = msgspec.structs.replace(GREEDY, max_tokens=80)
    whole = await engine.answer("calm", prompt_of(30), sampling)
    engine.submit("disturbed", prompt_of(30), sampling)
    await engine.until(lambda: len(engine.tokens("disturbed")) > 3)
    assert await engine.operate("clear") == ""
    assert (await engine.ended("disturbed")).finish == "length"
    assert engine.tokens("disturbed") == whole


async def test_an_engine_does_not_sleep_while_requests_run(engine: DrivenEngine) -> None:
    if "sleep" not in engine.facts.operations or engine.engine == "echo":
        pytest.skip("this engine does not offer it, or its requests are too short")
    engine.submit("sleepless", prompt_of(31), msgspec.structs.replace(GREEDY, max_tokens=900))
    await engine.until(lambda: len(engine.tokens("sleepless")) > 3)
    assert "are running" in await engine.operate("sleep")
    engine.cancel("sleepless")
    await engine.ended("sleepless")


async def test_a_lora_is_there_after_a_sleep_that_keeps_the_weights(engine: DrivenEngine, tmp_path: Path) -> None:
    if not {"sleep", "load_lora"} <= set(engine.facts.operations):
        pytest.skip("this engine does not offer it")
    lora = write_lora(tmp_path / "lora", Path(engine.facts.path))
    assert await engine.operate("load_lora", name="poet@1", path=str(lora)) == ""
    whole = await engine.answer("lora-awake", prompt_of(32), GREEDY, lora="poet@1")
    assert await engine.operate("sleep", level=1) == ""
    assert await engine.operate("wake") == ""
    assert await engine.answer("lora-again", prompt_of(32), GREEDY, lora="poet@1") == whole
    assert await engine.answer("lora-without", prompt_of(32), GREEDY) != whole
    assert await engine.operate("unload_lora", name="poet@1") == ""


async def test_sleep_and_wake_are_refused_where_they_change_nothing(engine: DrivenEngine) -> None:
    if "sleep" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    assert "awake" in await engine.operate("wake")
    assert await engine.operate("sleep") == ""
    assert "sleep" in await engine.operate("sleep")
    assert await engine.operate("wake") == ""


async def test_a_lora_changes_the_answers_that_name_it_and_no_others(engine: DrivenEngine, tmp_path: Path) -> None:
    if "load_lora" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    model = Path(engine.facts.path)
    poet, clerk = (write_lora(tmp_path / name, model, seed=seed) for seed, name in enumerate(("poet", "clerk")))
    plain = await engine.answer("lora-none", prompt_of(26), GREEDY)
    assert await engine.operate("load_lora", name="poet@1", path=str(poet)) == ""
    assert await engine.operate("load_lora", name="clerk@2", path=str(clerk)) == ""
    for name in ("first", "again"):  # also with the blocks of the first round
        answers = {"": plain}
        for lora in ("poet@1", "clerk@2", ""):
            engine.submit(f"{name}-{lora}", prompt_of(26), GREEDY, lora=lora)
        for lora in ("poet@1", "clerk@2", ""):
            await engine.ended(f"{name}-{lora}")
            answers[lora] = engine.tokens(f"{name}-{lora}")
            found = engine.parts[f"{name}-{lora}"][0].cached_tokens
            assert found == (0 if name == "first" and lora else 3 * BLOCK)
        assert answers[""] == plain
        assert len({tuple(answer) for answer in answers.values()}) == 3
    blocks = (await engine.snapshot()).blocks
    assert {"", "poet@1", "clerk@2"} <= {block.lora for block in blocks}
    assert len({block.hash for block in blocks}) == len(blocks)
    assert await engine.operate("unload_lora", name="poet@1") == ""
    assert await engine.operate("unload_lora", name="clerk@2") == ""
    assert await engine.answer("lora-after", prompt_of(26), GREEDY) == plain


async def test_a_lora_is_loaded_once_and_an_unknown_one_answers_nothing(engine: DrivenEngine, tmp_path: Path) -> None:
    if "load_lora" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    lora = write_lora(tmp_path / "lora", Path(engine.facts.path))
    assert "no LoRA poet@1" in await engine.operate("unload_lora", name="poet@1")
    assert await engine.operate("load_lora", name="poet@1", path=str(lora)) == ""
    assert "loaded already" in await engine.operate("load_lora", name="poet@1", path=str(lora))
    assert await engine.operate("unload_lora", name="poet@1") == ""
    engine.submit("lora-unknown", prompt_of(27), GREEDY, lora="poet@1")
    last = await engine.ended("lora-unknown")
    assert (last.finish, engine.tokens("lora-unknown")) == ("error", [])
    assert "no LoRA poet@1 is loaded" in last.error


async def test_a_directory_that_is_no_lora_is_refused(engine: DrivenEngine, tmp_path: Path) -> None:
    if "load_lora" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    assert await engine.operate("load_lora", name="none@1", path=str(tmp_path / "nowhere")) != ""
    assert len(await engine.answer("lora-refused", prompt_of(28), GREEDY)) == 24


async def test_a_lora_stays_loaded_while_its_attempts_run(engine: DrivenEngine, tmp_path: Path) -> None:
    if "load_lora" not in engine.facts.operations:
        pytest.skip("this engine does not offer it")
    lora = write_lora(tmp_path / "lora", Path(engine.facts.path))
    assert await engine.operate("load_lora", name="poet@1", path=str(lora)) == ""
    engine.submit("lora-long", prompt_of(29), msgspec.structs.replace(GREEDY, max_tokens=800), lora="poet@1")
    await engine.until(lambda: len(engine.tokens("lora-long")) > 3)
    assert "are running" in await engine.operate("unload_lora", name="poet@1")
    engine.cancel("lora-long")
    await engine.ended("lora-long")
    assert await engine.operate("unload_lora", name="poet@1") == ""


async def test_a_killed_engine_leaves_no_process(engine: DrivenEngine) -> None:  # the last one: it ends the engine
    engine.process.kill()
    await engine.until(lambda: engine.gone)
    if engine.process.pid == os.getpid():
        return  # it had none
    async with asyncio.timeout(60.0):
        while _group_lives(engine.process.pid):  # noqa: ASYNC110 - the kernel reports no such change
            await asyncio.sleep(0.05)


def _group_lives(group: int) -> bool:
    """Return whether a process of the group is there that has not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, number = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except OSError:
                continue
            if int(number) == group and state != "Z" and int(entry.name) != os.getpid():
                return True
    return False

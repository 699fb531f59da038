"""Ranks as processes on GPUs, or on one if there is no other: logits, answers, LoRAs, sleep, blocks in the store, and
lost ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from services.worker.config import CudaConfig, KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import Exchanged
from services.worker.contracts.runner import Work
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.process import EngineProcess
from services.worker.native.config import read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Linear
from services.worker.native.parallel.peers import RankLost
from services.worker.native.prompt_logprobs import ScoredRows
from services.worker.native.weights import load_weights
from shared.errors import ConfigError
from shared.messages.cards import KvLayout
from shared.messages.frames import PromptLogprobs
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.process_tree import children
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.drawer_socket import listening
from tests.worker.native.golden.cases import CASES
from tests.worker.native.merged import write_merged
from tests.worker.native.works import work
from tests.worker.shell import LIMIT_S
from tests.worker.test_engine_main import Store, answer, ready
from tests.worker.test_tensor_parallel import ended_ranks, operated

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.load import load_cuda  # noqa: E402
from services.worker.native.cuda.runner import CudaRunner  # noqa: E402
from tests.gpu.test_native_cuda import BLOCK_SIZE, BOUNDS, SLOTS, Both, named, sequences  # noqa: E402

VERIFY = {"verify": True, "checksums": True}
PROMPT = [position * 7 % 320 for position in range(100)]
GPUS = cp.cuda.runtime.getDeviceCount()
SHAPES: dict[str, dict[str, Any]] = {
    "head of 64, 4 share": {"heads": 8, "kv_heads": 2, "head_dim": 64, "hidden": 256, "intermediate": 512},
    "head of 128, none shares": {"heads": 4, "kv_heads": 4, "head_dim": 128, "hidden": 192, "intermediate": 320},
    "one head for both ranks": {"heads": 8, "kv_heads": 1, "head_dim": 64, "hidden": 256, "intermediate": 512},
    "biases": {
        **{"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 192, "intermediate": 320},
        **{"architecture": "Qwen2ForCausalLM"},
    },
    "own head": {"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "tied": False},
    "odd widths": {"heads": 4, "kv_heads": 2, "head_dim": 10, "hidden": 18, "intermediate": 30, "tied": False},
    "norms around": {**CASES["gemma3"], "head_dim": 64, "hidden": 256, "intermediate": 512, "kv_heads": 2},
    "fused": {
        **{"heads": 4, "kv_heads": 2, "head_dim": 96, "hidden": 384, "intermediate": 512},
        **{"architecture": "Phi3ForCausalLM"},
    },
}


def config_of(tmp_path: Path, ranks: int, element_type: Any = "float32", **model: Any) -> WorkerConfig:
    directory = tmp_path / "tiny"
    if not directory.exists():
        write_tiny_model(directory, **model)
    return WorkerConfig(
        model=str(directory),
        cache=str(tmp_path / "cache"),
        device="cuda",
        cuda=CudaConfig(dtype=element_type, graph_upper_bound=4, ranks_share_gpus=True, memory_share=0.5),
        capacity_blocks=SLOTS,
        block_size=BLOCK_SIZE,
        max_running=8,
        tensor_parallel=ranks,
    )


@contextmanager
def runner_of(config: WorkerConfig) -> Iterator[CudaRunner]:
    try:
        runner = load_cuda(config, lambda _loading: None)
        try:
            yield runner
        finally:
            runner.close()
        runner._memory.trim()
    finally:
        cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


class RanksAndNumPy(Both):
    """One model in NumPy and in ranks on the device, with the same slots."""

    def __init__(self, directory: Path, runner: CudaRunner, element_type: Any) -> None:
        config = read_config(directory)
        layout = KvLayout("float32", config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE)
        cache = KvCache(layout, SLOTS)
        self.reference = Decoder(config, load_weights(directory, config), cache, Linear(), SLOTS * BLOCK_SIZE)
        self.runner = runner
        self.bound = 1.25 * BOUNDS[element_type]

    def logits(self, works: list[Work]) -> Any:
        found = super().logits(works)
        assert self.runner._exchange is not None
        self.runner._exchange.check()
        return found


@pytest.mark.parametrize(
    ("shape", "element_type"),
    # float16 differs from bfloat16 in kernels alone, which one rank has too
    [*product(SHAPES, ("float32", "bfloat16")), *product(list(SHAPES)[:2], ("float16",))],
    ids=named,
)
def test_two_ranks_have_the_numpy_decoders_logits(tmp_path: Path, shape: str, element_type: Any) -> None:
    config = config_of(tmp_path, 2, element_type, **{**SHAPES[shape], "dtype": element_type})
    with runner_of(config) as runner:
        check_steps(RanksAndNumPy(Path(config.model), runner, element_type))


def test_four_ranks_of_which_two_have_the_same_head(tmp_path: Path) -> None:
    config = config_of(tmp_path, 4, **SHAPES["head of 64, 4 share"])
    with runner_of(config) as runner:
        check_steps(RanksAndNumPy(Path(config.model), runner, "float32"))


def check_steps(both: RanksAndNumPy) -> None:
    """Compare prefill in chunks, decode on graphs of several sizes, decode without graphs, and both in one step."""
    tokens, blocks = sequences(7, [700, 131, 40, 16, 1])
    first = [work(tokens[0][:300], blocks[0]), work(tokens[1][:17], blocks[1], draws=False)]
    both.check([*first, work(tokens[4], blocks[4])])
    both.check(
        [
            work(tokens[0][:699], blocks[0], start=300),  # a chunk that begins and ends within a block
            work(tokens[1][:130], blocks[1], start=17),
            work(tokens[2][:39], blocks[2]),
            work(tokens[3][:15], blocks[3]),
        ]
    )
    for use_graphs in (True, False):
        both.runner.use_graphs = use_graphs
        for rows in ((3, 0, 2, 1), (0,), (2, 1, 0)):
            both.check([work(tokens[n], blocks[n], start=len(tokens[n]) - 1) for n in rows])
    both.runner.use_graphs = True
    mixed = [work(tokens[0] + [5], blocks[0], start=700), work(tokens[4] + tokens[2], blocks[4] + blocks[2], start=1)]
    both.check(mixed)


def test_two_ranks_differ_from_one_by_roundings_alone(tmp_path: Path) -> None:
    """In float32 by less than 1e-4 of the largest logit; in bfloat16 both are as far from float32."""
    shape = {**SHAPES["head of 64, 4 share"], "layers": 4, "tied": False}
    tokens, blocks = sequences(3, [200, 60])
    steps = [
        [work(tokens[0][:-1], blocks[0]), work(tokens[1][:-1], blocks[1])],
        [work(own, slots, start=len(own) - 1) for own, slots in zip(tokens, blocks, strict=True)],
    ]
    logits: dict[tuple[str, int], Any] = {}
    for dtype in ("float32", "bfloat16"):
        for ranks in (1, 2):
            with runner_of(config_of(tmp_path, ranks, dtype, **shape)) as runner:
                for works in steps:
                    with runner.stream:
                        logits[dtype, ranks] = runner.logits(works).get()
    exact = logits["float32", 1]
    assert np.abs(logits["float32", 2] - exact).max() < 1e-4 * np.abs(exact).max()
    one, two = (np.linalg.norm(logits["bfloat16", ranks] - exact) for ranks in (1, 2))
    assert two < 1.25 * one, (one, two)


def test_the_same_step_twice_gives_the_same_bits(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, "bfloat16", **SHAPES["head of 64, 4 share"])
    tokens, blocks = sequences(5, [150, 70])
    works = [work(tokens[0], blocks[0]), work(tokens[1], blocks[1])]
    with runner_of(config) as runner:
        both = RanksAndNumPy(Path(config.model), runner, "bfloat16")
        assert (both.logits(works) == both.logits(works)).all()


def test_embeddings_and_log_probabilities_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    shape = SHAPES["head of 64, 4 share"]
    slots = list(range(10))
    embed = work(PROMPT, slots, sampling=Sampling(max_tokens=1, pooling="mean"))
    scored = work(PROMPT, slots, sampling=Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=2))
    results = []
    for ranks in (1, 2):
        with runner_of(config_of(tmp_path, ranks, **shape)) as runner:
            results.append([runner.step([each])[0] for each in (embed, scored)])
    for expected, found in zip(*results, strict=True):
        assert expected is not None
        assert found is not None
        assert floats(found.embedding) == pytest.approx(floats(expected.embedding), abs=1e-5)
        if expected.prompt_logprobs is not None:
            assert found.prompt_logprobs is not None
            said = floats(found.prompt_logprobs.logprobs)
            assert said == pytest.approx(floats(expected.prompt_logprobs.logprobs), abs=1e-4)


def floats(data: bytes) -> list[float]:
    return list(memoryview(data).cast("f"))


def test_a_rank_that_ends_between_two_steps_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, **SHAPES["head of 64, 4 share"])
    works = [work(PROMPT, list(range(10)))]
    with runner_of(config) as runner:
        runner.step(works)
        assert runner._group is not None
        os.kill(runner._group.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 was killed by signal 9 \(SIGKILL\)$"):
            runner.step(works)


def test_a_rank_that_stands_still_while_a_prompt_is_scored_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before the scores has ended well, and one exchange has them all: nothing that follows fails."""
    config = replace(config_of(tmp_path, 2, **SHAPES["head of 64, 4 share"]), stall_s=9.0)
    scored = work(PROMPT[:8], [0], sampling=Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=2))
    with runner_of(config) as runner:
        place, group, score = runner._place, runner._group, runner._score
        assert place is not None
        assert group is not None

        def score_without_rank_1(rows: ScoredRows) -> PromptLogprobs | None:
            [(_, connection)] = place.peers.connections
            connection.recv(1, socket.MSG_PEEK)  # it awaits the next order
            os.kill(group.pids[0], signal.SIGSTOP)
            return score(rows)

        monkeypatch.setattr(runner, "_score", score_without_rank_1)
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 did not answer in 3 s: it stands still$"):
            runner.step([scored])


def test_a_group_sleeps_at_level_2_alone(tmp_path: Path) -> None:
    with runner_of(config_of(tmp_path, 2)) as runner:
        refused = "sleep: level 1 is not built for ranks on GPUs: use level 2, or set tensor_parallel = 1"
        assert runner.operate("sleep", "", "", 1) == refused
        assert runner.operate("clear", "", "", 1) == ""
        assert greedy(runner, 4)


def greedy(runner: CudaRunner, length: int, loras: Sequence[str] = ("",)) -> list[list[int]]:
    """Return what a runner draws after PROMPT with each of these LoRAs, all in the same steps."""
    histories, start = [list(PROMPT) for _ in loras], 0
    for _ in range(length):
        works = []
        for number, (lora, history) in enumerate(zip(loras, histories, strict=True)):
            slots = range(10 * number, 10 * number + 10)
            works.append(work(history, slots, start=start, prompt_tokens=len(PROMPT), sequence=number))
            works[-1].lora = lora
        start = len(histories[0])
        for history, drawn in zip(histories, runner.step(works), strict=True):
            assert drawn is not None
            history.append(drawn.token)
    return [history[len(PROMPT) :] for history in histories]


@pytest.mark.parametrize("shape", ["head of 64, 4 share", "one head for both ranks", "biases", "norms around"])
def test_two_ranks_draw_the_tokens_of_one_with_different_loras_in_one_step(tmp_path: Path, shape: str) -> None:
    model = {"tied": False, **SHAPES[shape]}
    loras = ("poet", "", "clerk", "poet")
    said, plain = [], []
    for ranks in (1, 2):
        config = config_of(tmp_path, ranks, **model)
        with runner_of(config) as runner:
            plain.append(greedy(runner, 8))
            for seed, name in enumerate(("poet", "clerk")):
                lora = write_lora(tmp_path / name, Path(config.model), seed=seed, rank=5 + seed)
                assert runner.operate("load_lora", name, str(lora), 1) == ""
            said.append(greedy(runner, 8, loras))
            plain.append(greedy(runner, 8))
            assert runner.operate("unload_lora", "poet", "", 1) == ""
            assert runner.operate("load_lora", "poet", str(tmp_path / "clerk"), 1) == ""
            assert greedy(runner, 8, ("poet",)) == [said[-1][2]]
    assert said[1] == said[0]
    assert said[0][0] == said[0][3] not in (said[0][1], said[0][2])
    assert plain == [[said[0][1]]] * 4


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_two_ranks_have_the_numpy_decoders_logits_with_a_lora(tmp_path: Path, element_type: Any) -> None:
    config = config_of(tmp_path, 2, element_type, **{**SHAPES["own head"], "shards": 1})
    base = Path(config.model)
    lora = write_lora(tmp_path / "lora", base, rank=5)
    merged = write_merged(tmp_path / "merged", base, lora)
    with runner_of(config) as runner:
        assert runner.operate("load_lora", "poet", str(lora), 1) == ""
        both = RanksAndNumPy(merged, runner, element_type)
        works = [work(PROMPT, range(10))]
        expected = both.reference.step(works)
        works[0].lora = "poet"
        bound = (1e-3 if element_type == "float32" else 0.1) * np.abs(expected).max()
        np.testing.assert_allclose(both.logits(works), expected, rtol=0, atol=bound)


def test_a_lora_that_cannot_be_served_is_refused_in_the_line_of_one_rank(tmp_path: Path) -> None:
    lines = []
    for ranks in (1, 2):
        config = config_of(tmp_path, ranks)
        other = tmp_path / "other"
        if not other.exists():
            write_lora(tmp_path / "lora", write_tiny_model(other, hidden=96, heads=6))
        with runner_of(config) as runner:
            lines.append(runner.operate("load_lora", "poet", str(tmp_path / "lora"), 1))
            lines.append(runner.operate("unload_lora", "poet", "", 1))
            assert greedy(runner, 2)
    assert "has shape" in lines[0]
    assert lines[:2] == lines[2:]


def test_a_rank_that_ends_before_a_lora_is_loaded_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2)
    lora = write_lora(tmp_path / "lora", Path(config.model))
    with runner_of(config) as runner:
        assert runner._group is not None
        os.kill(runner._group.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 was killed by signal 9 \(SIGKILL\)$"):
            runner.operate("load_lora", "poet", str(lora), 1)


def test_a_group_that_slept_has_given_its_memory_back_and_draws_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path, 2, **SHAPES["head of 64, 4 share"])
    lora = write_lora(tmp_path / "lora", Path(config.model))
    with runner_of(config) as runner:
        expected = greedy(runner, 8)
        for _ in range(2):
            assert runner._group is not None
            assert runner.operate("load_lora", "poet", str(lora), 1) == ""
            with_lora = greedy(runner, 8, ("poet",))
            assert runner.operate("unload_lora", "poet", "", 1) == ""
            pids = list(runner._group.pids)
            assert runner.operate("sleep", "", "", 2) == ""
            ended_ranks(pids)
            assert runner._memory.statistics().reserved_bytes == 0
            assert runner.operate("wake", "", "", 1) == ""
            assert greedy(runner, 8) == expected
            assert runner.operate("load_lora", "poet", str(lora), 1) == ""
            assert greedy(runner, 8, ("poet",)) == with_lora
            assert runner.operate("unload_lora", "poet", "", 1) == ""


def test_a_group_does_not_wake_with_other_weights(tmp_path: Path) -> None:
    with runner_of(config_of(tmp_path, 2)) as runner:
        expected = greedy(runner, 4)
        weights = Path(runner.facts.path) / "model.safetensors"
        stored = weights.read_bytes()
        assert runner.operate("sleep", "", "", 2) == ""
        weights.write_bytes(stored[:-400] + bytes(400))
        assert "the weights have changed since the worker started" in runner.operate("wake", "", "", 1)
        assert runner._memory.statistics().reserved_bytes == 0
        weights.write_bytes(stored)
        assert runner.operate("wake", "", "", 1) == ""
        assert greedy(runner, 4) == expected


def test_a_group_of_which_a_rank_cannot_start_stays_asleep_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runner_of(config_of(tmp_path, 2)) as runner:
        expected = greedy(runner, 4)
        assert runner.operate("sleep", "", "", 2) == ""
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            said = "wake: tensor_parallel: rank 1 ended with status 1; the log may have its last words"
            assert runner.operate("wake", "", "", 1) == said
        assert runner._memory.statistics().reserved_bytes == 0
        assert runner.operate("wake", "", "", 1) == ""
        assert greedy(runner, 4) == expected


async def test_an_engine_of_two_ranks_exchanges_blocks_after_it_has_slept(tmp_path: Path, memory: Path) -> None:
    kvbm = KVConnectorConfig(pool=str(memory / "pool"), wait_s=LIMIT_S)
    two = await EngineProcess.start(replace(config_of(tmp_path, 2), kvbm=kvbm), "tiny", "w1")
    store = Store(memory / "pool", await ready(two))
    async with listening(store.directory, store.drawer):
        await store.linked(two)
        computed = await answer(two, PROMPT, 8, store=store)
        await store.saved(two, 6)
        assert await operated(two, "sleep") == ""
        assert await operated(two, "wake") == ""
        await store.linked(two)
        loaded = await answer(two, PROMPT, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        assert await two.end(LIMIT_S) == 0
    store.drawer.close()


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, 8)
    alone = replace(config, cuda=replace(config.cuda, ranks_share_gpus=False, gpu=GPUS - 1))
    config = replace(alone, tensor_parallel=2)
    with pytest.raises(
        ConfigError, match=rf"^tensor_parallel is 2, from GPU {GPUS - 1} \(cuda\.gpu\) on, but CUDA shows"
    ):
        load_cuda(config, lambda _loading: None)


@pytest.mark.parametrize("kv_heads", [2, 1])
async def test_greedy_answers_of_two_ranks_are_those_of_one(tmp_path: Path, kv_heads: int) -> None:
    said = []
    for ranks in (1, 2):
        engine = await EngineProcess.start(config_of(tmp_path, ranks, kv_heads=kv_heads), "tiny", "w1")
        await ready(engine)
        said.append([part.tokens for part in await answer(engine, PROMPT, 24)])
        said.append([part.tokens for part in await answer(engine, PROMPT, 24)])
        assert await engine.end(LIMIT_S) == 0
    assert said[1:] == said[:1] * 3


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a directory in memory: Linux pins no file of a disk's file system for as long as CUDA would."""
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    ("path", "checks"),
    [("direct", {}), ("direct", VERIFY), ("rows", VERIFY), ("batch", {})],
    ids=["direct", "direct, verify", "rows, verify", "batch"],
)
async def test_blocks_that_two_ranks_stored_are_loaded_by_one_and_back(
    tmp_path: Path, memory: Path, path: Any, checks: dict[str, Any]
) -> None:
    pool = memory / "pool"
    kvbm = KVConnectorConfig(pool=str(pool), wait_s=LIMIT_S, **checks)
    other = [position * 3 % 320 for position in range(100)]
    both = []
    for ranks in (2, 1):
        config = config_of(tmp_path, ranks)
        copy_path = path if ranks == 2 else "auto"
        both.append(replace(config, kvbm=kvbm, cuda=replace(config.cuda, copy_path=copy_path)))
    two = await EngineProcess.start(both[0], "tiny", "w1")
    store = Store(pool, await ready(two))
    async with listening(store.directory, store.drawer):
        await store.linked(two)
        computed = await answer(two, PROMPT, 8, store=store)
        await store.saved(two, 6)
        one = await EngineProcess.start(both[1], "tiny", "w2")
        await ready(one)
        await store.linked(one)
        loaded = await answer(one, PROMPT, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        store.exchanged = Exchanged()  # what follows are the totals of another engine
        computed = await answer(one, other, 8, store=store)
        await store.saved(one, 6)
        loaded = await answer(two, other, 8, store=store)
        assert [part.tokens for part in loaded] == [part.tokens for part in computed]
        assert (loaded[-1].cached_tokens, loaded[-1].cached_host_tokens) == (96, 96)
        assert await two.end(LIMIT_S) == 0
        assert await one.end(LIMIT_S) == 0
    store.drawer.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_rank_that_is_lost_in_mid_stream_ends_the_engine_by_its_name(
    tmp_path: Path, number: signal.Signals
) -> None:
    config = replace(config_of(tmp_path, 2), stall_s=9.0)
    engine = await EngineProcess.start(config, "tiny", "w1")
    await ready(engine)
    [rank] = children(engine.pid)
    answering = asyncio.ensure_future(answer(engine, PROMPT, 800))
    await asyncio.sleep(0)
    os.kill(rank, number)
    said = {
        signal.SIGKILL: "RankLost: tensor_parallel: rank 1 was killed by signal 9",
        signal.SIGSTOP: "RankLost: tensor_parallel: rank 1 did not answer in 3 s: it stands still",
    }
    with pytest.raises(AssertionError, match=said[number]):
        await answering
    with pytest.raises(ChannelClosed):
        await engine.receive()
    assert await engine.end(LIMIT_S) == 1
    ended_ranks([rank])


async def test_ranks_end_with_an_engine_that_is_killed_in_mid_stream(tmp_path: Path) -> None:
    engine = await EngineProcess.start(config_of(tmp_path, 2), "tiny", "w1")
    await ready(engine)
    [rank] = children(engine.pid)
    handle = os.pidfd_open(rank)
    answering = asyncio.ensure_future(answer(engine, PROMPT, 800))
    await asyncio.sleep(0)
    engine.kill()
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(handle, ended.cancel)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([ended])
    loop.remove_reader(handle)
    os.close(handle)
    with pytest.raises(ChannelClosed):
        await answering
    await engine.end(LIMIT_S)

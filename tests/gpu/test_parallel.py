"""Ranks as processes on GPUs, or on one if there is no other: logits, answers, blocks in the store, and lost ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.tiny_model import write_tiny_model
from tests.worker.drawer_socket import listening
from tests.worker.native.golden.cases import CASES
from tests.worker.native.works import work
from tests.worker.shell import LIMIT_S
from tests.worker.test_engine_main import Store, answer, ready
from tests.worker.test_tensor_parallel import ended_ranks

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.load import load_cuda  # noqa: E402
from services.worker.native.cuda.runner import CudaRunner  # noqa: E402
from tests.gpu.test_native_cuda import BLOCK_SIZE, BOUNDS, SLOTS, Both, named, sequences  # noqa: E402

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
        self.bound = BOUNDS[element_type]

    def logits(self, works: list[Work]) -> Any:
        found = super().logits(works)
        assert self.runner._exchange is not None
        self.runner._exchange.check()
        return found


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=named)
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
    config = config_of(tmp_path, 2, **SHAPES["head of 64, 4 share"])
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
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 did not answer in 10 s: it stands still$"):
            runner.step([scored])


def test_what_is_not_built_for_ranks_is_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    with runner_of(config_of(tmp_path, 2)) as runner:
        refused = "sleep: not built for ranks on GPUs: set tensor_parallel = 1"
        assert runner.operate("sleep", "", "", 1) == refused
        assert runner.operate("clear", "", "", 1) == ""


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


@pytest.mark.parametrize("path", ["rows", "batch"])
@pytest.mark.parametrize("checks", [{}, {"verify": True, "checksums": True}], ids=["plain", "verify"])
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

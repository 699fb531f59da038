"""A decoder in ranks: its logits are those of one rank, for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.contracts.runner import Work
from services.worker.native.config import read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Linear
from services.worker.native.parallel.peers import buffer_bytes
from services.worker.native.parallel.plan import decode_plan, encode_plan
from services.worker.native.parallel.rank import RankSizes, rank_cache, rank_decoder
from services.worker.native.parallel.shares import share_out
from services.worker.native.prepare import prepare
from services.worker.native.weights import load_weights
from services.worker.sharing.host_pages import HostPages
from shared.messages.cards import KvLayout
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, prompt_tokens
from tests.worker.native.parallel.threaded import at_once, connected
from tests.worker.native.works import work

BLOCK_SIZE, BLOCKS, POSITIONS = 16, 32, 256
TOLERANCE = 1e-4
TOKENS = prompt_tokens()
SLOTS, OTHER_SLOTS = [5, 3, 21, 7, 1, 12], [0, 8, 9, 10]

Step = Callable[[Sequence[Work]], NDArray[np.float32]]
MakeBoth = Callable[..., "Both"]


class Both:
    """One random model, computed by one rank and by several."""

    def __init__(self, directory: Path, name: str, ranks: int, kv_dtype: str = "float32") -> None:
        directory = prepare(write_tiny_model(directory / "model", **CASES[name]), directory / "cache", lambda _: None)
        config, layout_of = read_config(directory), partial(KvLayout, kv_dtype)
        layout = layout_of(config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE)
        weights = load_weights(directory, config)
        self.cache = KvCache(layout, BLOCKS)
        self.one = Decoder(config, weights, self.cache, Linear(4), POSITIONS)
        shares = share_out(config, ranks)
        peers = connected(
            ranks, bytes_each=buffer_bytes(config.vocab, ranks), columns=[share.vocab for share in shares]
        )
        self._peers = peers
        pages = HostPages(layout.block_bytes * BLOCKS)
        self.caches = [rank_cache(layout, BLOCKS, share, pages, own) for share, own in zip(shares, peers, strict=True)]
        sizes = RankSizes(capacity_blocks=BLOCKS, context_length=POSITIONS, lora_rank=8, lora_bytes=0)
        self._decoders = [
            rank_decoder(config, weights, share, cache, own, sizes)
            for share, cache, own in zip(shares, self.caches, peers, strict=True)
        ]

    def close(self) -> None:
        for peers in self._peers:
            peers.close()
        self.caches[0].close()

    def ranks(self, works: Sequence[Work]) -> NDArray[np.float32]:
        """Compute a step in all ranks, of which all but the first see its plan alone; return rank 0's logits."""
        plan = decode_plan(encode_plan(works, BLOCK_SIZE))
        assert isinstance(plan, list)
        calls = [partial(self._decoders[0].step, works)]
        calls += [partial(decoder.step, plan) for decoder in self._decoders[1:]]
        logits: NDArray[np.float32] = at_once(calls)[0]
        return logits


@pytest.fixture
def make_both(tmp_path: Path) -> Iterator[MakeBoth]:
    with ExitStack() as held:

        def make(name: str, ranks: int, kv_dtype: str = "float32") -> Both:
            both = Both(tmp_path, name, ranks, kv_dtype)
            held.callback(both.close)
            return both

        yield make


def steps_of(step: Step) -> list[NDArray[np.float32]]:
    """Compute a prompt in chunks and two answers of two sequences; return the logits of each step."""
    found = [step([work(TOKENS[:40], SLOTS, draws=False)])]
    found.append(step([work(TOKENS[:70], SLOTS, start=40), work(TOKENS[100:133], OTHER_SLOTS)]))
    for more in range(1, 4):
        first, second = TOKENS[: 70 + more], TOKENS[100 : 133 + more]
        found.append(step([work(first, SLOTS, start=69 + more), work(second, OTHER_SLOTS, start=32 + more)]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_logits_of_one(make_both: MakeBoth, name: str) -> None:
    both = make_both(name, ranks=2)
    for one, two in zip(steps_of(both.one.step), steps_of(both.ranks), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "olmo2", "llama with untied embeddings and bias"])
def test_four_ranks_with_two_key_value_heads_give_the_logits_of_one(make_both: MakeBoth, name: str) -> None:
    both = make_both(name, ranks=4)
    for one, four in zip(steps_of(both.one.step), steps_of(both.ranks), strict=True):
        np.testing.assert_allclose(four, one, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "ranks"), [("llama", 2), ("llama", 4), ("gemma", 2)])
def test_the_blocks_of_all_ranks_are_those_of_one(make_both: MakeBoth, name: str, ranks: int) -> None:
    both = make_both(name, ranks)
    steps_of(both.one.step)
    steps_of(both.ranks)
    of_one = np.frombuffer(both.cache.memory, np.float32)
    of_all = np.frombuffer(both.caches[0].memory, np.float32)
    assert of_one.any()
    np.testing.assert_allclose(of_all, of_one, rtol=0, atol=TOLERANCE)


def test_blocks_that_one_rank_has_computed_go_on_in_two_and_back(make_both: MakeBoth) -> None:
    both = make_both("llama", ranks=2)
    expected = steps_of(both.one.step)[-1]
    both.caches[0].memory[:] = both.cache.memory  # as the block store copies them
    again = [work(TOKENS[:73], SLOTS, start=72), work(TOKENS[100:136], OTHER_SLOTS, start=35)]
    np.testing.assert_allclose(both.ranks(again), expected, rtol=0, atol=TOLERANCE)
    both.cache.memory[:] = both.caches[0].memory
    np.testing.assert_allclose(both.one.step(again), expected, rtol=0, atol=TOLERANCE)


def test_ranks_store_keys_and_values_as_bfloat16_too(make_both: MakeBoth) -> None:
    both = make_both("llama", ranks=4, kv_dtype="bfloat16")
    for one, four in zip(steps_of(both.one.step), steps_of(both.ranks), strict=True):
        np.testing.assert_allclose(four, one, rtol=0, atol=0.05)

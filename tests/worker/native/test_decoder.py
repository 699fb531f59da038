"""The decoder gives transformers' logits (golden files), in whichever steps the tokens are computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.native.config import read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Linear
from services.worker.native.prepare import prepare
from services.worker.native.weights import load_weights
from shared.messages.cards import KvLayout
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, CHECKED_POSITIONS, CONTEXT_TOKENS, GOLDEN, prompt_tokens
from tests.worker.native.works import work

TOLERANCE = 1e-3
BLOCK_SIZE = 16
CAPACITY_BLOCKS = 64
TOKENS = prompt_tokens()
BLOCKS = [5, 3, 60, 7, 1, 12, 0, 33, 34, 35, 36, 2, 63]
"""The slots of a sequence, in random order."""

Logits = NDArray[np.float32]


class Checked:
    """A random model, and the logits that transformers computed for it, by position."""

    def __init__(self, directory: Path, name: str, dot_rows: int = 4, kv_dtype: str = "float32") -> None:
        directory = prepare(write_tiny_model(directory / "model", **CASES[name]), directory / "cache", lambda _: None)
        config = read_config(directory)
        layout = KvLayout(kv_dtype, config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE)
        self.cache = KvCache(layout, CAPACITY_BLOCKS)
        self.decoder = Decoder(config, load_weights(directory, config), self.cache, Linear(dot_rows), 256)
        with np.load(GOLDEN / "logits.npz") as golden:
            self.expected: dict[int, Logits] = dict(zip(CHECKED_POSITIONS, golden[name], strict=True))

    def agrees(self, position: int, logits: Logits) -> None:
        np.testing.assert_allclose(logits, self.expected[position], rtol=0, atol=TOLERANCE)


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Checked:
    return Checked(tmp_path, request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Checked:
    """Return one model, for tests that do not depend on the family."""
    return Checked(tmp_path, "llama")


@pytest.fixture
def narrow(tmp_path: Path) -> Checked:
    """Return a model whose keys and values are stored as bfloat16."""
    return Checked(tmp_path, "llama", kv_dtype="bfloat16")


def test_prompts_in_one_piece_give_transformers_logits(model: Checked) -> None:
    for position in CHECKED_POSITIONS:
        [logits] = model.decoder.step([work(TOKENS[: position + 1], BLOCKS)])
        model.agrees(position, logits)


def test_a_prompt_in_chunks_and_then_token_by_token_gives_transformers_logits(model: Checked) -> None:
    for start, end in ((0, 16), (16, 30), (30, 64), (64, 65), (65, 70), (70, 151)):
        [logits] = model.decoder.step([work(TOKENS[:end], BLOCKS, start=start)])
        if end - 1 in model.expected:
            model.agrees(end - 1, logits)
    for end in range(152, CONTEXT_TOKENS + 1):
        [logits] = model.decoder.step([work(TOKENS[:end], BLOCKS, start=end - 1)])
    model.agrees(CONTEXT_TOKENS - 1, logits)


def test_a_cached_prefix_is_used_as_if_it_had_been_computed(model: Checked) -> None:
    model.decoder.step([work([*TOKENS[:64], 1, 2, 3], BLOCKS, draws=False)])
    reusing = [*BLOCKS[:4], *range(40, 50)]
    [logits] = model.decoder.step([work(TOKENS[:151], reusing, start=64)])
    model.agrees(150, logits)


def test_sequences_of_all_kinds_in_one_step_do_not_affect_one_another(model: Checked) -> None:
    other = [token % 320 for token in range(7, 180, 3)]
    others = [[20, 21, 22, 23], [24, 25], [26, 27, 28, 29]]
    model.decoder.step([work(other[:40], others[0], draws=False), work(TOKENS[:63], BLOCKS, draws=False)])
    model.decoder.step([work(other[:5], others[1], draws=False), work(other[:41], others[2], draws=False)])
    model.decoder.step([work(other[:41], others[0], start=40), work(TOKENS[:64], BLOCKS, start=63)])
    first, ours, third, fourth = model.decoder.step(
        [
            work(other[:42], others[0], start=41),  # decodes beside ours, of similar length
            work(TOKENS[:65], BLOCKS, start=64),
            work(other[:20], others[1], start=5),  # the next chunk of a prompt
            work(other[:42], others[2], start=41),
        ]
    )
    model.agrees(64, ours)
    assert np.isfinite(third).all()
    np.testing.assert_allclose(first, fourth, rtol=0, atol=TOLERANCE)


def test_a_preempted_sequence_computes_the_same_in_other_slots(model: Checked) -> None:
    model.decoder.step([work(TOKENS[:63], BLOCKS, draws=False)])
    model.decoder.step([work(TOKENS[100:180], BLOCKS, draws=False)])  # another takes its slots
    elsewhere = list(range(50, 45, -1))
    [logits] = model.decoder.step([work(TOKENS[:64], elsewhere)])
    model.agrees(63, logits)
    [logits] = model.decoder.step([work(TOKENS[:65], elsewhere, start=64)])
    model.agrees(64, logits)


def test_only_works_that_draw_have_logits(llama: Checked) -> None:
    logits = llama.decoder.step(
        [work(TOKENS[:8], [1], draws=False), work(TOKENS[:16], [2]), work(TOKENS[:3], [3], draws=False)]
    )
    assert logits.shape == (1, 320)
    llama.agrees(15, logits[0])
    assert llama.decoder.step([work(TOKENS[:8], [1], draws=False)]).shape == (0, 320)


def test_what_a_page_held_before_does_not_matter(llama: Checked) -> None:
    llama.cache.pages[...] = np.random.default_rng(0).normal(0, 100, llama.cache.pages.shape)
    [logits] = llama.decoder.step([work(TOKENS[:30], BLOCKS)])
    llama.agrees(29, logits)
    llama.decoder.step([work(TOKENS[:15], [8], draws=False), work(TOKENS[:100], list(range(40, 50)), draws=False)])
    short, _ = llama.decoder.step(
        [work(TOKENS[:16], [8], start=15), work(TOKENS[:101], list(range(40, 50)), start=100)]
    )
    llama.agrees(15, short)


@pytest.mark.parametrize("dot_rows", [0, 64])
def test_both_ways_to_multiply_give_transformers_logits(tmp_path: Path, dot_rows: int) -> None:
    model = Checked(tmp_path, "qwen2", dot_rows)
    [logits] = model.decoder.step([work(TOKENS[:30], BLOCKS)])
    model.agrees(29, logits)


def test_a_tiled_long_chunk_gives_the_same_logits(llama: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.native.decoder._SCORES_LIMIT", 4 * 200 * 7)  # seven rows a tile
    [logits] = llama.decoder.step([work(TOKENS, BLOCKS)])
    llama.agrees(199, logits)


CHUNKS = ([200], [64, 136], [16, 7, 1, 40, 136], [100, *[1] * 100])
"""Several ways to split a prompt into chunks."""


def chunked(model: Checked, chunks: Sequence[int]) -> Logits:
    """Compute a prompt in chunks; return the logits of its last token."""
    logits: Logits = np.empty(0, np.float32)
    for start, end in itertools.pairwise(itertools.accumulate(chunks, initial=0)):
        logits = model.decoder.step([work(TOKENS[:end], BLOCKS, start=start)])[0]
    return logits


def stored(model: Checked) -> NDArray[np.uint16]:
    """Return the pages of the prompt's full blocks, as the bits of bfloat16."""
    bits: NDArray[np.uint16] = model.cache.pages[BLOCKS[:12]]
    return bits


def test_a_bfloat16_cache_gives_logits_close_to_a_float32_caches(narrow: Checked) -> None:
    wide = narrow.expected[CONTEXT_TOKENS - 1]
    assert 0 < np.abs(chunked(narrow, CHUNKS[0]) - wide).max() < 0.05 * wide.std()


@pytest.mark.parametrize("chunks", CHUNKS[1:])
def test_a_bfloat16_cache_gives_the_same_logits_however_a_prompt_is_split(
    narrow: Checked, chunks: Sequence[int]
) -> None:
    """The last bits of a few numbers may differ, because rows that are computed together differ in theirs."""
    logits = chunked(narrow, CHUNKS[0])
    bits = stored(narrow)
    np.testing.assert_allclose(chunked(narrow, chunks), logits, rtol=0, atol=TOLERANCE)
    assert (stored(narrow) == bits).mean() > 0.99
    assert np.abs(stored(narrow).astype(np.int32) - bits).max() <= 1


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_worker_computes_the_same_with_a_fetched_block_as_the_worker_that_made_it(
    tmp_path: Path, kv_dtype: str
) -> None:
    model = Checked(tmp_path, "llama", kv_dtype=kv_dtype)
    chunked(model, [199])
    [own] = model.decoder.step([work(TOKENS, BLOCKS, start=192)])
    given = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52]
    model.cache.pages[given[:12]] = model.cache.pages[BLOCKS[:12]]
    [others] = model.decoder.step([work(TOKENS, given, start=192)])
    np.testing.assert_array_equal(own, others)

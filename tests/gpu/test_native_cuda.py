"""The decoder on the device against the NumPy decoder, on small random models of every path's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.config import read_config
from services.worker.native.decoder import Decoder
from services.worker.native.kv_cache import KvCache
from services.worker.native.linear import Linear
from services.worker.native.logprobs import score
from services.worker.native.sampler import sample
from services.worker.native.weights import load_weights
from shared.messages.cards import KvLayout
from shared.messages.frames import PromptLogprobs
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES
from tests.worker.native.works import GREEDY, work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.layout import sections  # noqa: E402
from tests.gpu.models import cuda_runner  # noqa: E402

Floats = NDArray[np.float32]
BLOCK_SIZE = 16
SLOTS = 400
SHAPES: dict[str, dict[str, Any]] = {
    "head of 64, 4 share": {"heads": 8, "kv_heads": 2, "head_dim": 64, "hidden": 256, "intermediate": 512},
    "head of 128, none shares": {"heads": 3, "kv_heads": 3, "head_dim": 128, "hidden": 192, "intermediate": 320},
    "head of 128, 8 share": {"heads": 16, "kv_heads": 2, "head_dim": 128, "hidden": 256, "intermediate": 512},
    "head of 64, 12 share": {"heads": 12, "kv_heads": 1, "head_dim": 64, "hidden": 192, "intermediate": 512},
    "head of 64, 7 share, biases": {
        **{"heads": 14, "kv_heads": 2, "head_dim": 64, "hidden": 192, "intermediate": 320},
        "architecture": "Qwen2ForCausalLM",
    },
    "head of 64, all biases": {"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 192, "bias": True},
    "head of 16": {"heads": 4, "kv_heads": 2, "hidden": 64, "intermediate": 128},
    "odd widths": {"heads": 2, "kv_heads": 1, "head_dim": 10, "hidden": 18, "intermediate": 30, "tied": False},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "head of 128, a window of 3": {
        **{"heads": 4, "kv_heads": 2, "head_dim": 128, "hidden": 256, "intermediate": 512},
        **{"architecture": "MistralForCausalLM", "settings": {"sliding_window": 3}},
    },
    "head of 64, a window of 200": {
        **{"heads": 14, "kv_heads": 1, "head_dim": 64, "hidden": 192, "intermediate": 320},
        **{"architecture": "MistralForCausalLM", "settings": {"sliding_window": 200}},
    },
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {
        **{"heads": 8, "kv_heads": 2, "head_dim": 128, "hidden": 256, "intermediate": 512, "bias": True},
        **{"architecture": "Qwen3ForCausalLM"},
    },
    "qwen3, odd widths": {
        **{"heads": 2, "kv_heads": 1, "head_dim": 10, "hidden": 18, "intermediate": 30},
        **{"architecture": "Qwen3ForCausalLM"},
    },
    "gemma": {**CASES["gemma"], "head_dim": 64, "hidden": 256, "intermediate": 512},
    "gemma2": {**CASES["gemma2"], "head_dim": 256, "hidden": 256, "intermediate": 512},
    "gemma3": {**CASES["gemma3"], "head_dim": 64, "hidden": 256, "intermediate": 512},
    "phi3": {**CASES["phi3"], "head_dim": 96, "hidden": 384, "intermediate": 512},
    "phi3, partial rotation": {
        **{"heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "intermediate": 512},
        **{"architecture": "Phi3ForCausalLM", "settings": {"partial_rotary_factor": 0.75}},
    },
    "granite": {**CASES["granite"], "head_dim": 64, "hidden": 256, "intermediate": 512},
    "smollm3": {
        **{"heads": 4, "kv_heads": 2, "head_dim": 128, "hidden": 256, "intermediate": 512},
        **{"architecture": "SmolLM3ForCausalLM", "settings": {"no_rope_layers": [1, 0]}},
    },
    "olmo2": {**CASES["olmo2"], "head_dim": 64, "hidden": 256, "bias": True},
}
"""Models whose arithmetic differs from Llama's."""
BOUNDS = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2.5e-2}
"""Bounds of ‖difference‖ / ‖reference‖: some roundings of each type, as narrow models average little."""


class Both:
    """One model in NumPy and on the device, with the same slots."""

    def __init__(
        self,
        directory: Path,
        element_type: Any,
        *,
        graphs_up_to: int = 0,
        max_running: int = 64,
        hopper_kernels: bool = True,
    ) -> None:
        config = read_config(directory)
        layout = KvLayout("float32", config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE)
        cache = KvCache(layout, SLOTS)
        self.reference = Decoder(config, load_weights(directory, config), cache, Linear(), SLOTS * BLOCK_SIZE)
        settings = CudaConfig(
            dtype=element_type,
            graphs=graphs_up_to > 0,
            graph_upper_bound=max(1, graphs_up_to),
            hopper_kernels=hopper_kernels,
        )
        self.runner = cuda_runner(
            directory, settings, capacity_blocks=SLOTS, block_size=BLOCK_SIZE, max_running=max_running
        )
        # What nobody wrote must not matter: every bit set is not a number in any of the three types.
        with self.runner.stream:
            self.runner.pages.view(cp.uint8)[...] = 0xFF
        self.bound = BOUNDS[element_type]

    def check(self, works: list[Work], *, each_row: bool = False) -> Floats:
        """Compute on both sides, compare, and return the device's logits.

        With `each_row` rows are compared by themselves, too. A single one may err five times as much.
        """
        expected: Floats = self.reference.step(works)
        logits = self.logits(works)
        assert np.isfinite(logits).all()
        error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
        assert error < self.bound, error
        if each_row:
            errors = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert (errors < 5 * self.bound).all(), [(one.end, error) for one, error in zip(works, errors, strict=True)]
        return logits

    def splits(self, works: list[Work]) -> list[int]:
        """Return the number of splits of each row of a step."""
        padded_rows = self.runner._graphs.rows_for(works) if self.runner.use_graphs else 0
        step = self.runner._layout.lay_out(works, padded_rows=padded_rows)
        at = sections(step.counts)
        counts: list[int] = step.ints[at.singles : at.splits].reshape(-1, 3)[: len(works), 2].tolist()
        return counts

    def logits(self, works: list[Work]) -> Floats:
        """Compute and return the device's logits."""
        with self.runner.stream:
            logits: Floats = self.runner.logits(works).get()
        return logits


def sequences(seed: int, lengths: list[int], vocab: int = 320) -> tuple[list[list[int]], list[list[int]]]:
    """Make random tokens, and scattered slots that cover them."""
    random = np.random.default_rng(seed)
    free = random.permutation(SLOTS).tolist()
    tokens = [random.integers(0, vocab, length).tolist() for length in lengths]
    return tokens, [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]


def named(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [*SHAPES, *WINDOWED], ids=named)
def test_chunked_prefill_and_decode_give_the_numpy_decoders_logits(
    tmp_path: Path, shape: str, element_type: Any
) -> None:
    check_steps(tmp_path, {**SHAPES, **WINDOWED}[shape], element_type)


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=named)
def test_every_architecture_has_the_numpy_decoders_logits(tmp_path: Path, architecture: str, element_type: Any) -> None:
    check_steps(tmp_path, ARCHITECTURES[architecture], element_type)


@pytest.mark.parametrize("shape", ["head of 128, none shares", "head of 128, a window of 3"], ids=named)
def test_prompts_need_no_instructions_that_only_hopper_has(tmp_path: Path, shape: str) -> None:
    check_steps(tmp_path, {**SHAPES, **WINDOWED}[shape], "bfloat16", hopper_kernels=False)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_prompts_lie_in_blocks_of_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    monkeypatch.setattr("tests.gpu.test_native_cuda.BLOCK_SIZE", block_size)
    check_steps(tmp_path, SHAPES["head of 128, none shares"], "bfloat16")


def test_a_hopper_gpu_uses_its_own_kernel_for_prompts(tmp_path: Path) -> None:
    both = Both(write_tiny_model(tmp_path, **SHAPES["head of 128, none shares"]), "bfloat16")
    prefill = both.runner._kernels.attend_prefill
    assert prefill is not None
    assert prefill.mapped == (cp.cuda.Device().compute_capability == "90")
    both.runner.close()


def check_steps(directory: Path, shape: dict[str, Any], element_type: Any, *, hopper_kernels: bool = True) -> None:
    """Compare prefill in chunks, decode, and both in one step."""
    model = write_tiny_model(directory, **{**shape, "dtype": element_type})
    both = Both(model, element_type, hopper_kernels=hopper_kernels)
    tokens, blocks = sequences(7, [700, 131, 40, 16, 1])
    both.check(
        [work(tokens[0][:300], blocks[0]), work(tokens[1][:17], blocks[1], draws=False), work(tokens[4], blocks[4])]
    )
    both.check(
        [
            work(tokens[0][:699], blocks[0], start=300),  # a chunk that begins and ends within a block
            work(tokens[1][:130], blocks[1], start=17),
            work(tokens[2][:39], blocks[2]),
            work(tokens[3][:15], blocks[3]),
        ]
    )
    both.check([work(tokens[n], blocks[n], start=len(tokens[n]) - 1) for n in (3, 0, 2, 1)])  # decode alone
    mixed = [work(tokens[0] + [5], blocks[0], start=700), work(tokens[4] + tokens[2], blocks[4] + blocks[2], start=1)]
    both.check(mixed)


LONG = 4200
"""The positions of a context that is cut into many splits."""
WIDE_WINDOW = {"architecture": "MistralForCausalLM", "settings": {"sliding_window": 2100}}


@pytest.mark.parametrize("element_type", ["float16", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, WIDE_WINDOW], ids=["whole", "window"])
def test_a_long_context_in_many_splits_with_a_short_one_in_the_same_step(
    tmp_path: Path, changes: dict[str, Any], element_type: Any
) -> None:
    # One KV head and one layer, as NumPy's attention to so long a context takes seconds.
    shape: dict[str, Any] = {**SHAPES["head of 128, 8 share"], "heads": 8, "kv_heads": 1, "layers": 1, **changes}
    both = Both(write_tiny_model(tmp_path, context_length=6400, dtype=element_type, **shape), element_type)
    tokens, blocks = sequences(3, [LONG, 3])
    both.check([work(tokens[0][:-1], blocks[0]), work(tokens[1][:2], blocks[1])])
    alone = [work(tokens[0], blocks[0], start=LONG - 1)]
    assert both.splits(alone)[0] > 8
    both.check(alone)
    both.check([*alone, work(tokens[1], blocks[1], start=2)])


LONG_AND_SHORT = [1000, 3, 64, 65, 130, 700, 1, 17, 129]
ONE_AMONG_MANY = [*range(1, 20), 1200, *range(13, 32)]
MIXED: dict[str, dict[str, Any]] = {
    **{name: SHAPES[name] for name in ("head of 128, none shares", "head of 128, 8 share", "head of 64, 12 share")},
    "head of 16": SHAPES["head of 16"],
    **WINDOWED,
    "head of 64, a window of 500 in some layers": {
        **SHAPES["head of 64, 7 share, biases"],
        "settings": {"use_sliding_window": True, "sliding_window": 500, "max_window_layers": 1},
    },
}
"""Shapes of the fast kernels and of `attend_any`, with windows and without."""


def in_decode(both: Both, lengths: list[int], seed: int) -> list[Work]:
    """Compute all but the last token of sequences of these lengths, and return works for these last tokens."""
    tokens, blocks = sequences(seed, lengths)
    prompts = [
        work(own[:-1], slots, sequence=number)
        for number, (own, slots) in enumerate(zip(tokens, blocks, strict=True))
        if len(own) > 1
    ]
    both.check(prompts)
    return [
        work(own, slots, start=len(own) - 1, sequence=number)
        for number, (own, slots) in enumerate(zip(tokens, blocks, strict=True))
    ]


@pytest.mark.parametrize("element_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("lengths", [LONG_AND_SHORT, ONE_AMONG_MANY], ids=["long-and-short", "one-among-many"])
@pytest.mark.parametrize("shape", MIXED, ids=named)
def test_rows_of_mixed_lengths_in_one_step_by_graphs_and_eagerly(
    tmp_path: Path, shape: str, lengths: list[int], element_type: Any
) -> None:
    directory = write_tiny_model(tmp_path, **{**MIXED[shape], "dtype": element_type})
    both = Both(directory, element_type, graphs_up_to=len(lengths) + 3)
    works = in_decode(both, lengths, seed=17)
    longest = lengths.index(max(lengths))
    if shape not in WINDOWED:
        counts = both.splits(works)
        assert counts[longest] > 4
        assert counts[lengths.index(3)] == 1
    for some in (works, works[::-1], works[longest:][:1], works[longest:][:5]):
        logits = both.check(some, each_row=True)
        assert (both.logits(some) == logits).all(), "the same step twice gives the same bits"
    both.runner.use_graphs = False
    both.check(works, each_row=True)
    # Next to a prompt.
    prompt = work([5] * 40, free_slots(works, 3), sequence=len(works))
    both.check([works[longest], prompt, works[0]])
    both.runner.close()


def free_slots(works: list[Work], count: int) -> list[int]:
    """Return slots that no work has."""
    taken = {slot for one in works for slot in one.blocks}
    return [slot for slot in range(SLOTS) if slot not in taken][:count]


@pytest.mark.parametrize("element_type", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["head of 128, 8 share", *WINDOWED], ids=named)
def test_rows_of_all_lengths_up_to_200_in_one_step(tmp_path: Path, shape: str, element_type: Any) -> None:
    directory = write_tiny_model(tmp_path, dtype=element_type, **{**SHAPES, **WINDOWED}[shape])
    both = Both(directory, element_type, graphs_up_to=200, max_running=200)
    tokens, blocks = sequences(19, [200])
    both.check([work(tokens[0], blocks[0])])
    # All of one sequence's positions: each row writes what is there already, up to rounding.
    works = [work(tokens[0][:end], blocks[0], start=end - 1, sequence=end) for end in range(1, 201)]
    both.check(works, each_row=True)
    both.runner.use_graphs = False
    both.check(works, each_row=True)
    both.runner.close()


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite", "olmo2"])
def test_graphs_give_what_eager_steps_give_padded_or_not(tmp_path: Path, architecture: str, element_type: Any) -> None:
    shape: dict[str, Any] = {**ARCHITECTURES, "llama": SHAPES["head of 64, 4 share"]}[architecture]
    directory = write_tiny_model(tmp_path, **{**shape, "dtype": element_type})
    eager = Both(directory, element_type)
    graphs = Both(directory, element_type, graphs_up_to=8)
    tokens, blocks = sequences(11, [90, 33, 5, 61, 17, 200, 64])
    prompts = [work(tokens[n][:-1], blocks[n]) for n in range(7)]
    assert (eager.logits(prompts) == graphs.logits(prompts)).all()
    for count in (1, 2, 3, 7):
        decodes = [work(tokens[n], blocks[n], start=len(tokens[n]) - 1) for n in range(count)]
        graphs.reference.step(prompts)
        graphs.check(decodes)
        expected, logits = eager.logits(decodes), graphs.logits(decodes)
        # Not the same bits: attention is cut otherwise, and cuBLAS chooses by the number of rows, padding among them.
        assert np.linalg.norm(logits - expected) < eager.bound * np.linalg.norm(expected)
        if element_type == "float32":
            assert (logits.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_graph_computes_the_last_tokens_of_a_prompt_among_decodes(
    tmp_path: Path, architecture: str, element_type: Any
) -> None:
    shape: dict[str, Any] = {**ARCHITECTURES, "llama": SHAPES["head of 64, 4 share"]}[architecture]
    both = Both(write_tiny_model(tmp_path, **{**shape, "dtype": element_type}), element_type, graphs_up_to=40)
    tokens, blocks = sequences(13, [90, 33, 6, 200])
    both.check([work(tokens[n][:-left], blocks[n]) for n, left in enumerate((1, 7, 5, 16))])
    tails = [work(tokens[n], blocks[n], start=len(tokens[n]) - left) for n, left in enumerate((1, 7, 5, 16))]
    assert both.runner._graphs.rows_for(tails) == 32
    logits = both.check(tails)
    both.runner.use_graphs = False
    eager = both.logits(tails)
    assert np.linalg.norm(logits - eager) < both.bound * np.linalg.norm(eager)
    if element_type == "float32":
        assert (logits.argmax(1) == eager.argmax(1)).all()


def test_no_graph_computes_tails_that_are_long_that_a_lora_has_or_that_read_much_again(tmp_path: Path) -> None:
    both = Both(write_tiny_model(tmp_path, **SHAPES["head of 64, 4 share"]), "float32", graphs_up_to=40)
    rows_for = both.runner._graphs.rows_for
    tokens, blocks = list(range(100)), list(range(7))
    assert rows_for([work(tokens, blocks, start=84)]) == 16
    assert rows_for([work(tokens, blocks, start=83)]) == 0
    assert rows_for([work(tokens, blocks, start=98, draws=False)]) == 0
    assert rows_for([work(tokens, blocks, start=84)] * 3) == 0, "48 rows"
    with_lora = work(tokens, blocks, start=98)
    with_lora.lora = "poet"
    assert rows_for([with_lora]) == 0
    assert rows_for([work([5] * 9000, list(range(600)), start=8990)]) == 16
    far = [work([5] * 9000, list(range(600)), start=8984, sequence=number) for number in range(2)]
    assert rows_for(far) == 0


def test_a_graph_writes_only_to_its_own_memory_after_a_longer_prefill(tmp_path: Path) -> None:
    shape = SHAPES["head of 64, 4 share"]
    both = Both(write_tiny_model(tmp_path, dtype="bfloat16", **shape), "bfloat16", graphs_up_to=2)
    tokens, blocks = sequences(13, [600, 40])
    prompts = [work(tokens[n][:-1], blocks[n]) for n in range(2)]
    both.check(prompts)  # more rows than any graph's
    with both.runner.stream:
        others = [cp.zeros(1 << power, cp.uint8) for power in range(9, 20) for _ in range(20)]
    both.check([work(tokens[n], blocks[n], start=len(tokens[n]) - 1) for n in range(2)])
    with both.runner.stream:
        assert not any(other.get().any() for other in others)


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_the_same_step_twice_gives_the_same_bits(tmp_path: Path, element_type: Any) -> None:
    both = Both(write_tiny_model(tmp_path, dtype=element_type, **SHAPES["head of 64, 4 share"]), element_type)
    tokens, blocks = sequences(5, [150, 70])
    works = [work(tokens[0], blocks[0]), work(tokens[1], blocks[1])]
    assert (both.logits(works) == both.logits(works)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_a_block_that_is_not_finite_fails_those_that_read_it_and_no_other(
    tmp_path: Path, dtype: Any, part: int
) -> None:
    both = Both(write_tiny_model(tmp_path, **SHAPES["head of 64, 4 share"]), dtype, graphs_up_to=4)
    tokens, blocks = sequences(2, [300, 45, 70])
    prompts = [work(history[:-1], own) for history, own in zip(tokens, blocks, strict=True)]
    both.runner.step(prompts)
    works = [
        work(history, own, start=len(history) - 1, sampling=GREEDY) for history, own in zip(tokens, blocks, strict=True)
    ]
    before: dict[bool, list[Drawn | None]] = {}
    for use_graphs in (True, False):
        both.runner.use_graphs = use_graphs
        before[use_graphs] = both.runner.step(works)
    nan = np.uint16(0x7FC0) if dtype == "bfloat16" else np.nan  # CuPy has no bfloat16
    for wrong, own in enumerate(blocks):
        slot = own[0]
        with both.runner.stream:
            both.runner.pages[slot, :, part, 3] = nan  # one position, of all layers
        for use_graphs in (True, False):
            both.runner.use_graphs = use_graphs
            drawn = both.runner.step(works)
            assert [one.suspect for one in drawn if one is not None] == [number == wrong for number in range(3)]
            assert [one for number, one in enumerate(drawn) if number != wrong] == [
                one for number, one in enumerate(before[use_graphs]) if number != wrong
            ]
        chunk = work(tokens[wrong], own, start=16, sampling=GREEDY)  # a prefill behind the wrong block
        (one,) = both.runner.step([chunk])
        assert one is not None
        assert one.suspect
        both.runner.step([work(tokens[wrong], own, sampling=GREEDY)])  # all of it is right again
    both.runner.close()


@pytest.mark.parametrize("max_running", [3, 64])
def test_prompts_have_the_log_probabilities_of_the_numpy_decoders_logits(tmp_path: Path, max_running: int) -> None:
    both = Both(write_tiny_model(tmp_path, **SHAPES["head of 64, 4 share"]), "float32", max_running=max_running)
    tokens, blocks = sequences(9, [200, 45, 17])
    rated, plain = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=4), GREEDY
    for start, end in ((0, 100), (100, 200)):
        works = [
            work(tokens[0], blocks[0], start=start, sampling=rated),
            work(tokens[1], blocks[1], sampling=plain),
            work(tokens[2], blocks[2], sampling=rated),
        ]
        works[0].end = end
        states, row = both.reference.pool(works, ())[2], 0
        drawn = both.runner.step(works)
        assert drawn[1] is not None
        assert drawn[1].prompt_logprobs is None
        for one, each in zip(drawn, works, strict=True):
            rows = [row + position - each.start for position in each.scoring]
            row += each.end - each.start
            if not rows:
                continue
            assert one is not None
            assert one.prompt_logprobs is not None
            following = np.array(each.history[each.scoring.start + 1 : each.scoring.stop + 1])
            logprobs, top, top_logprobs = score(both.reference.logits(states[rows]), following, 4)
            found = one.prompt_logprobs
            assert found.first == each.scoring.start + 1
            assert np.allclose(np.frombuffer(found.logprobs, "<f4"), logprobs, atol=1e-3)
            assert np.frombuffer(found.top_tokens, "<u4").tolist() == top.reshape(-1).tolist()
            assert np.allclose(np.frombuffer(found.top_logprobs, "<f4"), top_logprobs.reshape(-1), atol=1e-3)
    both.runner.close()


def test_greedy_tokens_of_steps_are_the_numpy_decoders(tmp_path: Path) -> None:
    both = Both(write_tiny_model(tmp_path, **SHAPES["head of 64, 4 share"]), "float32", graphs_up_to=4)
    tokens, blocks = sequences(2, [20, 45, 9])
    blocks = [[*own, *range(0)] for own in blocks]
    spare = [slot for slot in range(SLOTS) if slot not in {slot for own in blocks for slot in own}]
    histories = [list(own) for own in tokens]
    starts = [0, 0, 0]
    for own in blocks:
        own.extend(spare.pop() for _ in range(3))
    for _ in range(20):
        works = [
            work(history, own, start=start, sampling=GREEDY)
            for history, own, start in zip(histories, blocks, starts, strict=True)
        ]
        expected = [one.token for one in sample(both.reference.step(works), works)]
        drawn = [one.token for one in both.runner.step(works) if one is not None]
        assert drawn == expected
        starts = [len(history) for history in histories]
        for history, token in zip(histories, expected, strict=True):
            history.append(token)
    both.runner.close()


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs_up_to", [0, 8])
def test_prompts_in_chunks_among_others_have_the_numpy_decoders_log_probabilities(
    tmp_path: Path, element_type: Any, graphs_up_to: int
) -> None:
    directory = write_tiny_model(tmp_path, **{**SHAPES["head of 64, 4 share"], "dtype": element_type})
    both = Both(directory, element_type, graphs_up_to=graphs_up_to, max_running=8)  # turns of 8 rows
    tokens, blocks = sequences(17, [300, 6, 40, 9])
    asked = [msgspec.structs.replace(GREEDY, prompt_logprobs=count) for count in (4, 0, 20)]
    long = Work(1, tokens[0], 0, 0, blocks[0], asked[0], len(tokens[0]))
    chunks: list[list[Work]] = [
        # all of them draw and are short, so that a graph could compute them
        [work(tokens[1], blocks[1], sampling=asked[1], sequence=2), work(tokens[3], blocks[3], sequence=4)]
    ]
    for start, end in ((0, 1), (1, 131), (131, 132), (132, 300)):
        chunk = msgspec.structs.replace(long, start=start, end=end, scored=start + 1)
        others = [work(tokens[2][: start % 7 + 2], blocks[2], sampling=asked[2], sequence=3)]
        chunks.append([work(tokens[3], blocks[3], start=8, sequence=4), chunk, *others])
    for works in chunks:
        states = both.reference.pool(works, ())[2]
        results = both.runner.step(works)
        row = 0
        for one, drawn in zip(works, results, strict=True):
            rows = [row + position - one.start for position in one.scoring]
            row += one.end - one.start
            if not rows:
                assert drawn is None or drawn.prompt_logprobs is None
                continue
            assert drawn is not None
            assert drawn.prompt_logprobs is not None
            assert_scores(drawn.prompt_logprobs, one, both.reference.logits(states[rows]), 5 * both.bound)
    both.runner.close()


def assert_scores(given: PromptLogprobs, one: Work, logits: Floats, bound: float) -> None:
    """Assert that a work has its log-probabilities, given its rows' logits."""
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    expected -= wide.max(axis=1, keepdims=True)
    count = one.sampling.prompt_logprobs
    assert given.is_sound
    assert (given.first, given.count) == (one.scoring.start + 1, len(one.scoring))
    own = expected[np.arange(given.count), one.history[given.first : given.first + given.count]]
    likeliest = -np.sort(-expected, axis=1)[:, :count]
    ids = np.frombuffer(given.top_tokens, "<u4").astype(np.int64).reshape(given.count, count)
    top = np.frombuffer(given.top_logprobs, "<f4").reshape(given.count, count)
    assert [len(set(row)) for row in ids.tolist()] == [count] * given.count
    scale = np.abs(expected).max() * bound
    np.testing.assert_allclose(np.frombuffer(given.logprobs, "<f4"), own, rtol=0, atol=scale)
    np.testing.assert_allclose(top, likeliest, rtol=0, atol=scale)
    np.testing.assert_allclose(top, np.take_along_axis(expected, ids, axis=1), rtol=0, atol=scale)


def test_rows_of_a_prompt_that_are_not_finite_are_an_error_of_their_work_alone(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, **SHAPES["head of 64, 4 share"], tied=False)
    both = Both(directory, "float32", max_running=8)
    tokens, blocks = sequences(18, [40, 20])
    tokens[1] = [token for token in tokens[1] if token != tokens[0][30]]
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    with both.runner.stream:
        both.runner._weights.embedding[tokens[0][30]] = cp.nan
    works = [work(tokens[0], blocks[0], sampling=sampling, draws=False), work(tokens[1], blocks[1], sampling=sampling)]
    wrong, right = both.runner.step(works)
    assert wrong is not None
    assert wrong.suspect
    assert right is not None
    assert right.prompt_logprobs is not None
    assert right.prompt_logprobs.count == len(tokens[1]) - 1
    both.runner.close()

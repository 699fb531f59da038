from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.worker.contracts.runner import Work
from services.worker.native.config import read_config
from services.worker.native.linear import Array
from services.worker.native.lora import LORA_OPERATIONS, LoraStore, joined_rows, spans_by_lora
from services.worker.native.pooling import RowSpan
from services.worker.native.runner import NativeRunner
from shared.errors import ModelError
from tests.tiny_lora import TARGETS, write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES
from tests.worker.native.merged import write_merged
from tests.worker.native.works import work

BLOCK = 16
PROMPT = [5 + number * 7 % 200 for number in range(21)]
OTHER = [9 + number * 11 % 200 for number in range(9)]


def runner_of(directory: Path, lora_bytes: int = 1 << 24) -> NativeRunner:
    return NativeRunner(directory, capacity_blocks=32, block_size=BLOCK, lora_bytes=lora_bytes)


def of_lora(made: Work, lora: str) -> Work:
    made.lora = lora
    return made


def logits(runner: NativeRunner, works: list[Work]) -> Array:
    """Return the logits of a step as the runner computes them."""
    return runner._decoder.pool(works, (), runner._loras.of(spans_by_lora(works)))[0]


def answer(runner: NativeRunner, prompt: list[int], lora: str = "", count: int = 8, slot: int = 0) -> list[int]:
    """Return the greedy answer to a prompt, which is computed in two chunks."""
    history = list(prompt)
    blocks = list(range(slot, slot + 4))
    runner.step([of_lora(work(history[:7], blocks, draws=False), lora)])
    start = 7
    for _ in range(count):
        (drawn,) = runner.step([of_lora(work(history, blocks, start=start, prompt_tokens=len(prompt)), lora)])
        assert drawn is not None
        start = len(history)
        history.append(drawn.token)
    return history[len(prompt) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=False)


UNFUSED = [name for name in CASES if CASES[name].get("architecture") != "Phi3ForCausalLM"]


@pytest.mark.parametrize("case", UNFUSED)
def test_a_lora_computes_as_a_model_with_its_weights_merged(case: str, tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", **{**CASES[case], "shards": 1})
    lora = write_lora(tmp_path / "lora", base)
    merged = runner_of(write_merged(tmp_path / "merged", base, lora))
    runner = runner_of(base)
    assert runner.operate("load_lora", "poet", str(lora), 1) == ""
    expected = logits(merged, [work(PROMPT, [0, 1])])
    got = logits(runner, [of_lora(work(PROMPT, [0, 1]), "poet")])
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    assert answer(runner, PROMPT, "poet") == answer(merged, PROMPT)
    merged.close()
    runner.close()


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        ({"targets": ("q_proj", "v_proj")}, {}),
        ({"targets": ("o_proj", "down_proj"), "layers": [1]}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "float16"}, {"use_rslora": True}),
        (
            {"ranks": {"model.layers.0.self_attn.q_proj": 3, "model.layers.1.self_attn.q_proj": 5}},
            {
                "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "q_proj": 5},
                "alpha_pattern": {"mlp.down_proj": 40, "^model.layers.1.self_attn.o_proj": 1},
            },
        ),
        ({"targets": ("gate_proj", "up_proj")}, {"target_modules": r".*\.(gate|up)_proj"}),
    ],
)
def test_every_kind_of_settings_computes_as_merged(
    model: Path, tmp_path: Path, made: dict[str, object], settings: dict[str, object]
) -> None:
    lora = write_lora(tmp_path / "lora", model, settings=settings, **made)  # type: ignore[arg-type]
    merged = runner_of(write_merged(tmp_path / "merged", model, lora))
    runner = runner_of(model)
    assert runner.operate("load_lora", "poet", str(lora), 1) == ""
    expected = logits(merged, [work(PROMPT, [0, 1])])
    got = logits(runner, [of_lora(work(PROMPT, [0, 1]), "poet")])
    base = logits(runner, [work(PROMPT, [0, 1])])
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    assert np.abs(got - base).max() > 0.05
    merged.close()
    runner.close()


def test_rows_without_a_lora_have_the_same_bits_next_to_rows_with_one(model: Path, tmp_path: Path) -> None:
    runner, plain = runner_of(model), runner_of(model)
    plain._decoder._linear = runner._decoder._linear  # which each calibrates for itself
    for seed, name in enumerate(("poet", "clerk")):
        assert runner.operate("load_lora", name, str(write_lora(tmp_path / name, model, seed=seed)), 1) == ""

    def mixed() -> list[Work]:
        prompts = [PROMPT, OTHER, PROMPT[:1], [8, 9, 10], OTHER[:1], PROMPT]
        return [work(prompt, [2 * number, 2 * number + 1], sequence=number) for number, prompt in enumerate(prompts)]

    expected = logits(plain, mixed())
    works = mixed()
    for number, lora in {0: "poet", 2: "clerk", 3: "poet"}.items():
        works[number].lora = lora
    got = logits(runner, works)
    for row in (1, 4, 5):
        assert np.array_equal(got[row], expected[row])
    for row in (0, 2, 3):
        assert np.abs(got[row] - expected[row]).max() > 0.05
    assert np.array_equal(logits(runner, mixed()), expected)
    alone = logits(runner, [of_lora(work(PROMPT, [20, 21]), "poet")])
    np.testing.assert_allclose(got[0], alone[0], rtol=0, atol=1e-4)
    plain.close()
    runner.close()


def test_a_lora_also_changes_embeddings(model: Path, tmp_path: Path) -> None:
    runner = runner_of(model)
    lora = write_lora(tmp_path / "lora", model)
    merged = runner_of(write_merged(tmp_path / "merged", model, lora))
    assert runner.operate("load_lora", "poet", str(lora), 1) == ""
    span = [RowSpan(0, len(PROMPT))]
    works = [of_lora(work(PROMPT, [0, 1]), "poet")]
    sums = runner._decoder.pool(works, span, runner._loras.of(spans_by_lora(works)))[1]
    expected = merged._decoder.pool([work(PROMPT, [0, 1])], span)[1]
    np.testing.assert_allclose(sums, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    merged.close()
    runner.close()


def test_rows_are_grouped_by_lora_and_those_without_are_left_out() -> None:
    works = [
        of_lora(work([1, 2, 3], [0]), "a"),
        work([1], [1]),
        of_lora(work([1, 2], [2]), "b"),
        of_lora(work([1], [3]), "b"),
        of_lora(work([1], [4]), "a"),
    ]
    rows = {lora: joined_rows(spans) for lora, spans in spans_by_lora(works).items()}
    assert list(rows) == ["a", "b"]
    assert np.array_equal(rows["a"], [0, 1, 2, 7])  # type: ignore[arg-type]
    assert rows["b"] == slice(4, 7)


def test_loras_are_loaded_within_their_bytes_once_and_freed(model: Path, tmp_path: Path) -> None:
    first, second = (write_lora(tmp_path / name, model) for name in ("first", "second"))
    runner = runner_of(model)
    assert set(LORA_OPERATIONS) < set(runner.facts.operations)
    assert runner.operate("load_lora", "first", str(first), 1) == ""
    size_bytes = runner._loras.size_bytes
    assert size_bytes > 0
    assert "first is loaded already" in runner.operate("load_lora", "first", str(first), 1)
    assert runner.operate("unload_lora", "first", "", 1) == ""
    assert runner._loras.size_bytes == 0
    assert "no LoRA first is loaded" in runner.operate("unload_lora", "first", "", 1)
    runner.close()

    narrow = runner_of(model, lora_bytes=size_bytes)
    assert narrow.operate("load_lora", "first", str(first), 1) == ""
    assert "raise lora_bytes" in narrow.operate("load_lora", "second", str(second), 1)
    assert narrow.operate("unload_lora", "first", "", 1) == ""
    assert narrow.operate("load_lora", "second", str(second), 1) == ""
    narrow.close()

    none = runner_of(model, lora_bytes=0)
    assert not set(LORA_OPERATIONS) & set(none.facts.operations)
    none.close()


def test_a_lora_that_does_not_fit_the_device_is_not_kept(model: Path, tmp_path: Path) -> None:
    def full(_layers: object) -> None:
        raise ModelError("the GPU has no room")

    store = LoraStore(read_config(model), most_rank=64, most_bytes=1 << 30, place=full)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no room"):
        store.load("poet", write_lora(tmp_path, model, targets=TARGETS[:1]))
    assert store.size_bytes == 0


def test_a_lora_whose_part_finds_no_memory_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path, model, targets=TARGETS[:1])
    store = LoraStore(read_config(model), most_rank=64, most_bytes=1 << 30, place=lambda _layers: np.empty(1 << 58))  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match=f"^{lora}: no memory is left for this LoRA$"):
        store.load("poet", lora)
    assert store.size_bytes == 0

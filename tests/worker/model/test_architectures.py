"""docs/models.md says what the code does: the architectures, the cases that prove them, the refusals, and the sizes."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path

import pytest

from services.worker.model.architectures import ARCHITECTURES
from services.worker.native.config import read_config
from services.worker.native.runner import CAPACITY_BYTES
from services.worker.native.weights import tensor_shapes
from shared.errors import ModelError
from shared.messages.cards import KvLayout
from tests.tiny_model import MODEL_TYPES
from tests.worker.native.golden.cases import CASES
from tests.worker.native.real_configs import REAL_CONFIGS

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_table_has_every_architecture_its_name_in_gguf_files_and_all_of_its_cases() -> None:
    expected = {
        name: (
            described.gguf,
            {case for case, model in CASES.items() if model.get("architecture", "LlamaForCausalLM") == name},
        )
        for name, described in ARCHITECTURES.items()
    }
    assert all(cases for _, cases in expected.values())
    assert {row[0].strip("`"): (row[3], set(row[4].split("; "))) for row in rows("What is served")} == expected
    assert set(MODEL_TYPES) == set(ARCHITECTURES)


REFUSED = [name for row in rows("What is refused") for name in re.findall(r"`(\w+(?:LM|Generation|Model))`", row[0])]


@pytest.mark.parametrize("architecture", REFUSED)
def test_the_architectures_that_the_table_says_are_refused_are(tmp_path: Path, architecture: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with pytest.raises(ModelError, match=f"architecture {architecture} is not supported; Llama.*docs/models.md.*vLLM"):
        read_config(tmp_path)


def test_the_table_of_refusals_was_read() -> None:
    assert len(REFUSED) >= 10


def test_the_table_of_memory_has_the_sizes_that_follow_from_the_shapes(tmp_path: Path) -> None:
    expected: list[list[str]] = []
    for name, content in REAL_CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = read_config(tmp_path)
        elements = sum(prod(shape) for shape in tensor_shapes(config).values())
        half, full = (
            KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, 1).block_bytes
            for dtype in ("bfloat16", "float32")
        )
        on_cpu = f"{CAPACITY_BYTES // (16 * full) * 16:,}"
        sizes = [f"{elements / 1e9:.2f}", f"{2 * elements / 1e9:.1f} GB", f"{4 * elements / 1e9:.1f} GB"]
        expected.append([name, *sizes, f"{half / 1000:.1f} kB", on_cpu, f"{config.context_length:,}"])
    assert rows("Memory") == expected


def test_settings_that_a_file_lacks_are_those_of_transformers_classes() -> None:
    auto = pytest.importorskip("transformers").AutoConfig
    for architecture, described in ARCHITECTURES.items():
        theirs = auto.for_model(MODEL_TYPES[architecture])
        text = theirs.get_text_config()
        ours = {**described.defaults, "num_key_value_heads": described.defaults["num_key_value_heads"] or 32}
        for name in ours.keys() - {"sliding_window", "sliding_window_pattern"}:  # not kept as they are written
            assert getattr(text, name, None) == ours[name], (architecture, name)
        assert text.eos_token_id == described.eos_token_id
        assert theirs.tie_word_embeddings is ours.get("tie_word_embeddings", False)
        rope = text.rope_parameters
        nested = [rope.get(kind, {}).get("rope_theta") for kind in ("full_attention", "sliding_attention")]
        assert [nested[0] or rope["rope_theta"], nested[1]] == [described.rope_theta, described.local_rope_theta]

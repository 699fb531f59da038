"""The matrices of ranks, next to one another, are those of the whole model, however its tensors are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from services.worker.native.config import ModelConfig, read_config
from services.worker.native.cuda.pieces import Piece, PiecesOfLayers
from services.worker.native.parallel.shares import Share, share_out_evenly
from tests.tiny_model import write_tiny_model

STEM = "model.layers.0."
ATTENTION = f"{STEM}self_attn."


def shape_of(tmp_path: Path) -> ModelConfig:
    config = read_config(write_tiny_model(tmp_path / "model"))
    return replace(config, heads=8, kv_heads=4, head_dim=2, hidden=6, intermediate=24, qkv_bias=True)


def tensors(config: ModelConfig) -> dict[str, NDArray[Any]]:
    """Return tensors whose numbers are all different, by name."""
    rows = {"q_proj": config.queries, "k_proj": config.keys, "v_proj": config.keys}
    found: dict[str, NDArray[Any]] = {
        f"{ATTENTION}{name}.weight": np.zeros((count, config.hidden), int) for name, count in rows.items()
    }
    found |= {f"{ATTENTION}{name}.bias": np.zeros(count, int) for name, count in rows.items()}
    found |= {
        f"{STEM}mlp.{name}_proj.weight": np.zeros((config.intermediate, config.hidden), int) for name in ("gate", "up")
    }
    found[f"{ATTENTION}o_proj.weight"] = np.zeros((config.hidden, config.queries), int)
    found[f"{STEM}mlp.down_proj.weight"] = np.zeros((config.hidden, config.intermediate), int)
    first = 0
    for name, tensor in found.items():
        found[name] = np.arange(first, first + tensor.size).reshape(tensor.shape)
        first += tensor.size
    return found


def stored(config: ModelConfig) -> dict[str, NDArray[np.int64]]:
    """Return the tensors as the model's files have them."""
    plain = tensors(config)
    if not config.fused:
        return plain
    fused = {f"{ATTENTION}qkv_proj.weight": [f"{ATTENTION}{name}_proj.weight" for name in "qkv"]}
    fused[f"{STEM}mlp.gate_up_proj.weight"] = [f"{STEM}mlp.{name}_proj.weight" for name in ("gate", "up")]
    return plain | {name: np.concatenate([plain.pop(part) for part in parts]) for name, parts in fused.items()}


def taken(have: dict[str, NDArray[np.int64]], pieces: list[Piece]) -> NDArray[np.int64]:
    found = []
    for piece in pieces:
        whole = have[piece.name]
        part = whole[piece.rows, piece.columns] if whole.ndim == 2 else whole[piece.rows]
        assert part.shape == piece.shape(whole.shape)
        found.append(part)
    return np.concatenate(found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_has_the_rows_and_columns_of_its_heads_and_width(tmp_path: Path, ranks: int, fused: bool) -> None:
    config = replace(shape_of(tmp_path), fused=fused)
    have, plain = stored(config), tensors(config)
    q, k, v = (plain[f"{ATTENTION}{name}_proj.weight"] for name in "qkv")
    gate, up = (plain[f"{STEM}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    shares: list[Share | None] = [None] if ranks == 1 else list(share_out_evenly(config, ranks))
    for share in shares:
        pieces = PiecesOfLayers(config, share)
        queries = slice(None) if share is None else slice(2 * share.heads.start, 2 * share.heads.stop)
        keys = slice(None) if share is None else slice(2 * share.kv_heads.start, 2 * share.kv_heads.stop)
        width = slice(None) if share is None else share.intermediate
        expected = np.concatenate([q[queries], k[keys], v[keys]])
        np.testing.assert_array_equal(taken(have, pieces.qkv(ATTENTION)), expected)
        np.testing.assert_array_equal(taken(have, pieces.gate_up(STEM)), np.concatenate([gate[width], up[width]]))
        output, down = plain[f"{ATTENTION}o_proj.weight"], plain[f"{STEM}mlp.down_proj.weight"]
        np.testing.assert_array_equal(taken(have, [pieces.output(ATTENTION)]), output[:, queries])
        np.testing.assert_array_equal(taken(have, [pieces.down(STEM)]), down[:, width])
        biases = [plain[f"{ATTENTION}{name}_proj.bias"] for name in "qkv"]
        rows = (queries, keys, keys)
        expected = np.concatenate([bias[part] for bias, part in zip(biases, rows, strict=True)])
        np.testing.assert_array_equal(taken(have, pieces.qkv_bias(ATTENTION)), expected)


def test_a_whole_model_takes_fused_tensors_in_one_piece(tmp_path: Path) -> None:
    pieces = PiecesOfLayers(replace(shape_of(tmp_path), fused=True), None)
    assert pieces.qkv(ATTENTION) == [Piece(f"{ATTENTION}qkv_proj.weight")]
    assert pieces.gate_up(STEM) == [Piece(f"{STEM}mlp.gate_up_proj.weight")]

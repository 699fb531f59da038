"""Which part of a model each rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.worker.native.config import ModelConfig, read_config
from services.worker.native.parallel.shares import MOST_RANKS, share_out, share_out_evenly, widest
from shared.errors import ModelError
from tests.tiny_model import write_tiny_model


def config_of(tmp_path: Path, heads: int, kv_heads: int) -> ModelConfig:
    return replace(read_config(write_tiny_model(tmp_path / "model")), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("ranks", range(1, MOST_RANKS + 1))
def test_each_head_is_computed_once_and_has_its_key_value_head(
    tmp_path: Path, kv_heads: int, group: int, ranks: int
) -> None:
    config = config_of(tmp_path, kv_heads * group, kv_heads)
    try:
        shares = share_out(config, ranks)
    except ModelError:
        assert kv_heads < ranks
        assert ranks % kv_heads or config.heads % ranks
        return
    heads = [head for share in shares for head in range(share.heads.start, share.heads.stop)]
    assert heads == list(range(config.heads))
    stored = [head for share in shares if share.stores for head in range(share.kv_heads.start, share.kv_heads.stop)]
    assert stored == list(range(kv_heads))
    for share in shares:
        own = share.of(config)
        assert own.heads % own.kv_heads == 0
        for number in range(own.heads):
            head = share.heads.start + number
            assert head // group == share.kv_heads.start + number // (own.heads // own.kv_heads)
    for field in ("intermediate", "vocab"):
        parts = [getattr(share, field) for share in shares]
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(getattr(config, field)))


def test_heads_that_cannot_be_shared_out_are_refused_with_what_is_possible(tmp_path: Path) -> None:
    config = config_of(tmp_path, 9, 3)
    with pytest.raises(ModelError, match=r"^tensor_parallel is 4, but 9 attention heads and 3 key-value heads cannot"):
        share_out(config, 4)
    with pytest.raises(ModelError, match=r"possible are 1, 2, 3$"):
        share_out(config, 8)


def test_ranks_on_gpus_have_as_many_heads_each_or_are_refused_with_what_is_possible(tmp_path: Path) -> None:
    config = config_of(tmp_path, 12, 6)
    for ranks in range(1, MOST_RANKS + 1):
        if ranks not in (1, 2, 3, 6):
            with pytest.raises(ModelError, match=r"possible are 1, 2, 3, 6$"):
                share_out_evenly(config, ranks)
            continue
        shapes = {(share.of(config).heads, share.of(config).kv_heads) for share in share_out_evenly(config, ranks)}
        assert shapes == {(12 // ranks, 6 // ranks)}
    one = share_out_evenly(config_of(tmp_path, 8, 1), 4)
    assert [(share.heads.start, share.kv_heads, share.stores) for share in one] == [
        (start, slice(0, 1), start == 0) for start in (0, 2, 4, 6)
    ]


def test_a_model_that_norms_all_queries_at_once_is_refused_on_gpus(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, 4, 2), query_norm="whole")
    assert len(share_out_evenly(config, 1)) == 1
    with pytest.raises(ModelError, match=r"^tensor_parallel is 2, but the model norms .*: set tensor_parallel = 1$"):
        share_out_evenly(config, 2)


def test_a_rank_with_fewer_heads_has_more_of_the_width(tmp_path: Path) -> None:
    smollm2 = replace(config_of(tmp_path, 9, 3), head_dim=64, hidden=576, intermediate=1536)
    first, second = share_out(smollm2, 2)
    assert (first.heads, second.heads) == (slice(0, 3), slice(3, 9))
    assert (first.intermediate, second.intermediate) == (slice(0, 853), slice(853, 1536))
    assert not first.copied
    weights = [
        2 * 64 * (own.heads + own.kv_heads) + 3 * own.intermediate for own in (first.of(smollm2), second.of(smollm2))
    ]
    assert abs(weights[0] - weights[1]) <= 6


def test_heads_that_leave_nothing_of_the_width_have_equal_parts_of_it(tmp_path: Path) -> None:
    narrow = replace(config_of(tmp_path, 9, 3), head_dim=64, hidden=576, intermediate=64)
    assert [share.intermediate for share in share_out(narrow, 2)] == [slice(0, 32), slice(32, 64)]


def test_ranks_plan_for_the_largest_of_each_part(tmp_path: Path) -> None:
    config = replace(config_of(tmp_path, 8, 4), intermediate=31, vocab=321)
    shares = share_out(config, 4, even=True)
    assert {part.vocab.stop - part.vocab.start for part in shares} == {80, 81}
    assert {part.of(config).intermediate for part in shares} == {7, 8}
    planned = widest(shares)
    assert (planned.of(config).heads, planned.of(config).kv_heads, planned.of(config).intermediate) == (2, 1, 8)
    assert planned.vocab == slice(0, 81)

from __future__ import annotations

import pytest

from services.worker.transfer.block_shape import MOST_PITCH_BYTES, BlockShape
from tests.worker.transfer.layer_major import layer_major


def test_a_super_block_is_one_fragment() -> None:
    shape = BlockShape.contiguous(4096, 100, 7)
    shape.validate()
    assert (shape.fragments, shape.block_bytes, shape.pitch_bytes) == (1, 100, 100)


def test_layer_major_fragments_are_evenly_spaced() -> None:
    shape = layer_major(4096, 4, 100, 7)
    shape.validate()
    assert shape.regions == (4096, 4796, 5496, 6196)
    assert (shape.block_bytes, shape.pitch_bytes) == (400, 700)


@pytest.mark.parametrize("regions", [(0, 700, 1500), (1400, 700, 0), (0, 1 << 40), (0, MOST_PITCH_BYTES + 1)])
def test_uneven_backward_or_far_fragments_have_no_pitch(regions: tuple[int, ...]) -> None:
    shape = BlockShape(regions, 100, 100, 7)
    shape.validate()
    assert shape.pitch_bytes is None


@pytest.mark.parametrize(
    ("fragment_bytes", "at", "alignment", "width"),
    [(832, 4096, 4096, 16), (832, 4100, 4096, 4), (836, 4096, 4096, 4), (833, 4096, 4096, 1), (832, 4096, 4, 4)],
)
def test_words_are_as_wide_as_all_alignments_allow(fragment_bytes: int, at: int, alignment: int, width: int) -> None:
    assert layer_major(at, 3, fragment_bytes, 5).word_bytes(alignment) == width


def test_overlapping_fragments_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        BlockShape((0, 600), 100, 100, 7).validate()
    BlockShape((0, 100), 100, 200, 7).validate()  # interleaved

"""What NVRTC gets: CuPy keeps compiled kernels by this text, so it has all that they depend on, and nothing else."""

from __future__ import annotations

import pytest

from services.worker.native.cuda.sources import SOURCES, source_text

CONSTANTS = {"ELEMENT_BITS": 16, "HEAD_DIM": 128, "GROUP": 4}
INCLUDED = (SOURCES / "warp.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
"""The header that all others include."""


@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.cu")))
def test_a_text_has_its_headers_in_place_of_their_names_and_each_once(name: str) -> None:
    own, text = (SOURCES / f"{name}.cu").read_text(encoding="utf-8"), source_text(name, {})
    assert '#include "' not in text
    assert text.count(INCLUDED) == own.count('.cuh"\n')
    assert text.endswith(own.rpartition('.cuh"\n')[2])


def test_a_constant_is_there_if_a_source_or_its_headers_name_it() -> None:
    assert source_text("attention_decode", CONSTANTS).startswith(
        "#define ELEMENT_BITS 16\n#define HEAD_DIM 128\n#define GROUP 4\n//"
    )
    assert source_text("rows", CONSTANTS).startswith("#define ELEMENT_BITS 16\n#define HEAD_DIM 128\n//")


@pytest.mark.parametrize("name", ["choose", "score"])
def test_what_draws_and_rates_tokens_is_the_same_for_all_models(name: str) -> None:
    assert source_text(name, CONSTANTS) == source_text(name, {})

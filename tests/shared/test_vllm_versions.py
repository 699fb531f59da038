"""The promised versions of vLLM, and how others are refused."""

from __future__ import annotations

import pytest

from shared.vllm_versions import DEFAULT, is_promised, refusal


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.0+cpu", "0.32.7rc1", "0.33.0", "0.33.1.dev3+g0a1b", "0.33", DEFAULT]
)
def test_all_patch_versions_of_a_promised_minor_are_promised(version: str) -> None:
    assert is_promised(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3", "0.320.0", "0.33rc1", "1.0", "1.0.33", "dev", ""])
def test_others_are_not(version: str) -> None:
    assert not is_promised(version)


def test_a_refusal_is_one_line_with_the_first_missing_name_and_what_works() -> None:
    works = "this worker works with 0.32 and 0.33"
    assert refusal("0.34.0", "this worker") == f"vLLM 0.34.0 is not supported; {works}"
    assert refusal("0.31.0", "this worker", ["a.B has no c"]) == (
        f"vLLM 0.31.0 is not supported: a.B has no c; {works}"
    )
    assert "a.B has no c (and 2 more); " in refusal("0.31.0", "this worker", ["a.B has no c", "d", "e"])

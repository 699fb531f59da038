"""Tests of this directory need a GPU for vLLM; those of the kit itself do not."""

from __future__ import annotations

import pytest

from tests.worker.vllm.environment import ON_GPU

REASON = "vLLM's environment, .headrace/vllm, is not there, or is one for CPUs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what has the mark `gpu` and `vllm` if vLLM computes on no GPU."""
    for item in items:
        if not ON_GPU and item.get_closest_marker("gpu") and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=REASON))

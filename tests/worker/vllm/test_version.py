"""The versions of vLLM that the engine's program works with."""

from __future__ import annotations

import pytest

from services.worker.vllm.version import check
from shared.errors import ConfigError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7rc1"])
def test_versions_in_the_range(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev", ""])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=r"works with 0\.32 up to, not including, 0\.33"):
        check(version)

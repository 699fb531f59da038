"""The router's settings: invalid ones are refused before it starts."""

from __future__ import annotations

import pytest

from services.router.config import RouterConfig
from shared.config import load
from shared.errors import ConfigError


@pytest.mark.parametrize(
    "flag",
    [
        "--load-limit=0",
        "--index-limit-bytes=-1",
        "--index-orphan-limit-blocks=-1",
        "--index-lower-tier-limit-blocks=-1",
        "--index-history-s=-1",
        "--load-ramp-s=-1",
        "--load-frozen-s=0",
        "--source-held-limit-batches=0",
        "--source-digest-s=-1",
        "--policy-budget-ms=-1",
        "--policy-strikes=-1",
        "--most-hashes=0",
        "--explained=-1",
    ],
)
def test_invalid_limits_and_times_are_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0].rpartition("-")[2]):
        load(RouterConfig, flags=[flag], environ={})


def test_settings_that_can_be_disabled_accept_zero() -> None:
    off = ["--index-speculation-s=0", "--load-ramp-s=0", "--source-digest-s=0", "--source-silence-s=0", "--explained=0"]
    assert load(RouterConfig, flags=off, environ={}).index.speculation_s == 0

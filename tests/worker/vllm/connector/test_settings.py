"""services/worker/vllm/connector/settings.py: what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.vllm.connector.settings import read_settings
from shared.errors import ConfigError


def test_a_pool_is_all_that_is_needed() -> None:
    settings = read_settings({"pool": "/p"})
    assert (settings.offload, settings.wait_s, settings.keep_on_reset) == ("filled", 1.0, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "pool is missing"),
        ({"pool": ""}, "pool is missing"),
        ({"pool": "/p", "checksum": True}, "checksum: no such setting; did you mean checksums"),
        ({"pool": "/p", "shared_storage_path": "/x"}, "shared_storage_path: no such setting"),
        ({"pool": "/p", "wait_s": 0}, "wait_s"),
        ({"pool": "/p", "wait_s": "soon"}, "wait_s"),
        ({"pool": "/p", "offload": "evicted"}, "offload"),
        ({"pool": "/p", "blocks_in_flight": 0}, "blocks_in_flight"),
        ({"pool": "/p", "copy_path": "fast"}, "copy_path"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_settings(given)

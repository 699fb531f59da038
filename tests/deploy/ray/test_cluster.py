"""deploy/local/ray/cluster.py, as far as it goes without Ray; tests/ray has the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploy.local.ray.cluster import Cluster, connect
from deploy.local.ray.order import Order
from shared.errors import ConfigError


def test_without_ray_one_line_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError) as refused:
        connect("10.0.0.1:6379")
    assert str(refused.value) == (
        "--on ray: Ray is not installed here: .venv/bin/pip install --require-hashes -r requirements-ray.lock"
    )


async def test_an_actor_that_was_removed_before_it_drains_is_left_alone() -> None:
    """So it is with two signals at once: all programs are to drain, and are killed before a task has begun with it."""
    cluster = Cluster(SimpleNamespace(util=SimpleNamespace(scheduling_strategies=None)))
    cluster.kill("worker-0")
    await cluster.drain(Order("worker-0", (), {}, 1, 40.0, cpus=1, service="worker"))

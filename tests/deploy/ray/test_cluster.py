"""deploy/local/ray/cluster.py, as far as it goes without Ray; tests/ray has the rest."""

from __future__ import annotations

import pytest

from deploy.local.ray.cluster import connect
from shared.errors import ConfigError


def test_without_ray_one_line_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError) as refused:
        connect("10.0.0.1:6379")
    assert str(refused.value) == (
        "--on ray: Ray is not installed here: .venv/bin/pip install --require-hashes -r requirements-ray.lock"
    )

"""The image, the engine and the stack, once for all tests of containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers import vllm
from tests.containers.engine import ROOT, Engine
from tests.containers.install import installed
from tests.containers.stack import IMAGE
from tests.worker.vllm.environment import INSTALLED


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """podman with a network of its own, and our images, which were built before with this machine's."""
    if not installed():
        pytest.skip("needs ./check containers, which installs podman (as root, on Debian)")
    with Engine(network=False) as builder:
        builder.build(IMAGE, ROOT / "deploy" / "compose" / "Dockerfile", ROOT)
        if INSTALLED:
            vllm.build(builder)
    with Engine() as one:
        yield one

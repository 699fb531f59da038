"""The image of deploy/compose/Dockerfile.vllm, on a look-alike of vLLM's image.

The packages of vLLM are those of `./headrace install-vllm`, for CPUs. They are mounted where the image has its own, at
the build and at the run: so no test copies 2.4 GB.
"""

from __future__ import annotations

from tests.containers.engine import HERE, ROOT, Engine
from tests.containers.stack import Stack
from tests.worker.vllm.environment import PYTHON

IMAGE = "docker.io/library/headrace-vllm:local"
FILES = ("compose.vllm.yaml", str(HERE / "vllm.yaml"))


def volume() -> str:
    """Return the mount of vLLM's packages, for Debian's Python of the version that they were installed for."""
    (packages,) = PYTHON.parents[1].resolve().glob("lib/python*/site-packages")
    return f"{packages}:/usr/local/lib/{packages.parent.name}/dist-packages:ro"


def build(builder: Engine) -> None:
    """Build it, after the image of the other services, of which it has the default model."""
    more = ("--volume", volume(), "--build-arg", "CUPY=")
    builder.build(IMAGE, ROOT / "deploy" / "compose" / "Dockerfile.vllm", ROOT, *more)


def stack(engine: Engine) -> Stack:
    """Return a stack with a vLLM worker."""
    return Stack(engine, *FILES, variables={"VLLM_VOLUME": volume()})

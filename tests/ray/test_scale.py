"""Another number of workers for an `up --on ray` that runs, in a real cluster of two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from deploy.local.autoscale.launchers import scale_up
from deploy.local.state import StateDirectory
from tests.integration.stack import Up, eventually, running
from tests.ray.rig import HEAD, Cluster, cluster, node, python, variables
from tests.tiny_model import write_tiny_model

LIMIT_S = 300.0
OTHER = "127.0.0.3"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(node(HEAD, cpus=1), node(OTHER, cpus=1)) as one:
        yield one


def workers(up: Up) -> set[str]:
    return {name for name in up.record["programs"] if name.startswith("worker")}


def scale(up: Up, number: int) -> str:
    return asyncio.run(scale_up(StateDirectory(up.state).scale, {"aggregated": number}, []))


def test_workers_come_where_there_is_room_and_go_again(ray: Cluster, tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    flags = ("--on", "ray", "--ray-address", ray.address, "--model", model, "--engine", "echo", "--workers", "1")
    with running(tmp_path / "up", *flags, variables=variables(), python=str(python())) as up:
        eventually(lambda: workers(up) == {"worker-0"}, limit_s=LIMIT_S, what="the first worker")
        assert "prefill: the workers of this `up` are aggregated" in asyncio.run(
            scale_up(StateDirectory(up.state).scale, {"prefill": 1}, [])
        )
        assert scale(up, 2) == ""
        eventually(lambda: workers(up) == {"worker-0", "worker-1"}, limit_s=LIMIT_S, what="a second worker")
        hosts = {each["host"] for name, each in up.record["programs"].items() if name in workers(up)}
        assert hosts == {HEAD, OTHER}
        assert scale(up, 3) == "", "Ray may find room for it later"
        looks = "worker-2 does not answer: Ray looks for a node with 1 CPU free, or starts it\n"
        eventually(lambda: looks in up.output, limit_s=LIMIT_S, what="what the third one waits for")
        assert scale(up, 1) == ""
        eventually(lambda: workers(up) == {"worker-0"}, limit_s=LIMIT_S, what="one worker alone")
        assert "  worker-1: draining\n" in up.output
        assert scale(up, 2) == ""
        eventually(lambda: workers(up) == {"worker-0", "worker-1"}, limit_s=LIMIT_S, what="its name again")
        with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
            answer = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
        assert answer.choices[0].text
        assert up.stop() == 0, "".join(up.output)

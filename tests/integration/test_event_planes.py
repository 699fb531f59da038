"""Workers whose KV events go over ZMQ, NATS and JetStream, and one router that follows all of them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any, get_args

from tests.event_planes import Plane
from tests.integration.fleet import READY_LIMIT_S, Service, explained, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

NAMESPACE = "planes"
PROMPT = "one two three four five six " * 20


def ask(frontend: Service) -> str:
    """Ask the prompt once more, and return the id of the answer."""
    asked = urllib.request.Request(
        f"{frontend.url}/v1/completions",
        json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 1}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=READY_LIMIT_S) as answer:
        return str(json.loads(answer.read())["id"])


def overlaps(frontend: Service, nats_url: str) -> list[int]:
    """The cached blocks of the prompt that the router knows of each worker."""
    decision: dict[str, Any] = explained(nats_url, NAMESPACE, ask(frontend))
    return [candidate["overlap"][0] for candidate in decision["candidates"]]


def test_a_router_follows_workers_on_all_planes_starts_late_and_forgets_one_that_was_killed(
    tmp_path: Path, jetstream_url: str
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    policy = ("--policy", "round-robin", "--index-speculation-s", "0")
    with fleet(tmp_path, jetstream_url, *where, "--discovery-lease-ttl-s", "3") as services:
        router = services.start("router", "router", *policy)
        for plane in get_args(Plane):
            flags = ("--model", model, "--engine", "echo", "--observe-events-plane", plane)
            services.start("worker", plane, *flags)
        frontend = services.start("frontend", "frontend")
        services.wait_ready()

        def known(workers: int) -> bool:
            found = overlaps(frontend, jetstream_url)
            return len(found) == workers and min(found) > 0

        eventually(lambda: known(3), limit_s=READY_LIMIT_S, what="the router knows the blocks of all workers")
        router.kill()
        services.start("router", "late", *policy)
        services.wait_ready("late")
        eventually(lambda: known(3), limit_s=READY_LIMIT_S, what="a late router knows them too")
        services.services["jetstream"].kill()
        eventually(lambda: known(2), limit_s=READY_LIMIT_S, what="the router has forgotten the worker that was killed")


def test_a_worker_without_jetstream_ends_with_the_setting_to_change(tmp_path: Path, nats_url: str) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as services:
        flags = ("--model", model, "--engine", "echo", "--observe-events-plane", "jetstream")
        worker = services.start("worker", "worker", *flags)
        assert worker.process.wait(READY_LIMIT_S) == 2
        last = worker.log.read_text().splitlines()[-1]
        assert last.startswith("headrace-worker: observe.events_plane: jetstream needs JetStream"), last

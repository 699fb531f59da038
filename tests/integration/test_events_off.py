"""A router without KV events over real servers and processes: it opens no connection to the workers' event ports, and
still sends a prompt to the worker that computed its beginning."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.fleet import Fleet, explained, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
NAMESPACE = "noevents"
WORDS = 300
_ESTABLISHED = "01"


@pytest.fixture
def services(tmp_path: Path, nats_url: str) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny", context_length=8192)
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        one.start("router", "router", "--events", "off", "--index-history-s", "3600")
        for name in ("worker 1", "worker 2"):
            one.start("worker", name, "--model", str(model), "--engine", "echo")
        one.start("frontend", "frontend")
        one.wait_ready()
        yield one


def event_ports(folder: Path) -> set[int]:
    """The ports of all event streams in the address book."""
    entries = "".join(file.read_text() for file in (folder / "where").rglob("*") if file.is_file())
    return {int(port) for port in re.findall(r"tcp://127\.0\.0\.1:(\d+)", entries)}


def connected(ports: set[int]) -> set[int]:
    """Those of these ports to which a connection is open."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == _ESTABLISHED:
            found.add(int(local.rpartition(":")[2], 16))
    return found & ports


def test_a_prompt_goes_where_its_beginning_was_computed_and_no_event_port_is_connected_to(
    services: Fleet, tmp_path: Path, nats_url: str
) -> None:
    router = services.services["router"]
    ports = event_ports(tmp_path)
    assert len(ports) >= 4, "each worker has a port for events and one for replays"
    workers: dict[str, str] = {}
    """The beginning of a prompt → the worker that computed it."""
    url = services.services["frontend"].url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client:

        def computed(beginning: str, question: str) -> dict[str, Any]:
            prompt = beginning + question
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            # The router hears of the first token after the client has it.
            return eventually(
                lambda: (
                    found
                    if (found := explained(nats_url, NAMESPACE, answer.id))["actual_cached_tokens"] is not None
                    else None
                ),
                limit_s=LIMIT_S,
                what="the router has heard of the first token",
            )

        def both_have_computed() -> bool:
            beginning = f"Story {len(workers)}: " + f"the mill {len(workers)} at the river turns, " * WORDS
            workers[beginning] = computed(beginning, "why?")["instance"]
            return len(set(workers.values())) == 2

        eventually(both_have_computed, limit_s=LIMIT_S, what="both workers have computed a prompt")
        for beginning, worker in workers.items():
            decision = computed(beginning, "how, and since when?")
            assert decision["instance"] == worker
            assert decision["predicted_cached_tokens"] == decision["actual_cached_tokens"] > WORDS

    assert connected(ports) == set()
    assert router.metric("headrace_kv_events_followed") == 0
    assert router.metric("headrace_kv_sources") == 0
    with urllib.request.urlopen(f"{router.url}/health", timeout=LIMIT_S) as answer:
        health = json.loads(answer.read())
    assert health["ready"] is True
    assert health["notes"] == ["events are off: what workers cache is predicted from this router's own choices"]

    # What is not there with events off is there with events on, so it would have been seen.
    services.start("router", "router 2")
    services.wait_ready("router 2")
    eventually(lambda: connected(ports), limit_s=LIMIT_S, what="a router that follows events is connected to them")
    assert services.services["router 2"].metric("headrace_kv_events_followed") == 1

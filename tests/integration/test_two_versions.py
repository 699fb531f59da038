"""The last release's services next to this version's: requests, KV events and blocks pass from one to the other, and an
upgrade under load loses nothing.

Whole processes of both trees, with the packages of this one. They skip in a clone without the commit of the last
release; tests/shared/test_last_release.py has its messages.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shared.messages.cards import ServiceName
from tests import last_release
from tests.integration.fleet import ANSWER_LIMIT_S, Fleet, explained, fleet
from tests.integration.rolling import NUMBERS, ORDER, restart_each_in_turn, start
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

SERVICES: tuple[ServiceName, ...] = ("kvbm", "router", "worker", "frontend")
PROMPT = "The mill at the river turns, and the wheel at the weir stands still. " * 4
BLOCK_TOKENS = 16
BLOCKS = 12
"""A lower bound of the prompt's full blocks."""
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = last_release.tree(tmp_path_factory.mktemp("last_release"))
    if tree is None:
        pytest.skip(f"this clone has no commit {last_release.COMMIT}")
    return tree


def ask(services: Fleet) -> tuple[str, dict[str, int], str]:
    """Return the text of an answer, its cached tokens by tier, and the name of the request."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    question = urllib.request.Request(
        f"{services.services['frontend'].url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(question, timeout=ANSWER_LIMIT_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return answer["choices"][0]["text"], tiers, answer["id"]


class TwoVersions:
    """One process of each service, some of the last release."""

    def __init__(self, services: Fleet, folder: Path, old: Path, of_old: frozenset[ServiceName]) -> None:
        pool = str(folder / "pool")
        patient = ("--kvbm-wait-s", "60", "--kvbm-timeout-s", "4")
        worker = ("--model", str(write_tiny_model(folder / "tiny")), "--threads", "1", "--kvbm-pool", pool, *patient)
        self._services = services
        self._old, self._of_old = old, of_old
        self._flags: dict[ServiceName, tuple[str, ...]] = {
            "kvbm": ("--pool-directory", pool, "--pool-size-bytes", str(16 << 20)),
            "worker": worker,
        }

    def start(self, service: ServiceName) -> None:
        tree = self._old if service in self._of_old else None
        self._services.start(service, service, *self._flags.get(service, ()), tree=tree)

    def exchanged(self, *, before: float = 0.0) -> None:
        """Wait until the worker has saved the prompt's blocks."""
        saved = self._services.services["worker"].metric
        eventually(
            lambda: saved("headrace_kvbm_copied_blocks_total", outcome="saved") >= before + BLOCKS,
            limit_s=LIMIT_S,
            what="the prompt's blocks are saved",
        )


@pytest.mark.parametrize(
    "of_old",
    [
        pytest.param(frozenset({"worker", "router"}), id="worker and router"),
        pytest.param(frozenset({"frontend", "kvbm"}), id="frontend and kvbm"),
        pytest.param(frozenset({"worker", "kvbm"}), id="worker and kvbm"),
        pytest.param(frozenset({"frontend", "router"}), id="frontend and router"),
    ],
)
def test_services_of_the_last_release_work_with_those_of_this_version(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, old: Path, of_old: frozenset[ServiceName]
) -> None:
    namespace = "versions-" + "-".join(sorted(of_old))
    with fleet(tmp_path, nats_url, "--namespace", namespace, "--discovery-endpoints", etcd_endpoint) as services:
        both = TwoVersions(services, tmp_path, old, of_old)
        for service in SERVICES:
            both.start(service)
        services.wait_ready()
        worker = services.services["worker"]
        eventually(lambda: worker.metric("headrace_kvbm_attached"), limit_s=LIMIT_S, what="the worker has a kvbm")

        text, tiers, _ = ask(services)
        assert sum(tiers.values()) == 0

        def predicted() -> bool:
            """Ask again; the router's choice counts on what the worker's events said is cached."""
            again, tiers, request = ask(services)
            assert again == text
            assert tiers["device"] >= BLOCKS * BLOCK_TOKENS
            return bool(explained(nats_url, namespace, request)["predicted_cached_tokens"] >= BLOCKS * BLOCK_TOKENS)

        eventually(predicted, limit_s=LIMIT_S, what="the router knows the worker's blocks")
        both.exchanged()
        worker.kill()
        both.start("worker")
        services.wait_ready("worker")
        worker = services.services["worker"]
        eventually(lambda: worker.metric("headrace_kvbm_attached"), limit_s=LIMIT_S, what="the worker has a kvbm")
        again, tiers, _ = ask(services)
        assert again == text
        assert tiers["host"] >= BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize(
    "back", [False, pytest.param(True, marks=pytest.mark.tier("long"))], ids=["to this version", "back to the last one"]
)
async def test_an_upgrade_of_every_service_in_turn_under_load_loses_nothing(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, old: Path, back: bool
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    before, after, namespace = (None, old, "downgrade") if back else (old, None, "upgrade")
    with fleet(tmp_path, nats_url, "--namespace", namespace, "--discovery-endpoints", etcd_endpoint) as services:
        for service in ORDER:
            for number in NUMBERS:
                start(services, service, number, model, before)
        await asyncio.to_thread(services.wait_ready)
        await restart_each_in_turn(services, nats_url, namespace, model, after)

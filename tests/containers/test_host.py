"""compose.host.yaml: no bridge, nothing that listens beyond loopback, frontends that share the API's port. The machine
has no IPv6."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine
from tests.containers.stack import LIMIT_S, MODEL, Stack, all_targets, load
from tests.integration.stack import eventually

ASKED = 64
"""Requests, each over a connection of its own: the kernel gives all to one of two frontends once in 2^63 times."""


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    engine.run("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
    one = Stack(engine, "compose.host.yaml")
    one.copy()
    one.up()
    yield one
    one.down("--volumes")
    engine.run("sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6")


def test_it_answers_over_the_hosts_network_and_makes_none_of_its_own(stack: Stack) -> None:
    answers = [stack.chat("What is the capital of France?", stream=stream) for stream in (False, True)]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert "Paris" in answers[0].text
    assert [each["name"] for each in stack.engine.ask("/v4.0.0/libpod/networks/json")] == ["podman"], "podman's own"


def test_nothing_listens_beyond_loopback(stack: Stack) -> None:
    listening = [line.split()[3] for line in stack.engine.run("ss", "-H", "-l", "-t", "-n").splitlines()]
    assert {"127.0.0.1:8000", "127.0.0.1:4222", "127.0.0.1:2379", "127.0.0.1:9090"} <= set(listening)
    assert [each for each in listening if not each.startswith(("127.0.0.1:", "[::1]:"))] == []


def test_prometheus_finds_every_instance_by_the_block_store(stack: Stack) -> None:
    wanted = [("headrace", 7), ("etcd", 1), ("nats", 1)]
    eventually(lambda: all_targets(stack, wanted), limit_s=LIMIT_S, what="seven processes scraped")


def test_connections_to_the_apis_port_go_to_both_frontends(stack: Stack) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a river"})
    for _ in range(ASKED):
        answer = stack.request("POST", "http://127.0.0.1:8000/tokenize", body, {"Content-Type": "application/json"})
        assert answer.status == 200, answer
    served = 'sum by (instance) (headrace_requests_total{operation="tokenize"}) > 0'
    eventually(lambda: len(stack.metric(served)) == 2, limit_s=LIMIT_S, what="both frontends have answered")


def test_restarting_every_container_in_turn_under_load_loses_no_request(stack: Stack) -> None:
    with load(stack) as seen:
        seen.wait_for_more()
        stack.run("./roll.sh")
        seen.wait_for_more()
    assert seen.lost == []
    assert {len(texts) for texts in seen.texts.values()} == {1}, "greedy answers are alike, whoever gave them"

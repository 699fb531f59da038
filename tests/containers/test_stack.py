"""deploy/compose as it is, on a bridge network: it answers, grows, is restarted in turn, and heals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from tests.containers.engine import HOME, Engine
from tests.containers.stack import LIMIT_S, Stack, all_targets, load
from tests.integration.stack import eventually

OURS = {"frontend": 2, "router": 2, "kvbm": 1, "worker": 2}
SERVERS = ("nats", "etcd", "balancer", "prometheus", "nats-metrics")
RIGHTS = """
import re
status = open("/proc/1/status").read()
print(re.findall(r"^(?:Uid|CapEff|NoNewPrivs):\\s*(\\w+)", status, re.M))
open("/app/x", "w")
"""


PROXY = "http://192.0.2.1:9"
"""An address that nothing has."""
PROXIES = {"proxies": {"default": {"httpProxy": PROXY, "httpsProxy": PROXY}}}
"""What Docker's client gives all containers. No service may ask these proxies."""
SETTINGS = HOME / "docker" / "config" / "config.json"


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    one = Stack(engine)
    one.copy()
    SETTINGS.write_text(json.dumps(PROXIES), encoding="utf-8")
    try:
        one.up()
        yield one
    finally:
        SETTINGS.write_text("{}", encoding="utf-8")
    one.down("--volumes")
    assert engine.ask("/v4.0.0/libpod/containers/json?all=true") == []
    assert engine.ask("/v4.0.0/libpod/volumes/json") == []
    assert [each["name"] for each in engine.ask("/v4.0.0/libpod/networks/json")] == ["podman"], "podman's default"


def test_it_answers_a_chat_with_and_without_a_stream(stack: Stack) -> None:
    answers = [stack.chat("What is the capital of France?", stream=stream) for stream in (False, True)]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert "Paris" in answers[0].text
    assert answers[0].text == answers[1].text


@pytest.mark.parametrize("service", [*OURS, *SERVERS])
def test_it_works_with_proxies_of_dockers_client_that_do_not_answer(stack: Stack, service: str) -> None:
    assert f"http_proxy={PROXY}" in stack.inspect(stack.containers(service)[0])["Config"]["Env"]


@pytest.mark.parametrize("service", OURS)
def test_our_processes_have_no_rights_and_cannot_write_their_image(stack: Stack, service: str) -> None:
    with pytest.raises(AssertionError) as failed:
        stack.compose("exec", "-T", service, "python", "-I", "-S", "-c", RIGHTS)
    said = str(failed.value)
    assert "['10001', '0000000000000000', '1']" in said
    assert "Read-only file system: '/app/x'" in said


def test_a_third_worker_serves_and_prometheus_sees_every_instance(stack: Stack) -> None:
    jobs = [("balancer", 1), ("etcd", 1), ("nats", 1)]
    eventually(lambda: all_targets(stack, [("headrace", 7), *jobs]), limit_s=LIMIT_S, what="seven processes scraped")
    stack.up("--no-recreate", "--scale", "worker=3")
    eventually(lambda: all_targets(stack, [("headrace", 8), *jobs]), limit_s=LIMIT_S, what="the third worker scraped")
    tokens = 'sum by (instance) (headrace_output_tokens_total{service="worker"}) > 0'
    with load(stack, 8):
        eventually(lambda: len(stack.metric(tokens)) == 3, limit_s=LIMIT_S, what="all three workers have answered")
    stack.up("--no-recreate", "--scale", "worker=2")


def test_restarting_every_container_in_turn_under_load_loses_no_request(stack: Stack) -> None:
    services = ("worker", "router", "frontend")
    before = {service: set(stack.containers(service)) for service in services}
    with load(stack) as seen:
        seen.wait_for_more()
        said = stack.run("./roll.sh")
        seen.wait_for_more()
    assert seen.lost == []
    assert {len(texts) for texts in seen.texts.values()} == {1}, "greedy answers are alike, whoever gave them"
    for service in services:
        assert said.count(f"{service}: ") == 2
        assert not before[service].intersection(stack.containers(service))
        assert stack.is_healthy(service, 2)


@pytest.mark.parametrize("service", [*OURS, *SERVERS])
def test_a_killed_container_is_started_again_and_the_stack_answers(stack: Stack, service: str) -> None:
    stack.kill(service, OURS.get(service, 1))
    eventually(stack.answers, limit_s=LIMIT_S, what="an answer")


@pytest.mark.parametrize("service", OURS)
def test_a_container_that_is_stopped_drains_and_ends_by_itself(stack: Stack, service: str) -> None:
    containers = stack.containers(service)
    stack.compose("stop", service)
    assert [stack.inspect(each)["State"]["ExitCode"] for each in containers] == [0] * OURS[service]
    stack.up("--no-recreate")
    eventually(stack.answers, limit_s=LIMIT_S, what="an answer")


@pytest.mark.parametrize("service", ["nats", "etcd"])
def test_a_server_in_a_new_container_with_another_address_is_found(stack: Stack, service: str) -> None:
    def addresses() -> list[str]:
        networks = [stack.inspect(each)["NetworkSettings"]["Networks"] for each in stack.containers(service)]
        return [str(each["IPAddress"]) for one in networks for each in one.values()]

    before = addresses()
    stack.up("--force-recreate", "--no-deps", service)
    assert addresses() != before
    eventually(stack.answers, limit_s=LIMIT_S, what="an answer")
    for each, number in OURS.items():
        eventually(partial(stack.is_healthy, each, number), limit_s=LIMIT_S, what=f"{each} is healthy")


def test_after_all_containers_were_killed_at_once_new_ones_start_with_the_same_volumes(stack: Stack) -> None:
    stack.compose("kill")
    stack.compose("rm", "--force")
    stack.up()
    eventually(stack.answers, limit_s=LIMIT_S, what="an answer")


@pytest.mark.parametrize("service", OURS)
def test_no_container_keeps_processes_that_have_ended(stack: Stack, service: str) -> None:
    for container in stack.containers(service):
        states = stack.engine.podman("top", container, "state", "comm").splitlines()[1:]
        assert len(states) > 1
        assert [line for line in states if line.startswith("Z")] == []

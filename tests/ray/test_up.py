"""`headrace up --on ray` in a real cluster of two nodes: placement, block stores, kills, and a node that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from deploy.local.stack.block_store import MEMORY
from tests.integration.stack import ROOT, Up, eventually, running, started
from tests.ray.rig import HEAD, Cluster, cluster, node, python, variables
from tests.tiny_model import write_tiny_model

OTHER = "127.0.0.3"
LIMIT_S = 300.0
TWO_EACH = ("--routers", "2", "--frontends", "2")
LONG = 400
"""Tokens of answers that are still being computed when a node dies."""
PROMPT = "How does water get from the river to the mill? " * 40

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(node(HEAD), node(OTHER)) as one:
        yield one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def up(ray: Cluster, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--on", "ray", "--ray-address", ray.address, "--model", model, "--kvbm-bytes", "64M", *TWO_EACH)
    own = {**variables(), "HEADRACE_OBSERVE_LOG_FORMAT": "json"}
    with running(tmp_path_factory.mktemp("up"), *flags, variables=own, python=str(python())) as stack:
        yield stack


def left(nodes: Set[str]) -> list[str]:
    """What an `up` has left of these nodes in memory or in the directory for temporary files."""
    patterns = [f"headrace-{os.geteuid()}-*-{node[:8]}*" for node in nodes]
    return [
        str(each)
        for folder in (MEMORY, Path("/tmp"))
        for each in folder.glob("headrace-*")
        if any(map(each.match, patterns))
    ]


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(client: OpenAI, prompt: str = PROMPT, tokens: int = 8) -> tuple[str, dict[str, Any]]:
    """The text of an answer, and the tokens that were found in a cache, by tier."""
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    details = answer.usage.model_dump()["prompt_tokens_details"] if answer.usage is not None else {}
    return answer.choices[0].text, details.get("cached_tokens_by_tier", {})


def programs(up: Up) -> dict[str, dict[str, Any]]:
    return dict(up.record["programs"])


def workers(up: Up) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in programs(up).items() if name.startswith("worker")}


def healthy(url: str) -> bool:
    try:
        return bool(url) and httpx2.get(f"{url}/health").status_code == 200
    except httpx2.HTTPError:
        return False


def all_ready(up: Up, hosts: set[str], *, since: Set[int] = frozenset()) -> bool:
    """Whether two workers and a kvbm for each of these hosts serve, none of them with a PID of `since`."""
    there = programs(up)
    kvbms = [each for name, each in there.items() if name.startswith("kvbm")]
    watched = [*workers(up).values(), *kvbms]
    return (
        len(workers(up)) == 2
        and {each["host"] for each in workers(up).values()} == hosts
        and hosts <= {each["host"] for each in kvbms}
        and not since & {each["pid"] for each in workers(up).values()}
        and all(healthy(each["observe"]) for each in watched if each["host"] in hosts)
    )


def status(up: Up) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    shown: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return shown


def test_each_node_gets_a_worker_and_a_kvbm_and_questions_are_answered(up: Up, client: OpenAI) -> None:
    eventually(lambda: all_ready(up, {HEAD, OTHER}), limit_s=LIMIT_S, what="a worker and a kvbm on each node")
    assert {each["host"] for name, each in programs(up).items() if name in ("nats", "etcd", "frontend-0")} == {HEAD}
    assert ask(client)[0]
    for each in workers(up).values():
        assert b"\0HEADRACE_OBSERVE_LOG_FORMAT=json\0" in Path(f"/proc/{each['pid']}/environ").read_bytes()
    shown = status(up)
    assert len(shown["models"][0]["instances"]) == 2
    assert len([each for each in shown["instances"] if each["service"] == "kvbm"]) == 2


def test_a_worker_that_is_killed_is_started_again_and_finds_its_nodes_blocks(up: Up, client: OpenAI) -> None:
    expected, _ = ask(client)
    before = {each["pid"] for each in workers(up).values()}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: all_ready(up, {HEAD, OTHER}, since=before), limit_s=LIMIT_S, what="both workers again")
    found = eventually(lambda: ask(client)[1].get("host"), limit_s=LIMIT_S, what="blocks in the kvbm's memory")
    assert found
    assert ask(client)[0] == expected
    for name in workers(up):
        said = f"{name} has started again at {workers(up)[name]['host']} and is ready\n"
        eventually(lambda said=said: said in up.output, limit_s=LIMIT_S, what=said)  # type: ignore[misc]


def test_requests_go_on_while_a_node_dies_and_ray_starts_its_worker_elsewhere(
    ray: Cluster, up: Up, client: OpenAI
) -> None:
    expected, _ = ask(client)
    prompts = [f"{number}: {PROMPT[:300]}" for number in range(16)]
    whole = [ask(client, prompt, LONG)[0] for prompt in prompts]
    before = {each["pid"] for each in workers(up).values() if each["host"] == OTHER}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, client, prompt, LONG) for prompt in prompts]
        eventually(lambda: any(answer.done() for answer in answers), limit_s=LIMIT_S, what="the first answer")
        ray.kill(1)
        assert [answer.result()[0] for answer in answers] == whole
    eventually(lambda: all_ready(up, {HEAD}, since=before), limit_s=LIMIT_S, what="both workers on the head node")
    eventually(
        lambda: {each["host"] for each in programs(up).values()} == {HEAD}, limit_s=LIMIT_S, what="all on the head node"
    )
    assert {"frontend-0", "frontend-1", "router-0", "router-1"} < set(programs(up))
    assert len(status(up)["models"][0]["instances"]) == 2
    assert ask(client)[0] == expected


def test_an_up_for_which_no_node_has_room_says_what_it_waits_for_and_ends_with_ctrl_c(
    ray: Cluster, up: Up, model: str, tmp_path: Path
) -> None:
    flags = ("--on", "ray", "--ray-address", ray.address, "--model", model, "--engine", "echo")
    with started(tmp_path, "up", *flags, variables=variables(), python=str(python())) as second:
        waits = "worker-1 does not answer: Ray looks for a node with 1 CPU free, or starts it\n"
        eventually(lambda: waits in second.output, limit_s=LIMIT_S, what="what the second one waits for")
        assert second.stop() == 0, "".join(second.output)


def test_ctrl_c_drains_all_and_leaves_nothing(up: Up) -> None:
    there = programs(up).values()
    assert left({each["node"] for each in there}) != []
    assert up.stop() == 0, "".join(up.output)
    assert [each["pid"] for each in there if Path(f"/proc/{each['pid']}").exists()] == []
    assert left({each["node"] for each in there}) == []
    assert "stopping: running requests finish first; press Ctrl-C again to end at once\n" in up.output

"""`headrace up --on ray --prefill N --decode M` in a real cluster of three nodes, one of which dies under streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from openai import OpenAI

from tests.integration.stack import Up, eventually, running
from tests.ray.rig import HEAD, Cluster, cluster, node, python, variables
from tests.ray.test_up import LIMIT_S, ask, healthy, programs, status
from tests.tiny_model import write_tiny_model

HOSTS = (HEAD, "127.0.0.3", "127.0.0.4")
WORKERS = ("prefill-0", "decode-0", "decode-1")
STREAMS = 6
LONG = 1500
_numbers = itertools.count()

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(*(node(host, cpus=1) for host in HOSTS)) as one:
        yield one


@pytest.fixture(scope="module")
def up(ray: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=8192)
    flags = ("--on", "ray", "--ray-address", ray.address, "--model", str(model), "--kvbm-bytes", "64M")
    roles = ("--prefill", "1", "--decode", "2", "--frontends", "1", "--routers", "1", "--set", "kvbm.peers.wait_s=2")
    patient = ("--set", "worker.kvbm.wait_s=20", "--set", "worker.kvbm.timeout_s=4")
    own = variables()
    with running(tmp_path_factory.mktemp("up"), *flags, *roles, *patient, variables=own, python=str(python())) as stack:
        yield stack


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def all_serve(up: Up) -> bool:
    """Whether all workers, and a kvbm on the node of each, serve."""
    there = programs(up)
    kvbms = {each["host"] for name, each in there.items() if name.startswith("kvbm") and healthy(each["observe"])}
    return (
        all(name in there and healthy(there[name]["observe"]) and there[name]["host"] in kvbms for name in WORKERS)
        and [row["role"] for row in status(up)["instances"] if row["service"] == "worker"].count("decode") == 2
    )


def counted(up: Up, service: str, metric: str) -> float:
    """What all programs of a service have counted."""
    text = "\n".join(
        httpx2.get(f"{each['observe']}/metrics").text for name, each in programs(up).items() if name.startswith(service)
    )
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(metric))


def handed_over(up: Up, client: OpenAI, before: float) -> bool:
    """Ask something new; return whether a prompt was handed over since, and blocks went from node to node."""
    ask(client, f"{next(_numbers)}: " + "the river turns the wheel of the mill " * 60)
    return (
        counted(up, "frontend", "headrace_hand_overs_total") > before
        and counted(up, "kvbm", "headrace_kvbm_peer_read_blocks_total") > 0
    )


def test_each_node_has_a_worker_of_a_role_and_prompts_are_handed_over_from_node_to_node(up: Up, client: OpenAI) -> None:
    eventually(lambda: all_serve(up), limit_s=LIMIT_S, what="all workers and kvbms")
    assert {programs(up)[name]["host"] for name in WORKERS} == set(HOSTS)
    with ThreadPoolExecutor(STREAMS) as pool:  # prompts are handed over rather than delay these
        streams = [pool.submit(ask, client, f"stream {number}", LONG) for number in range(STREAMS)]
        eventually(lambda: handed_over(up, client, 0), limit_s=LIMIT_S, what="a prompt is handed over")
        assert all(stream.result()[0] for stream in streams)


def test_a_node_that_dies_under_streams_costs_no_answer_and_its_role_comes_back_with_a_new_node(
    ray: Cluster, up: Up, client: OpenAI
) -> None:
    prompts = [f"{number}: How does water get from the river to the mill?" for number in range(STREAMS)]
    whole = [ask(client, prompt, 400)[0] for prompt in prompts]
    there = programs(up)
    [dead] = [host for host in HOSTS[1:] if host == there["decode-0"]["host"]] or [there["decode-1"]["host"]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, client, prompt, 400) for prompt in prompts]
        eventually(
            lambda: counted(up, "decode", "headrace_inflight_requests") >= 2,
            limit_s=LIMIT_S,
            what="streams are decoded",
        )
        ray.kill(HOSTS.index(dead))
        assert [answer.result()[0] for answer in answers] == whole
    ray.add(node("127.0.0.5", cpus=1))
    eventually(
        lambda: "127.0.0.5" in {each["host"] for each in programs(up).values()} and all_serve(up),
        limit_s=LIMIT_S,
        what="the lost role at the new node",
    )
    before = counted(up, "frontend", "headrace_hand_overs_total")
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(ask, client, f"stream {number}", LONG) for number in range(STREAMS)]
        eventually(lambda: handed_over(up, client, before), limit_s=LIMIT_S, what="a prompt is handed over again")
        assert all(stream.result()[0] for stream in streams)
    assert up.stop() == 0, "".join(up.output)

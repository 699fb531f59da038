"""`headrace up --on ray` that cannot work: one clear line each, which names the flag."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stack import ROOT
from tests.ray.rig import HEAD, Cluster, cluster, node, python, variables
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with cluster(node(HEAD, cpus=1)) as one:
        yield one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def refusal(state: Path, model: str, *flags: str, status: int = 2) -> str:
    """What `up --on ray` says last, before it ends with this status."""
    command = [str(python()), "-m", "deploy.local.cli", "up", "--on", "ray", "--state", str(state), "--model", model]
    command += ["--port", str(free_port()), *flags]
    ended = subprocess.run(command, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == ""
    return ended.stderr[ended.stderr.index("error: ") :]  # after notices of a slow machine


def test_an_address_that_nothing_listens_at_is_named(model: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    said = refusal(tmp_path, model, "--ray-address", address)
    assert said == f"error: --ray-address {address}: no server answers there\n"


def test_a_server_that_is_no_ray_is_named(model: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        said = refusal(tmp_path, model, "--ray-address", address)
    assert said.startswith(f"error: --ray-address {address}: ")
    assert said.count("\n") == 1


def test_nodes_without_gpus_are_named_with_the_flag_that_wants_them(ray: Cluster, model: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, model, "--ray-address", ray.address, "--device", "cuda")
    assert said == (
        "error: --device cuda: the workers need 2 GPUs, the nodes of this Ray cluster have 0"
        " (`ray start --num-gpus` says how many a node has)\n"
    )


def test_nodes_with_too_few_cpus_are_named(ray: Cluster, model: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, model, "--ray-address", ray.address, "--workers", "2")
    assert said.startswith("error: --workers: the workers need 2 CPUs, the nodes of this Ray cluster have 1 (")


def test_a_gpu_that_a_node_only_claims_to_have_stops_all_with_the_workers_reason(model: str, tmp_path: Path) -> None:
    with cluster(node(HEAD, gpus=2)) as boasting:
        said = refusal(tmp_path, model, "--ray-address", boasting.address, "--device", "cuda", status=1)
    first, *_, last = said.splitlines()
    assert re.fullmatch(r"error: worker-[01] at 127\.0\.0\.2 cannot work as configured:", first)
    assert last.startswith("error: worker-")
    assert "CuPy" in last


def test_a_cluster_of_another_version_is_refused_with_both(model: str, tmp_path: Path) -> None:
    with cluster(node(HEAD), version="2.59.0") as older:
        said = refusal(tmp_path, model, "--ray-address", older.address)
    assert said.startswith(f"error: --ray-address {older.address}: Version mismatch: ")
    assert "2.59.0" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("flags", [("--single",), ("--engine", "attached"), ("--discovery", "file")])
def test_what_ray_does_not_run_is_refused_at_once(flags: tuple[str, ...], model: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, model, *flags).startswith(f"error: {' '.join(flags[:2])}".split(" 1")[0])

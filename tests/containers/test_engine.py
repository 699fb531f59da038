"""The engine's namespaces: what containers do to networks and mounts is not done to this machine, and all of it ends
with the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.engine import ROOT, cgroups, processes, remove_cgroups
from tests.containers.install import installed
from tests.integration.stack import eventually

RUN = """
from tests.containers.engine import Engine
from tests.containers.install import LOOKALIKES
with Engine() as engine:
    engine.podman("network", "create", "one")
    publish = ("--network", "one", "--publish", "127.0.0.1:8000:4222")
    container = engine.podman("run", "--detach", *publish, LOOKALIKES["nats"]).strip()
    forward = engine.run("cat", "/proc/sys/net/ipv4/ip_forward")
    print(container, engine.run("iptables-save").count("8000"), forward, flush=True)
    input()
"""


def of_this_machine() -> tuple[str, ...]:
    """Return what podman changes where it has no namespaces of its own."""
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return (
        "".join(line for line in rules.splitlines() if "NETAVARK" in line or "8000" in line),
        Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "".join(sorted(each.name for each in Path("/sys/class/net").iterdir())),
        "".join(line for line in mounts if "containers" in line),
    )


def groups_of(container: str) -> list[Path]:
    return [group for group in cgroups() if container in group.name]


def test_a_run_that_is_killed_leaves_no_process_mount_rule_or_control_group() -> None:
    if not installed():
        pytest.skip("needs ./check containers, which installs podman (as root, on Debian)")
    before = of_this_machine()
    run = subprocess.Popen([sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdin is not None
    assert run.stdout is not None
    with run.stdin, run.stdout:
        container, rules, forward = run.stdout.readline().decode().split()
        assert int(rules) > 0, "a port is published"
        assert forward == "1", "a bridge is joined to the network"
        assert groups_of(container)
        assert of_this_machine() == before
        run.kill()
        run.wait()
    eventually(lambda: not processes(), limit_s=60.0, what="podman and what watches containers have ended")

    def removed() -> bool:
        remove_cgroups()
        return not groups_of(container)

    eventually(removed, limit_s=60.0, what="no process is left in the container's groups, so that they can be removed")
    assert of_this_machine() == before

"""deploy/local/ray/actor.py: what a node must have. tests/ray runs its actors."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from deploy.local.ray.actor import check_node
from shared.version import VERSION

HERE = "127.0.0.1"


def test_a_node_with_all_that_is_needed_gives_free_ports(tmp_path: Path) -> None:
    wrong, ports = check_node(VERSION, HERE, [("--model", str(tmp_path))], 3, 0)
    assert wrong == ""
    assert len(set(ports)) == 3


def test_another_version_of_headrace_is_named_with_the_python_that_has_it() -> None:
    assert check_node("0.0.1", HERE, [], 0, 0) == (
        f"the Python of Ray, {sys.executable}, has Headrace {VERSION}; `up` is Headrace 0.0.1",
        [],
    )


def test_a_path_that_the_node_lacks_is_named_with_its_flag(tmp_path: Path) -> None:
    there, lacking = ("--model", str(tmp_path)), ("--keys", str(tmp_path / "keys.toml"))
    assert check_node(VERSION, HERE, [there, lacking], 3, 0) == (
        f"--keys {lacking[1]}: no such file or directory there; each node needs it at this path",
        [],
    )


def test_a_port_that_is_taken_on_the_head_node_is_named() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        assert check_node(VERSION, HERE, [], 3, port) == (f"port {port} is taken; choose another with --port", [])

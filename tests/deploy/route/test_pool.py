"""deploy/local/route/pool.py: the servers of a pool, as the API server's JSON describes it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from deploy.local.route.pool import InferencePool, Pod, parse_pool_name, servers_of
from shared.errors import ConfigError
from tests.deploy.route.kube_server import pod, pool

LABELS = {"app": "vllm", "version": "1"}


def pool_read(*ports: int, protocol: str = "http") -> InferencePool:
    return msgspec.json.decode(json.dumps(pool("vllm", LABELS, *ports, protocol=protocol)), type=InferencePool)


def pod_read(name: str, address: str, **more: Any) -> Pod:
    described = pod(name, address, LABELS, ready=more.pop("ready", True))
    described["metadata"] |= more
    return msgspec.json.decode(json.dumps(described), type=Pod)


def test_each_port_at_each_pod_that_is_ready_is_a_server() -> None:
    pods = [pod_read("two", "fd00::2"), pod_read("one", "10.0.0.1"), pod_read("off", "10.0.0.3", ready=False)]
    servers, why = servers_of(pool_read(8000, 8001), pods)
    assert [server.url for server in servers] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.1:8001",
        "http://[fd00::2]:8000",
        "http://[fd00::2]:8001",
    ]
    assert why == ""


def test_a_pod_that_is_being_deleted_or_has_no_address_is_no_server() -> None:
    pods = [
        pod_read("one", "10.0.0.1", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod_read("two", ""),
        pod_read("three", "what"),
    ]
    assert servers_of(pool_read(8000), pods) == ((), "none of its Pods (3) is ready")


def test_a_pool_that_is_not_there_or_speaks_another_protocol_has_no_servers_and_a_reason() -> None:
    assert servers_of(None, []) == ((), "there is no such InferencePool; it is waited for")
    servers, why = servers_of(pool_read(8000, protocol="kubernetes.io/h2c"), [pod_read("one", "10.0.0.1")])
    assert (servers, why) == ((), "its appProtocol is kubernetes.io/h2c, and servers are asked by HTTP/1.1 alone")


def test_labels_become_a_query_and_a_pool_without_labels_or_ports_is_none() -> None:
    assert pool_read(8000).label_selector == "app=vllm,version=1"
    for wrong in (pool("vllm", {}, 8000), pool("vllm", LABELS), pool("vllm", LABELS, 0)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(wrong), type=InferencePool)


def test_a_name_is_a_namespace_and_a_name() -> None:
    assert parse_pool_name("default/vllm-llama.3") == ("default", "vllm-llama.3")
    for wrong in ("vllm", "a/b/c", "/a", "a/", "A/b", "a/b?c", "a/" + "b" * 254):
        with pytest.raises(ConfigError, match=r"^--inference-pool .*: not NAMESPACE/NAME$"):
            parse_pool_name(wrong)

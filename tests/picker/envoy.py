"""One Envoy in front of the simulated servers, with a port for each way in which gateways use a picker."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.frontend.picker.messages import (
    DESTINATION,
    SERVED,
)
from services.frontend.picker.wire import NAMESPACE, SUBSET, SUBSET_NAMESPACE
from tests.servers import free_port

BUFFER_BYTES = 16 << 20
START_LIMIT_S = 180.0
_FILTERS = "type.googleapis.com/envoy.extensions.filters"
_DUPLEX = {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
MODES: Mapping[str, dict[str, Any]] = {
    # Both bodies go through the picker, as Istio and GKE send them.
    "duplex": {**_DUPLEX, "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"},
    # The answer's body does not. Only for the sake of trailers does Envoy keep the stream until the answer's end.
    "none": {**_DUPLEX, "response_body_mode": "NONE", "response_trailer_mode": "SEND"},
    # The request's body is kept by Envoy, and the answer's goes through the picker unless that declines it.
    "buffered": {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"},
    # Requests are served without the picker if it fails.
    "open": {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    # A cluster that takes any address, but no list.
    "original": {"request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    "subset": {**_DUPLEX, "response_body_mode": "NONE", "response_trailer_mode": "SKIP"},
    "empty": {**_DUPLEX, "response_body_mode": "NONE", "response_trailer_mode": "SKIP"},
    "strange": {**_DUPLEX, "response_body_mode": "NONE", "response_trailer_mode": "SKIP"},
}
"""Each port's processing mode."""


def subsets(servers: Sequence[str]) -> dict[str, list[str]]:
    """Return the endpoints that each port allows, if it does not allow all."""
    return {"subset": [servers[1]], "original": [servers[0]], "empty": [], "strange": ["192.0.2.1:80"]}


def bootstrap(picker: str, servers: Sequence[str], ports: Mapping[str, int], admin: int) -> dict[str, Any]:
    """Return Envoy's configuration for the picker and the servers at these HOST:PORT."""
    allowed = subsets(servers)
    listeners = [_listener(name, ports[name], allowed.get(name)) for name in MODES]
    return {
        "admin": {"address": _address(f"127.0.0.1:{admin}")},
        "static_resources": {
            "listeners": listeners,
            "clusters": [_picker_cluster(picker), servers_cluster(servers), _original_cluster()],
        },
    }


def _address(place: str) -> dict[str, Any]:
    host, _, port = place.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _listener(name: str, port: int, allowed: list[str] | None) -> dict[str, Any]:
    filters = [] if allowed is None else [_set_subset(allowed)]
    filters += [ext_proc(name), {"name": "router", "typed_config": {"@type": f"{_FILTERS}.http.router.v3.Router"}}]
    retry = {"retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 2}
    route = {"cluster": "original" if name == "original" else "servers", "timeout": "120s", "retry_policy": retry}
    manager = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "http_filters": filters,
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
    }
    return {
        "name": name,
        "address": _address(f"127.0.0.1:{port}"),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _set_subset(allowed: list[str]) -> dict[str, Any]:
    config = {
        "@type": f"{_FILTERS}.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET: allowed}}],
    }
    return {"name": "subset", "typed_config": config}


def ext_proc(name: str) -> dict[str, Any]:
    """Return the filter that asks the picker, for one of the ports."""
    config = {
        "@type": f"{_FILTERS}.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": name == "open",
        "allow_mode_override": name == "buffered",
        "message_timeout": "10s",
        "processing_mode": {"request_header_mode": "SEND", "response_header_mode": "SEND", **MODES[name]},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [NAMESPACE, SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [NAMESPACE]},
        },
    }
    return {"name": "picker", "typed_config": config}


def _picker_cluster(picker: str) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": f"type.googleapis.com/{options}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {options: http2},
        "load_assignment": _assigned("picker", [picker]),
    }


def servers_cluster(servers: Sequence[str]) -> dict[str, Any]:
    """Return the cluster that goes where the picker says."""
    policies = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    robin = {"name": "round_robin", "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"}}
    override = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": NAMESPACE, "path": [{"key": DESTINATION}]}},
        ],
        "selected_host_key": {"key": NAMESPACE, "path": [{"key": SERVED}]},
        "fallback_policy": {"policies": [{"typed_extension_config": robin}]},
    }
    return {
        "name": "servers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "load_assignment": _assigned("servers", servers),
        "load_balancing_policy": {
            "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
        },
    }


def _original_cluster() -> dict[str, Any]:
    return {
        "name": "original",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _assigned(name: str, places: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(place)}} for place in places]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


@asynccontextmanager
async def running(program: Path, picker: str, servers: Sequence[str], directory: Path) -> AsyncIterator[dict[str, str]]:
    """Run Envoy and yield the base URL of each of its ports."""
    ports, admin = {name: free_port() for name in MODES}, free_port()
    file, log = directory / "envoy.json", directory / "envoy.log"
    file.write_text(json.dumps(bootstrap(picker, servers, ports, admin)))
    flags = ["--concurrency", "1", "--use-dynamic-base-id", "--disable-hot-restart", "-l", "warning"]
    with log.open("wb") as output:
        command = (str(program), "-c", str(file), *flags)
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not await asyncio.to_thread(_ready, f"http://127.0.0.1:{admin}/ready"):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False

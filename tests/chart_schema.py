"""The chart's values.schema.json, from its values.yaml and the settings of the services.

`python -m tests.chart_schema` writes it. A value has the type of its default. `settings` may have what the service
knows, but for what the chart sets itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from shared.config import ServiceConfig

CHART = Path(__file__).parents[1] / "deploy" / "kubernetes" / "headrace"
PAGE = CHART / "values.schema.json"
SETTINGS: Mapping[str, type[ServiceConfig]] = {
    "settings": ServiceConfig,
    "frontend.settings": FrontendConfig,
    "router.settings": RouterConfig,
    "kvbm.settings": KvbmConfig,
    "workerDefaults.settings": WorkerConfig,
}
SET_BY_CHART: Mapping[str, tuple[str, ...]] = {
    "ServiceConfig": ("namespace",),
    "FrontendConfig": ("namespace",),
    "RouterConfig": ("namespace",),
    "KvbmConfig": ("namespace",),
    "WorkerConfig": ("namespace", "model", "model_name", "engine", "role", "cache", "device"),
    "NatsConfig": ("url", "user", "password", "inbox"),
    "DiscoveryConfig": ("backend", "endpoints", "path", "user", "password"),
    "ObserveConfig": ("host", "port", "events", "url_file"),
    "TraceConfig": ("token",),
    "HttpConfig": ("host", "port", "reuse_port", "drain_delay_s", "tls_cert", "tls_key"),
    "AccessConfig": ("keys_file",),
    "PickerConfig": ("host", "port", "tls_cert", "tls_key", "tls_ca"),
    "KVConnectorConfig": ("pool",),
    "PoolConfig": ("directory", "size_bytes"),
    "DiskConfig": ("directory",),
    "PeersConfig": ("listen", "advertise"),
}
"""Class of settings → those that values name otherwise."""
PLACED = ("nats", "etcd", "models")
"""Values whose pods go where these say."""
PARTS = ("frontend", "router", "kvbm", "workerDefaults", "picker.follow")
TEXT = {"type": "string", "minLength": 1}
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
OF_A_POD: Mapping[str, Any] = {
    "image": {
        "type": "object",
        "properties": {"repository": TEXT, "tag": {"type": "string"}},
        "additionalProperties": False,
    },
    "nodeSelector": OBJECT,
    "affinity": OBJECT,
    "podAnnotations": OBJECT,
    "tolerations": OBJECTS,
    "env": OBJECTS,
    "volumes": OBJECTS,
    "volumeMounts": OBJECTS,
    "priorityClassName": TEXT,
    "runtimeClassName": TEXT,
}
"""What each part's pods may have in addition to what values.yaml lists."""
OF_PLACES = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName")
COUNT = {"type": "integer", "minimum": 1}
_HANDS_OVER: Mapping[str, Any] = {
    "if": {"properties": {"role": {"enum": ["prefill", "decode"]}}, "required": ["role"]},
    "then": {"properties": {"kvbm": {"const": True}}},
}
"""Workers of these roles hand prompts over through the block store."""
REFINED: Mapping[str, Any] = {
    "fleet": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "image.repository": TEXT,
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {"type": "array", "items": TEXT},
    "etcd.endpoints": {"type": "array", "items": {"type": "string", "pattern": ":[0-9]+$"}},
    "models.pull": {"type": "array", "items": {"type": "string", "pattern": "^[^/@]+/[^/@]+@[0-9a-f]{40}$"}},
    "models.claim.accessModes": {"type": "array", "minItems": 1, "items": TEXT},
    "frontend.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "frontend.drainDelaySeconds": {"type": "number", "minimum": 0, "maximum": 600},
    "kvbm.poolBytes": {"type": "integer", "minimum": 1 << 24},
    "kvbm.hostPath": {"type": "string", "pattern": "^/"},
    "kvbm.diskHostPath": {"type": "string", "pattern": "^(/.+)?$"},
    "workerDefaults.engine": {"enum": ["native", "vllm", "attached", "simulated", "echo"]},
    "workerDefaults.role": {"enum": ["aggregated", "prefill", "decode"]},
    "workerDefaults.model": TEXT,
    "picker.pool.targetPorts": {
        "type": "array",
        "minItems": 1,
        "maxItems": 8,
        "items": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
    "picker.pool.failureMode": {"enum": ["FailOpen", "FailClose"]},
    **{f"{part}.autoscaling.{name}": COUNT for part in PARTS for name in ("min", "max", "inflight", "requests")},
}
"""Value → what is allowed, if that is more than its default's type."""
TYPES: Mapping[type, Any] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    str: {"type": "string"},
    list: OBJECTS,
}


def written() -> str:
    """Return the file's text: one line for each value at the top, and for each definition."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = _of(values, "")
    properties, worker = schema["properties"], {"$ref": "#/$defs/worker"}
    definitions = {"worker": properties["workerDefaults"] | _HANDS_OVER, **_settings()}
    properties["workerDefaults"] = worker
    properties["workers"] = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$"},
        "additionalProperties": worker,
    }
    rest = json.dumps(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "additionalProperties": False,
            "allOf": _conditions(),
        }
    )
    tables = {"properties": properties, "$defs": definitions}
    for name, table in tables.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        rest = rest[:-1] + f",\n{json.dumps(name)}: {{\n{lines}\n}}}}"
    return rest + "\n"


def _of(value: Any, path: str) -> dict[str, Any]:
    """Return the schema of a value by its default."""
    if path in SETTINGS:
        return {"$ref": f"#/$defs/{SETTINGS[path].__name__}"}
    if path in REFINED:
        return dict(REFINED[path])
    if not isinstance(value, dict):
        return dict(TYPES[type(value)])
    if not value or path.endswith((".resources", ".volume")):
        return {"type": "object"}
    within = {name: _of(each, f"{path}.{name}".lstrip(".")) for name, each in value.items()}
    if path in PARTS:
        within |= OF_A_POD
    if path in PLACED:
        within |= {name: OF_A_POD[name] for name in OF_PLACES}
    return {"type": "object", "properties": within, "additionalProperties": False}


def _settings() -> dict[str, Any]:
    """Return the schemas of all classes of settings by name, without what the chart sets."""
    _, found = msgspec.json.schema_components(tuple(SETTINGS.values()), ref_template="#/$defs/{name}")
    for name, schema in found.items():
        for each in SET_BY_CHART.get(name, ()):
            del schema["properties"][each]
        schema.pop("required", None)  # the chart sets it, or the service says so
    return {name: _plain(schema) for name, schema in found.items()}


def _plain(schema: Any) -> Any:
    """Return a schema without the words that only people read."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    words = ("title", "description", "default")
    return {
        name: {key: _plain(each) for key, each in value.items()} if name == "properties" else _plain(value)
        for name, value in schema.items()
        if name not in words
    }


def _conditions() -> list[dict[str, Any]]:
    """Return what values need each other for."""

    def when(path: str, equal: bool, then: dict[str, Any]) -> dict[str, Any]:
        *above, name = path.split(".")
        found: dict[str, Any] = {"properties": {name: {"const": equal}}, "required": [name]}
        needs: dict[str, Any] = {"properties": then}
        for table in reversed(above):
            found = {"properties": {table: found}, "required": [table]}
            needs = {"properties": {table: needs}}
        return {"if": found, "then": needs}

    whole = {"properties": {"role": {"const": "aggregated"}}}
    return [
        when("nats.deploy", True, {"secret": TEXT}),
        when("nats.deploy", False, {"url": TEXT}),
        when("etcd.deploy", True, {"secret": TEXT}),
        when("etcd.deploy", False, {"endpoints": {"minItems": 1}}),
        when("picker.pool.enabled", True, {"selector": {"minProperties": 1}}),
        {
            "if": {"properties": {"picker": {"properties": {"caSecret": TEXT}}}},
            "then": {"properties": {"picker": {"properties": {"tlsSecret": TEXT}}}},
        },
        {
            "if": {"properties": {"kvbm": {"properties": {"enabled": {"const": False}}}}},
            "then": {"properties": {"workerDefaults": whole, "workers": {"additionalProperties": whole}}},
        },
    ]


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")

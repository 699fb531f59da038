"""docs/access.md speaks of metrics, settings and headers that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from services.frontend.auth.access import KeyMetrics
from services.frontend.auth.accounts import REFUSAL_REASONS, Accounts
from services.frontend.config import AccessConfig, HttpConfig
from services.frontend.metrics import Metrics
from shared.api_keys import KeyEntry, read_keys

DOCUMENT = (Path(__file__).parents[2] / "docs" / "access.md").read_text(encoding="utf-8")


def test_every_metric_it_names_exists_with_these_labels() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    accounts = Accounts()
    accounts.replace({"alice": KeyEntry("0" * 64)}, 0.0)
    registry.register(KeyMetrics(accounts))
    metrics.unauthorized.labels("missing")
    metrics.stale_files.labels("keys")
    metrics.closed_connections.labels("handshake")
    shown = {(sample.name, *sorted(sample.labels)) for family in registry.collect() for sample in family.samples}
    named = re.findall(r"`(headrace_[a-z_]+)(?:\{([a-z, ]+)(?:=[^}]*)?\})?`", DOCUMENT)
    assert len(named) >= 6
    for name, labels in named:
        assert (name, *sorted(labels.split(", "))) in shown if labels else name in {one for one, *_ in shown}


def test_every_reason_of_a_refusal_is_explained() -> None:
    for reason in REFUSAL_REASONS:
        assert f"`{reason}`" in DOCUMENT


def test_its_example_of_a_keys_file_can_be_read() -> None:
    [line] = re.findall(r"^alice = .*$", DOCUMENT, re.MULTILINE)
    assert read_keys(line.encode())["alice"].concurrency == 16


def test_every_setting_it_names_exists() -> None:
    known = {f"http.{field.name}" for field in msgspec.structs.fields(HttpConfig)}
    known |= {f"access.{field.name}" for field in msgspec.structs.fields(AccessConfig)}
    named = set(re.findall(r"`((?:http|access)\.[a-z_]+)", DOCUMENT))
    assert {"access.keys_file", "http.cors_origins", "http.header_s"} <= named <= known


def test_git_ignores_the_secrets_that_the_document_has_its_reader_write() -> None:
    written = re.findall(r"(?:>> |into |-keyout |-out |--file )([a-z]+\.(?:toml|key|pem))", DOCUMENT)
    assert {"keys.toml", "alice.key", "tls.key", "tls.pem"} <= set(written)
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.removeprefix("/") for line in ignored if line.startswith("/")]
    assert [name for name in written if not any(fnmatch(name, pattern) for pattern in patterns)] == []

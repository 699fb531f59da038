"""docs/responses.md speaks of metrics and settings that exist, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.frontend.config import ResponsesConfig
from services.frontend.metrics import Metrics
from services.frontend.protocol.responses_request import ResponseRequest
from services.frontend.serving.response_store import DROPPED

DOCUMENT = (Path(__file__).parents[2] / "docs" / "responses.md").read_text(encoding="utf-8")


def test_every_metric_it_names_exists_and_every_reason_is_named() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for why in DROPPED:
        metrics.dropped_responses.labels(why)
        assert f"`{why}`" in DOCUMENT
    shown = {sample.name for family in registry.collect() for sample in family.samples}
    named = re.findall(r"`(headrace_[a-z_]+)", DOCUMENT)
    assert len(named) >= 3
    assert set(named) <= shown


def test_its_settings_are_those_with_these_defaults() -> None:
    shown = dict(re.findall(r"^\| `(kept\w*)` \| ([\d,]+(?: MiB)?) \|", DOCUMENT, re.MULTILINE))
    defaults = ResponsesConfig()
    assert set(shown) == set(defaults.__struct_fields__)
    for name, text in shown.items():
        number, _, unit = text.replace(",", "").partition(" ")
        assert int(number) * (1 << 20 if unit else 1) == getattr(defaults, name)


def test_every_field_of_a_request_is_in_it() -> None:
    for field in ResponseRequest.__struct_fields__:
        assert re.search(rf"`{field}[`.]", DOCUMENT), field

"""docs/states.md names each reason, limit and metric that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.requests.retry import Loss
from services.frontend.requests.session import State
from services.frontend.requests.terms import DEADLINE_FIELD, DEADLINE_HEADER

TEXT = (Path(__file__).parents[2] / "docs" / "states.md").read_text()


def test_every_reason_has_its_row() -> None:
    first, _, _ = TEXT.partition("## The limits")
    assert sorted(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE)) == sorted(get_args(Loss))


def test_every_state_is_drawn() -> None:
    assert {state.name for state in State} <= set(re.findall(r"[A-Z]{5,}", TEXT))


def test_the_limits_and_their_defaults_are_the_settings() -> None:
    limits = LimitsConfig()
    for name in ("first_token_s", "stall_s", "attempts", "rescue_s"):
        (default,) = re.findall(rf"^\| `{name}`[^|]*\| (\d+) \|", TEXT, re.MULTILINE)
        assert float(default) == getattr(limits, name)
    assert f"| {limits.deadline_s:g}, {limits.deadline_most_s:g} |" in TEXT
    for name in ("offer_timeout_s", "quiet_s", "frozen_s", "stall_s"):
        assert f"`{name}` ({getattr(limits, name):g} s)" in TEXT
    assert f"`{DEADLINE_HEADER}`" in TEXT
    assert f"`{DEADLINE_FIELD}`" in TEXT


def test_every_metric_that_it_names_exists() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    names = {sample for family in registry.collect() for sample in (family.name, f"{family.name}_total")}
    assert set(re.findall(r"`(headrace_\w+)`", TEXT)) <= names

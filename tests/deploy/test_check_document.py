"""docs/check.md has every line that `headrace check` prints, and the limits that it has."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.local.check import bus, discovery, frames, peer, run, serve
from deploy.local.check.child import LIMITS_S
from deploy.local.check.verdicts import verdicts
from tests.deploy.check.test_verdicts import CASES, changed

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
PARTS = ("NATS", "etcd", "memory", "disk", "GPU", "peer")


def named() -> set[str]:
    """Return the names in the first cells of the tables of `What it prints` and `Between two machines`."""
    tables = TEXT.partition("## What it prints")[2].partition("## Limits")[0]
    cells = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_line_is_in_a_table_and_no_other() -> None:
    printed = {each.name for part, changes, *_ in CASES for each in verdicts(changed(part, changes))}
    assert named() == {re.sub(r"GPU \d+", "GPU N", name) for name in printed} | set(PARTS)


def test_the_limits_are_those_of_the_code() -> None:
    limits = TEXT.partition("## Limits")[2]
    assert (bus.LIMIT_S, discovery.LIMIT_S) == (5, 5)
    assert "| NATS, etcd | 5 s each |" in limits
    assert f"| {LIMITS_S['memory']:g}, {LIMITS_S['disk']:g} and {LIMITS_S['gpus']:g} s, in processes" in limits
    assert f"| peer | {peer.LIMIT_S:g} s; {frames.TRANSFER_LIMIT_BYTES >> 30} GiB a transfer, " in limits
    assert f"{frames.SESSION_LIMIT_BYTES >> 30} GiB together" in limits
    assert f"of {frames.SESSION_S:g} s at most, with {frames.MOST_STREAMS} streams at most" in limits
    assert (
        f"| {serve.MOST_CONNECTIONS}; further ones are closed. A connection has {serve.FIRST_MESSAGE_S:g} s" in limits
    )
    assert f"| {frames.MESSAGE_S:g} s; a whole transfer {frames.TRANSFER_S:g} s |" in limits
    assert f"cut after {run._TEXT_LIMIT} characters" in limits

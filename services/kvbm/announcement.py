"""What discovery shows of a kvbm: its address book, with a source of events for each layout."""

from __future__ import annotations

from collections.abc import Callable

from shared import subjects
from shared.discovery.announcement import Announcement
from shared.messages import EventSource
from shared.runtime.lifecycle import Runtime

OPERATIONS = (
    "attach",
    "store",
    "commit",
    "abort",
    "fetch",
    "release",
    "discard",
    "snapshot",
    "load",
    "stat",
    "control",
)


def announcement(runtime: Runtime, layouts: Callable[[], dict[str, EventSource]]) -> Announcement:
    """From its start on. `layouts` are the sources to show, by digest."""
    operations = {name: subjects.kvbm(runtime.namespace, runtime.instance, name) for name in OPERATIONS}
    shown = Announcement(runtime.discovery, lambda epoch: runtime.address(epoch, operations, layouts=layouts()))
    shown.change()
    return shown

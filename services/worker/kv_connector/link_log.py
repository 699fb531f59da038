"""LinkLog: what the log says of an engine's link to its kvbm.

The last line is true, at the latest LINES_S after the last change, whatever came before; and a link that comes and goes
makes no flood. So a line that comes too soon after others is put off, not dropped: later it says what is so then.
"""

from __future__ import annotations

import logging
from collections import deque

from services.worker.contracts.messages import KvbmLink

LINES_S = 60.0
"""Seconds in which there are MOST_LINES at most. A reason whose details alone change is logged once in this time."""
MOST_LINES = 6
LOG_AFTER_S = 5.0
"""Seconds that a kvbm must be missing before the log says why, since services may start in any order. The end of a link
is logged at once."""

_log = logging.getLogger(__name__)


class LinkLog:
    """Logs the link of one engine. Times are seconds on one clock of the caller's."""

    def __init__(self, namespace: str = "") -> None:
        """`namespace` is the engine's own. Empty if it is unknown."""
        self._namespace = namespace
        self.link = KvbmLink(kvbm="")
        """The link as it was taken last."""
        self._logged = self.link
        """The link that the last line is about."""
        self._unlinked_s: float | None = None
        """When the last link ended; before the first one, when this was asked first."""
        self._lines_s: deque[float] = deque(maxlen=MOST_LINES)
        """When the last lines were logged."""

    def take(self, link: KvbmLink, now_s: float) -> None:
        """Take up what the link is now."""
        was, self.link = self.link, link
        if was.kvbm and not link.kvbm:
            self._unlinked_s = now_s
        if was.kvbm or link.kvbm:
            self._write(now_s)

    def look(self, now_s: float) -> None:
        """Log what is due. To be called each second, or more often."""
        if self.link.kvbm or self.unlinked_for_s(now_s) >= LOG_AFTER_S:
            self._write(now_s)

    def unlinked_for_s(self, now_s: float) -> float:
        """Return the seconds for which there has been no link; before the first one, since this was asked first. 0
        while there is one."""
        if self.link.kvbm:
            return 0.0
        if self._unlinked_s is None:
            self._unlinked_s = now_s
        return now_s - self._unlinked_s

    def _write(self, now_s: float) -> None:
        link, before = self.link, self._logged
        if link == before or (len(self._lines_s) == MOST_LINES and now_s - self._lines_s[0] < LINES_S):
            return
        if _kind(link) == _kind(before) and now_s - self._lines_s[-1] < LINES_S:
            return
        self._logged = link
        self._lines_s.append(now_s)
        if stranger := of_another_namespace(link, self._namespace):
            _log.warning("%s", stranger)
        elif link.kvbm:
            _log.info("blocks are exchanged with kvbm %s, layout %s", link.kvbm, link.layout)
        else:
            _log.warning("no blocks are exchanged: %s", link.reason or "the engine has not attached yet")


def of_another_namespace(link: KvbmLink, namespace: str) -> str:
    """Return what to tell a person if the kvbm is of another namespace than this one. Empty if it is not, or if one of
    the two is unknown. Pure."""
    if not (link.kvbm and link.namespace and namespace) or link.namespace == namespace:
        return ""
    return (
        f"blocks are exchanged with kvbm {link.kvbm} of namespace {link.namespace}, layout {link.layout}: routers of "
        f"namespace {namespace} do not know which blocks it has; give both one namespace"
    )


def _kind(link: KvbmLink) -> tuple[str, ...]:
    """Return what differs if the link has changed in more than the details of a reason. A kvbm that is not ready yet
    may be one that has no room for this layout, so the code of a refusal counts."""
    return (link.kvbm, link.layout, *link.reason.split(": ", 2)[:2])

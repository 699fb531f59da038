"""Decides what follows when a server that takes text alone gives no answer to a request. Pure.

    choose ─▶ send ─┬─ an answer ─▶ it passes, whatever its status; then there is no other try
       ▲            ├─ 429, 502, 503, 504, 529 ─▶ it is kept; if no other server has an answer, it passes
       │            └─ nothing: not reached, ended without an answer, or no HTTP
       └── at another server, as long as there are tries

A server that only ended the connection may have closed it because it was idle, just as the request was sent. It is
asked once more, if there is no other one.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from msgspec import Struct

BUSY = frozenset((429, 502, 503, 504, 529))
"""Statuses by which a server says that another one, or a later time, may help. Anthropic has 529 for overload."""
TextLoss = Literal["unreachable", "gone", "refused", "senseless"]
"""Why a server gave no answer, in the words of `retry.Loss`: it was not reached; it ended the connection; it is busy,
or refuses our key; what it sent is no answer."""
LOSSES_LISTED = 8


class TextFault(Struct, frozen=True):
    """What became of a request at a server that gave no answer."""

    loss: TextLoss
    why: str
    passes: bool = False
    """Whether the client gets the answer if no other server has one."""
    counts: bool = True
    """Whether the server is suspected if its next answers are the same (text_suspects.py)."""


def fault_of(status: int, content_type: str) -> TextFault | None:
    """Return what is wrong with an answer. None if it passes at once."""
    if content_type in ("text/html", "application/xhtml+xml"):  # no API's: a page, here a browser would believe it ours
        return TextFault("senseless", f"answers {status} with HTML")
    if status in BUSY:
        return TextFault("refused", f"answers {status}", passes=True, counts=status not in (429, 529))
    if status == 401:  # the client's key is another, and the text may show ours
        return TextFault("refused", "answers 401: text.api_key_file has no key that it takes")
    if status < 200 or status in (204, 205) or 300 <= status < 400:  # no redirect is followed
        return TextFault("senseless", f"answers {status}")
    return None


class TextTries:
    """The tries of one request."""

    def __init__(self, most: int) -> None:
        """`most` tries are made."""
        self._most = most
        self._tries = 0
        self._gone: Counter[str] = Counter()
        """How often each server ended the connection."""
        self._losses: list[str] = []
        self.excluded: dict[str, None] = {}
        """The instances that are not to be chosen."""

    def begin(self) -> None:
        """Count a try."""
        assert self._tries < self._most
        self._tries += 1

    def failed(self, instance: str, fault: TextFault) -> bool:
        """Note a try without an answer. Return whether another may be made."""
        self._gone[instance] += fault.loss == "gone"
        self.excluded[instance] = None
        self._losses = [*self._losses, f"{instance} {fault.why}"][-LOSSES_LISTED:]
        return self._tries < self._most

    def none_left(self) -> bool:
        """Note that each server is excluded. Return whether one is no longer."""
        again = [instance for instance in self.excluded if self._gone[instance] == 1]
        for instance in again:
            self._gone[instance] += 1
            del self.excluded[instance]
        return bool(again)

    def text(self, why: str = "") -> str:
        """Return what became of all tries, after `why`."""
        return "; ".join(filter(None, (why, *self._losses)))

    def validate(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._tries <= self._most
        assert len(self._losses) <= min(LOSSES_LISTED, self._tries)

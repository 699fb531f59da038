"""Decides which step frames are read, and gets missing ones sent again. Pure.

A worker numbers what it sends to one frontend, (epoch, sequence), from 0. In one epoch:

    | read             | missing, or on the way      | not sent yet, as far as this frontend knows
    0                  expected = the frame that is due target

                the frame that is due
                ┌────┐        a later frame; a report, or a suspected attempt, shows that more was sent
                ▼    │        ┌──────────────────────────────────────────────────────────────┐
               FLOWING ───────┘                                                              ▼
                  ▲ all missing frames have come; its worker no longer has them        LAGGING: asks for a resend
                  └──────────────────────────────────────────────────────────────────────────┤
               RESYNC ◀── asked RESENDS_LIMIT times and nothing came: the next frame is read ┘

A worker that is asked goes back N: it publishes everything from that frame on again. So nothing has to be kept here:
frames ahead of their turn are dropped, and so are repeated ones. A frame that could not be had again shows as a gap in
the parts' `first`. Attempts that the worker's answer does not name among its streams have ended, and their end is lost.

A larger epoch starts the numbers again. The worker's answer to a resend request is its own word: its epoch counts even
if it is smaller. Links outlive their worker's lease, because it may come back. Beyond a limit, the link that brought no
frame for the longest time is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from shared.messages.frames import Resent

RESENDS_LIMIT = 3
"""The number of resends asked for in a row that brought no frame that is due."""

FrameVerdict = Literal["due", "repeated", "ahead"]
Attempt = tuple[str, int]
"""The id of a request and the number of its attempt."""


class RequestResend(Struct, frozen=True):
    """Send ResendRequest; the answer goes to `resend_answered`."""

    instance: str
    first: int


class EndsLost(Struct, frozen=True):
    """The ends of these attempts are lost: they are over, and nothing more will come."""

    instance: str
    attempts: frozenset[Attempt]


class _Link(Struct):
    epoch: int = 0
    """The epoch of the frames; 0 before the first, since epochs begin with 1."""
    expected: int = 0
    target: int = 0
    gap: bool = False
    """Whether a later frame has come than the one that is due, which will not come by itself."""
    last: int = -1
    """The sequence of the latest frame that the worker's report named."""
    resync: bool = False
    heard_s: float = float("-inf")
    """When a frame was last read."""
    asked_s: float = float("-inf")
    """When a resend was last asked for."""
    tries: int = 0
    """How often a resend was asked for since a frame was read."""
    reported_s: float = float("-inf")
    """When a report first named a frame that has not come."""
    suspected: frozenset[Attempt] = frozenset()
    """The attempts whose end may be lost: the worker has to be asked."""
    ended: frozenset[Attempt] = frozenset()
    """The attempts that have ended, as of the frames before `target`."""

    @property
    def is_lagging(self) -> bool:
        return self.target > self.expected or bool(self.suspected)

    def restart_numbers(self, epoch: int) -> None:
        self.epoch, self.expected, self.target, self.gap, self.resync = epoch, 0, 0, False, False


class Frames:
    """The links to all workers. Times are seconds on one clock."""

    def __init__(self, *, retry_s: float, late_s: float, most_links: int = 4096) -> None:
        """Create it. A resend has `retry_s` to bring a frame. A frame is lost if reports have named it for `late_s`
        while no frame came."""
        self._retry_s = retry_s
        self._late_s = late_s
        self._most_links = most_links
        self._links: dict[str, _Link] = {}
        self.reading = ""
        """The worker whose frame is being read. Ends of attempts in it are not lost."""

    def frame_received(self, instance: str, epoch: int, sequence: int, now_s: float) -> FrameVerdict:
        """Record a frame that came, and return whether it is due. Only such a frame is to be read."""
        link = self._links.get(instance)
        if link is None:
            link = self._new(instance)
        if epoch > link.epoch:
            link.restart_numbers(epoch)
        if epoch < link.epoch or sequence < link.expected:
            return "repeated"
        if sequence > link.expected and not link.resync:
            link.target, link.gap = max(link.target, sequence + 1), True
            return "ahead"
        link.expected, link.gap, link.resync, link.heard_s = sequence + 1, False, False, now_s
        return "due"

    def report_received(self, instance: str, last: int, now_s: float) -> None:
        """Record a worker's load report. `last` is the sequence of the latest frame that it made for this frontend; -1
        if there is none, or if it has forgotten this frontend and will start the numbers again."""
        link = self._links.get(instance)
        if link is None:
            if last < 0:
                return
            link = self._new(instance)
        link.last = last
        if last < link.expected or link.resync:
            link.reported_s = float("-inf")
        elif link.reported_s <= link.heard_s:
            link.reported_s = now_s
        elif now_s - link.reported_s >= self._late_s:
            link.target = max(link.target, last + 1)

    def suspect(self, instance: str, attempt: Attempt) -> None:
        """Suspect that an attempt's end was lost, because the worker's reports no longer name it.

        Ignored while frames that a report named are still to be read: reports overtake frames, and a frontend with a
        backlog would have all of it sent again.
        """
        link = self._links.get(instance) or self._new(instance)
        if attempt not in link.ended and (link.last < link.expected or link.resync):
            link.suspected |= {attempt}

    def resend_answered(self, ask: RequestResend, resent: Resent, streaming: Iterable[Attempt]) -> None:
        """Apply the worker's answer to `ask`; `streaming` are our attempts there that had begun when it was asked."""
        link = self._links.get(ask.instance) or self._new(ask.instance)
        if resent.epoch != link.epoch:
            link.restart_numbers(resent.epoch)
            link.target = resent.next
            if ask.first > 0:  # it is a number of another epoch: the frames before it were not sent again
                link.asked_s = float("-inf")
                return
        link.expected = max(link.expected, min(resent.first, resent.next))
        link.target = resent.next
        living = {(stream.request, stream.attempt) for stream in resent.streams}
        link.ended = (link.ended | link.suspected | frozenset(streaming)) - living
        link.suspected = frozenset()

    def poll(self, now_s: float) -> list[RequestResend | EndsLost]:
        """Return what is to be done now about all links."""
        return [action for instance in self._links for action in self.next_actions(instance, now_s)]

    def next_actions(self, instance: str, now_s: float) -> list[RequestResend | EndsLost]:
        """Return what is to be done now about one link, after a frame came ahead of its turn."""
        link = self._links[instance]
        actions: list[RequestResend | EndsLost] = []
        coming = not link.gap and now_s - link.heard_s < self._retry_s  # missing frames come one after the other
        if link.is_lagging and now_s - link.asked_s >= self._retry_s and (link.suspected or not coming):
            link.tries = link.tries + 1 if link.asked_s > link.heard_s else 1
            if link.tries > RESENDS_LIMIT:
                self._give_up(link)
            else:
                link.asked_s = now_s
                actions.append(RequestResend(instance, link.expected))
        if link.ended and link.target <= link.expected and instance != self.reading:
            actions.append(EndsLost(instance, link.ended))
            link.ended = frozenset()
        return actions

    def _give_up(self, link: _Link) -> None:
        link.resync, link.tries, link.target = True, 0, link.expected
        link.ended, link.suspected = link.ended | link.suspected, frozenset()

    def _new(self, instance: str) -> _Link:
        if len(self._links) >= self._most_links:
            del self._links[min(self._links, key=lambda name: self._links[name].heard_s)]
        link = self._links[instance] = _Link()
        return link

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._links) <= self._most_links
        for link in self._links.values():
            assert link.expected >= 0
            assert 0 <= link.tries <= RESENDS_LIMIT
            assert not link.suspected & link.ended

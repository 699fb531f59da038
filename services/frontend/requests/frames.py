"""Which step frames are taken, and what becomes of those that did not come. Pure.

A worker numbers what it sends to one frontend, (epoch, sequence), from 0. Of one epoch:

    | taken            | missed, or on the way       | not sent yet, as far as is known
    0                  expected = the one that is due target

                the frame that is due
                ┌────┐        a later frame; a report, or an attempt in doubt, says that more was sent
                ▼    │        ┌──────────────────────────────────────────────────────────────┐
               FLOWING ───────┘                                                              ▼
                  ▲ all that was missed has come; its worker no longer has it             BEHIND: asks for a resend
                  └──────────────────────────────────────────────────────────────────────────┤
               ADRIFT ◀── asked TRIES times and nothing came: what comes next is taken ──────┘

A worker that is asked goes back N: it publishes everything from that frame on again. So nothing has to be kept here:
what comes ahead of its turn is dropped, and so is what comes again. What could not be had again shows as a gap in the
parts' `first`; attempts that are not among the streams that the worker's answer names have ended unheard.

A larger epoch numbers anew. The worker's answer to a question is its own word: its epoch holds, also a smaller one.
Links outlive their worker's lease, because it may come back; beyond a bound the one heard last longest ago goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from shared.messages import Resent

RESENDS_LIMIT = 3
"""Resends asked for in a row without a frame that is due."""

FrameVerdict = Literal["due", "repeated", "ahead"]
Attempt = tuple[str, int]
"""(request, attempt)."""


class RequestResend(Struct, frozen=True):
    """Send ResendRequest; what comes of it goes to `answered`."""

    instance: str
    first: int


class EndsLost(Struct, frozen=True):
    """These attempts have ended, and nothing more will be heard of it."""

    instance: str
    attempts: frozenset[Attempt]


class _Link(Struct):
    epoch: int = 0
    """0: none yet, they begin with 1."""
    expected: int = 0
    target: int = 0
    gap: bool = False
    """A later frame has come than the one that is due: that one will not come by itself."""
    last: int = -1
    """What the latest report named."""
    resync: bool = False
    heard_s: float = float("-inf")
    """When a frame was taken."""
    asked_s: float = float("-inf")
    """When a resend was asked for."""
    tries: int = 0
    """How often that was, since a frame was taken."""
    reported_s: float = float("-inf")
    """When a report first told of a frame that has not come."""
    suspected: frozenset[Attempt] = frozenset()
    """May have ended unheard: the worker has to be asked."""
    ended: frozenset[Attempt] = frozenset()
    """Have ended, as of the frames before `target`."""

    @property
    def behind(self) -> bool:
        return self.target > self.expected or bool(self.suspected)

    def restart_numbers(self, epoch: int) -> None:
        self.epoch, self.expected, self.target, self.gap, self.resync = epoch, 0, 0, False, False


class Frames:
    """The links to all workers. Times are seconds on one clock."""

    def __init__(self, *, retry_s: float, late_s: float, most_links: int = 4096) -> None:
        """A resend has `retry_s` to bring something. A frame that was sent, as reports have said for `late_s`, while
        nothing came, is lost."""
        self._retry_s = retry_s
        self._late_s = late_s
        self._most_links = most_links
        self._links: dict[str, _Link] = {}
        self.reading = ""
        """The worker whose frame is taken and not read to its end: ends that are in it are not unheard."""

    def frame_received(self, instance: str, epoch: int, sequence: int, now_s: float) -> FrameVerdict:
        """A frame came; only one that is due is to be read."""
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
        """The worker's load report: `last` is the sequence of the latest frame that it made for us; -1: of none, also
        where it has forgotten us, and numbers anew when there is something."""
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
        """The worker's reports do not name it any more: has its end been lost? Not while frames that a report named are
        still to be taken, for reports overtake them: who is behind would have the whole backlog sent again."""
        link = self._links.get(instance) or self._new(instance)
        if attempt not in link.ended and (link.last < link.expected or link.resync):
            link.suspected |= {attempt}

    def resend_answered(self, ask: RequestResend, resent: Resent, streaming: Iterable[Attempt]) -> None:
        """What the worker said to `ask`; `streaming` are our attempts there that had begun when it was asked."""
        link = self._links.get(ask.instance) or self._new(ask.instance)
        if resent.epoch != link.epoch:
            link.restart_numbers(resent.epoch)
            link.target = resent.next
            if ask.first > 0:  # a number of another epoch: what is before it was not sent again
                link.asked_s = float("-inf")
                return
        link.expected = max(link.expected, min(resent.first, resent.next))
        link.target = resent.next
        living = {(stream.request, stream.attempt) for stream in resent.streams}
        link.ended = (link.ended | link.suspected | frozenset(streaming)) - living
        link.suspected = frozenset()

    def poll(self, now_s: float) -> list[RequestResend | EndsLost]:
        """What is to be done now about all links."""
        actions: list[RequestResend | EndsLost] = []
        for instance in self._links:
            actions += self.next_actions(instance, now_s)
        return actions

    def next_actions(self, instance: str, now_s: float) -> list[RequestResend | EndsLost]:
        """What is to be done now about one link, after a frame came ahead of its turn."""
        link = self._links[instance]
        actions: list[RequestResend | EndsLost] = []
        coming = not link.gap and now_s - link.heard_s < self._retry_s  # what was missed, one after the other
        if link.behind and now_s - link.asked_s >= self._retry_s and (link.suspected or not coming):
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
        """Asserts the invariants."""
        assert len(self._links) <= self._most_links
        for link in self._links.values():
            assert link.expected >= 0
            assert 0 <= link.tries <= RESENDS_LIMIT
            assert not link.suspected & link.ended

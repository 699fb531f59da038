"""The spans of one stream's attempts, from what its session decides. Pure.

    request (the door's span)
    ├─ attempt ─────────────┐ SelectWorker ─▶ CountLoss, Finish, Fail, or the client left
    │  ├─ select            │ SelectWorker ─▶ Selected, SelectRefused, Unrouted; the router's span is below it
    │  └─ (the worker's)    │ queue, onboard, prefill, decode
    ├─ attempt               HandOver ─▶ as above: the one that decodes after another worker's prefill
    ├─ migration ───────────┘ CountLoss ─▶ the next token: what the client waited for it
    └─ attempt …

A span is made when it ends. So a worker that is killed takes its unfinished spans with it, while those of its attempts
are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.frontend.requests.actions import (
    Action,
    CountLoss,
    DispatchAttempt,
    Fail,
    Finish,
    HandOver,
    PublishLoad,
    SelectWorker,
)
from shared.messages.select import Prefilled, Selected, SelectRefused
from shared.tracing.spans import AttributeValue, SpanIds, SpanKind, SpanRecord, finished
from shared.tracing.traceparent import TraceParent


class _Open:
    """A span that has not ended."""

    def __init__(self, place: TraceParent, start_ns: int, attributes: dict[str, AttributeValue]) -> None:
        self.place = place
        self.start_ns = start_ns
        self.attributes = attributes


class AttemptSpans:
    """The spans of one stream below the request's span at `root`. Times are nanoseconds since 1970."""

    def __init__(self, root: TraceParent, request: str, ids: SpanIds, record: Callable[[SpanRecord], None]) -> None:
        """`request` is the id of the stream's request; `record` gets each span when it has ended."""
        self._root = root
        self._request = request
        self._ids = ids
        self._record = record
        self._attempt: _Open | None = None
        self._select: _Open | None = None
        self._migration: _Open | None = None

    @property
    def select_headers(self) -> Mapping[str, str] | None:
        """The header of the Select that asks for the attempt's worker. None if the choice is over."""
        return None if self._select is None else self._select.place.headers

    @property
    def attempt_headers(self) -> Mapping[str, str] | None:
        """The header of the attempt's Generate. None if the attempt is over."""
        return None if self._attempt is None else self._attempt.place.headers

    def acted(self, action: Action, now_ns: int) -> None:
        """Take up an action of the session."""
        match action:
            case SelectWorker(attempt):
                named: dict[str, AttributeValue] = {"headrace.request": self._request, "headrace.attempt": attempt}
                if self._attempt is None:
                    self._attempt = self._begin(self._root, now_ns, named)
                self._select = self._begin(self._attempt.place, now_ns, dict(named))
                if self._migration is not None:
                    self._migration.attributes["headrace.attempt"] = attempt
            case DispatchAttempt() if self._attempt is not None:
                self._attempt.attributes |= {"headrace.instance": action.instance, "headrace.rank": action.rank}
                if self._migration is not None:
                    self._migration.attributes["headrace.instance"] = action.instance
            case HandOver(attempt):
                self._end_attempt(now_ns, "")
                taken: dict[str, AttributeValue] = {
                    "headrace.request": self._request,
                    "headrace.handed_over_by": attempt,
                }
                self._attempt = self._begin(self._root, now_ns, taken)
            case PublishLoad(Prefilled()):
                self._end_migration(now_ns)
            case CountLoss():
                lost_at = self._attempt.attributes.get("headrace.instance", "") if self._attempt is not None else ""
                self._end_attempt(now_ns, f"the attempt was lost: {action.loss}")
                lost: dict[str, AttributeValue] = {
                    "headrace.request": self._request,
                    "headrace.loss": action.loss,
                    "headrace.lost_instance": lost_at,
                    "headrace.had_tokens": action.had_tokens,
                }
                if self._migration is None:  # else it waits for a token since an earlier loss
                    self._migration = self._begin(self._root, now_ns, lost)
            case Finish():
                self.close(now_ns)
            case Fail():
                self.close(now_ns, str(action.error))
            case _:
                pass

    def chosen(self, answer: Selected | SelectRefused, block_size: int, now_ns: int) -> None:
        """Take up the routers' answer; `block_size` is that of the chosen worker in tokens, 0 if it is unknown."""
        if isinstance(answer, SelectRefused):
            self._end_select(now_ns, f"{answer.code}: {answer.reason}")
            return
        if self._select is not None:
            overlap = answer.overlap
            self._select.attributes |= {
                "headrace.router": answer.router,
                "headrace.instance": answer.instance,
                "headrace.rank": answer.rank,
                "headrace.overlap_tokens": overlap.blocks * block_size,
                "headrace.overlap_tokens.device": overlap.device * block_size,
                "headrace.overlap_tokens.host": overlap.host * block_size,
                "headrace.overlap_tokens.disk": overlap.disk * block_size,
                "headrace.overlap_tokens.remote": overlap.remote * block_size,
                "headrace.reason": answer.reason,
            }
        self._end_select(now_ns)

    def unrouted(self, reason: str, now_ns: int) -> None:
        """Take up that no router answered."""
        self._end_select(now_ns, reason)

    def close(self, now_ns: int, error: str = "") -> None:
        """End all spans that have not ended. Idempotent."""
        self._end_attempt(now_ns, error)
        self._end_migration(now_ns, error)

    def _begin(self, parent: TraceParent, now_ns: int, attributes: dict[str, AttributeValue]) -> _Open:
        return _Open(self._ids.child(parent), now_ns, attributes)

    def _end_attempt(self, now_ns: int, error: str) -> None:
        self._end_select(now_ns, error)
        if (ended := self._attempt) is not None:
            self._attempt = None
            self._finish("attempt", ended, self._root, now_ns, error)

    def _end_select(self, now_ns: int, error: str = "") -> None:
        if (ended := self._select) is not None:
            self._select = None
            assert self._attempt is not None, "a worker is chosen for an attempt"
            self._finish("select", ended, self._attempt.place, now_ns, error, kind="client")

    def _end_migration(self, now_ns: int, error: str = "") -> None:
        if (ended := self._migration) is not None:
            self._migration = None
            self._finish("migration", ended, self._root, now_ns, error)

    def _finish(
        self, name: str, ended: _Open, parent: TraceParent, now_ns: int, error: str, *, kind: SpanKind = "internal"
    ) -> None:
        times, attributes = (ended.start_ns, now_ns), ended.attributes
        self._record(finished(name, ended.place, parent.span, *times, kind=kind, attributes=attributes, error=error))

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._select is None or self._attempt is not None

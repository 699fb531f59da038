"""The spans of traced attempts at a worker, below the frontend's span of the attempt. Pure.

    accepted ─────────▶ queued for the kvbm ──▶ admitted ──▶ first token ──────▶ end
    │ queue             │ onboard               │ prefill    │ decode           │
                        └ with `fetch`, and kvbm's own span below it

The engine reports the times of queue, onboard and prefill with the first token. An engine that does not report them
(an attached server) leaves one span, prefill, from the acceptance to the first token: `headrace.with_queue` says
so. An attempt that ends before its first token has the span queue alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.contracts.messages import Begun
from shared.messages.frames import Part
from shared.tracing.spans import AttributeValue, SpanIds, SpanRecord, finished
from shared.tracing.traceparent import TraceParent

_NS = 1_000_000_000


@dataclass(slots=True)
class _Traced:
    number: int
    parent: TraceParent
    accepted_ns: int
    first_ns: int = 0
    """When the first token came; 0 before."""
    first: int = 0
    """The index of the attempt's first token in the request's output."""
    begun: Begun | None = None


class TracedAttempts:
    """Living attempts that are traced. Times are nanoseconds since 1970."""

    def __init__(self, ids: SpanIds) -> None:
        self._ids = ids
        self._living: dict[tuple[str, int], _Traced] = {}
        self._numbers: dict[int, _Traced] = {}
        """What `_living` has, by `Submit.number`."""

    def __len__(self) -> int:
        """Return how many of them live."""
        return len(self._living)

    def accepted(self, name: tuple[str, int], number: int, parent: TraceParent, now_ns: int) -> None:
        """Take up an attempt that was accepted and given to the engine under this number."""
        self._living[name] = self._numbers[number] = _Traced(number, parent, now_ns)

    def begun(self, begun: Begun) -> None:
        """Take up the times of any attempt, which come before its first part."""
        if (traced := self._numbers.get(begun.number)) is not None:
            traced.begun = begun

    def part(self, part: Part, now_ns: int) -> list[SpanRecord]:
        """Take up the first or the last part of any attempt; return the spans that have ended."""
        name = (part.request, part.attempt)
        traced = self._living.get(name)
        if traced is None:
            return []
        spans: list[SpanRecord] = []
        if not traced.first_ns and (part.tokens or part.embedding):
            traced.first_ns, traced.first = now_ns, part.first
            spans += self._until_first(traced, part)
        if part.finish is not None:
            spans.append(self._last(traced, part, now_ns))
            del self._living[name], self._numbers[traced.number]
        return spans

    def _until_first(self, traced: _Traced, part: Part) -> list[SpanRecord]:
        """Return queue, onboard and prefill, which follow one another from the acceptance to the first token."""
        cached: dict[str, AttributeValue] = {
            "headrace.cached_tokens": part.cached_tokens,
            "headrace.cached_tokens.host": part.cached_host_tokens,
            "headrace.cached_tokens.disk": part.cached_disk_tokens,
        }
        accepted_ns, first_ns, begun = traced.accepted_ns, traced.first_ns, traced.begun
        if begun is None:
            return [self._span("prefill", traced, accepted_ns, first_ns, cached | {"headrace.with_queue": True})]
        prefill_ns = max(accepted_ns, first_ns - round(_NS * begun.prefill_s))
        onboard_ns = max(accepted_ns, prefill_ns - round(_NS * begun.onboard_s))
        spans = [self._span("queue", traced, accepted_ns, onboard_ns)]
        if begun.onboard_s:
            spans.append(self._span("onboard", traced, onboard_ns, prefill_ns))
        return [*spans, self._span("prefill", traced, prefill_ns, first_ns, cached)]

    def _last(self, traced: _Traced, part: Part, now_ns: int) -> SpanRecord:
        error = (part.error or part.finish or "") if part.finish in ("error", "deadline", "cancelled") else ""
        ended: dict[str, AttributeValue] = {"headrace.finish": part.finish or ""}
        if not traced.first_ns:
            return self._span("queue", traced, traced.accepted_ns, now_ns, ended, error)
        ended["headrace.tokens"] = part.first + len(part.tokens) // 4 - traced.first
        return self._span("decode", traced, traced.first_ns, now_ns, ended, error)

    def _span(
        self,
        name: str,
        traced: _Traced,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, AttributeValue] | None = None,
        error: str = "",
    ) -> SpanRecord:
        place, parent = self._ids.child(traced.parent), traced.parent.span
        return finished(name, place, parent, start_ns, end_ns, attributes=attributes, error=error)

    def validate(self) -> None:
        """Raise AssertionError if the attempts contradict themselves."""
        assert {id(one) for one in self._living.values()} == {id(one) for one in self._numbers.values()}
        assert all(number == traced.number for number, traced in self._numbers.items())

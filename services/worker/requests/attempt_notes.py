"""What is noted of attempts at a worker for `headrace explain`, in words. Pure."""

from __future__ import annotations

from services.worker.contracts.messages import Begun
from services.worker.scheduler.queue_clock import LEAST_S, describe_wait
from shared.messages.frames import Part
from shared.messages.generate import Refused


def begun(report: Begun) -> str:
    """Return the note of an attempt's first token."""
    wait = describe_wait(report.queued_s, report.waited_s)
    onboard_s = report.onboard_s
    onboard = f", {describe_wait(onboard_s)} of it for blocks of the kvbm" if onboard_s >= LEAST_S else ""
    overtaken = f", overtaken by {report.overtaken} that were due earlier" if report.overtaken else ""
    missing = f"; the first block that no cache had: {report.first_missing.hex()}" if report.first_missing else ""
    prefill = f"then {describe_wait(report.prefill_s)} to its first token"
    return f"waited {wait} for its first step{onboard}{overtaken}, {prefill}{missing}"


def refused(reply: Refused) -> str:
    """Return the note of an attempt that the worker did not take."""
    return f"refused ({reply.code}): {reply.reason}"


def ended(part: Part) -> str:
    """Return the note of an attempt that ended before its answer was complete. Empty if it was complete."""
    match part.finish:
        case "error":
            return f"ended with an error after {part.first} tokens: {part.error}"
        case "deadline":
            return f"ended after {part.first} tokens, since the time of its request was over"
        case "cancelled":
            return f"cancelled after {part.first} tokens, by its frontend or because that was gone"
        case _:
            return ""

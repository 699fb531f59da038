"""What is noted of a request for `headrace explain`, in words. Pure.

A request that got its answer from its first worker has no note here: the routers know all of it.
"""

from __future__ import annotations

from services.frontend.protocol.errors import failure_of
from services.frontend.requests.actions import CountLoss, HandOver, RetryLater
from shared.errors import HeadraceError, InvalidRequest


def lost(action: CountLoss, instance: str, tokens: int) -> str:
    """Return the note of a lost attempt at a worker; `tokens` is the number of output tokens so far."""
    kept = f", after {tokens} tokens, which are kept" if tokens else ""
    return f"lost at {instance or 'no worker'} ({action.loss}){kept}: {action.why}"


def handed_over(action: HandOver) -> str:
    """Return the note of a prompt that was computed, and whose answer another worker decodes."""
    return f"computed its prompt and handed over to {action.instance}, which decodes"


def no_worker(action: RetryLater) -> str:
    """Return the note of a request for which no worker could be chosen."""
    return f"no worker could be chosen, the routers are asked again in about {action.pause_s:g} s: {action.why}"


def failed(error: HeadraceError) -> str:
    """Return the note of an error that the client got. The text of a request that is itself at fault may repeat what
    it says, so its note names the field alone."""
    status = failure_of(error).status
    if isinstance(error, InvalidRequest):
        at_fault = ", ".join(filter(None, (error.param, error.code))) or "the request is at fault"
        return f"refused with status {status}: {at_fault}"
    return f"ended with status {status}: {error}"

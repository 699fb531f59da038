"""Notes what a request was when it has ended: its metrics, its line in the log, its span.

The line says who asked for what, and what became of it. Requests with a status of 500 or more always have one, others
where the setting `access_log` is on.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from services.frontend.metrics import Metrics
from services.frontend.requests.admission import Permit
from services.frontend.requests.request_trace import RequestTrace

_log = logging.getLogger("services.frontend.access")


def note_end(
    metrics: Metrics,
    request: str,
    operation: str,
    status: int,
    seconds: float,
    permit: Permit | None,
    trace: RequestTrace | None,
    *,
    log_every: bool,
) -> None:
    """Note that a request ended after `seconds`. `permit` is None if it was refused before it had one, `trace` if
    it is not traced; `log_every`: whether also requests have a line that did not fail in the service."""
    metrics.count_request(operation, status, "" if permit is None else permit.model, seconds)
    _log_end(request, operation, status, seconds, permit, "" if trace is None else trace.id, every=log_every)
    if trace is not None:
        trace.end(status)


def _log_end(
    request: str, operation: str, status: int, seconds: float, permit: Permit | None, trace: str, *, every: bool
) -> None:
    failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if not (failed or every):
        return
    fields: dict[str, object] = {"operation": operation, "status": status, "seconds": round(seconds, 6)}
    if permit is not None:
        served = permit.served
        fields |= {
            "model": permit.model,
            "key": permit.key,
            "prompt_tokens": served.prompt_tokens,
            "output_tokens": served.output_tokens,
            "cached_tokens": served.cached_tokens,
            "first_token_s": None if served.first_token_s is None else round(served.first_token_s, 6),
            "workers": ",".join(served.instances),
            "attempts": served.attempts,
        }
    level = logging.WARNING if failed else logging.INFO
    _log.log(level, "request ended", extra={"request": request, "trace": trace, "fields": fields})

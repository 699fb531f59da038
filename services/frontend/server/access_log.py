"""The line of each request in the log: who asked for what, and what became of it.

Requests with a status of 500 or more always have one, others where the setting `access_log` is on.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from services.frontend.requests.admission import Permit

_log = logging.getLogger("services.frontend.access")


def log_request(
    request: str, operation: str, status: int, seconds: float, permit: Permit | None, *, every: bool, trace: str = ""
) -> None:
    """Log a request that ended after `seconds`. `permit` is None where it was refused before it had one; `every`:
    whether also requests are logged that did not fail in the service."""
    failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if not (failed or every):
        return
    fields: dict[str, object] = {"operation": operation, "status": status, "seconds": round(seconds, 6)}
    if permit is not None:
        served = permit.served
        fields |= {
            "model": permit.model,
            "key": "" if permit.account is None else permit.account.name,
            "prompt_tokens": served.prompt_tokens,
            "output_tokens": served.output_tokens,
            "cached_tokens": served.cached_tokens,
            "first_token_s": None if served.first_token_s is None else round(served.first_token_s, 6),
            "workers": ",".join(served.instances),
            "attempts": served.attempts,
        }
    level = logging.WARNING if failed else logging.INFO
    _log.log(level, "request ended", extra={"request": request, "trace": trace, "fields": fields})

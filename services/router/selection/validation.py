"""Validation of a Select: what a router can work with. Pure."""

from __future__ import annotations

from shared.errors import ProtocolError
from shared.hashing import unpack_hashes
from shared.messages.select import Select

ID_LIMIT = 256
"""The most characters of a name in a Select."""
_EXCLUDED_LIMIT = 4096


def validated_hashes(select: Select, most_hashes: int, block_size: int) -> list[int]:
    """Return the prompt's hashes. Raise ProtocolError, which names the field. `most_hashes` is the most blocks of a
    prompt; `block_size` is 0 without instances."""
    if (
        max(len(select.request), len(select.frontend), len(select.session), len(select.lora)) > ID_LIMIT
        or not select.request
    ):
        raise ProtocolError(
            f"request is empty, or request, frontend, session or lora has more than {ID_LIMIT} characters"
        )
    if len(select.excluded) > _EXCLUDED_LIMIT:
        raise ProtocolError(f"excluded may have at most {_EXCLUDED_LIMIT} instances")
    if select.attempt < 0 or select.prompt_tokens < 1 or select.max_tokens < 0:
        raise ProtocolError("attempt and max_tokens must not be negative, and prompt_tokens must be positive")
    if not (select.time_left_s >= 0 and select.wait_limit_s >= 0):  # also refuses NaN
        raise ProtocolError("time_left_s and wait_limit_s must not be negative: the request's time is over")
    if len(select.hashes) > 8 * most_hashes:
        raise ProtocolError(f"hashes has more than {most_hashes} blocks")
    try:
        hashes = unpack_hashes(select.hashes)
    except ValueError as wrong:
        raise ProtocolError(f"hashes: {wrong}") from None
    if block_size:
        blocks = select.prompt_tokens // block_size
        if blocks > most_hashes:
            raise ProtocolError(f"prompt_tokens has more than {most_hashes} blocks")
        if len(hashes) > blocks:
            raise ProtocolError(f"{len(hashes)} hashes for a prompt of {select.prompt_tokens} tokens")
    if len(set(hashes)) != len(hashes):
        raise ProtocolError("hashes repeat: the hashes of one prompt must all be different")
    return hashes

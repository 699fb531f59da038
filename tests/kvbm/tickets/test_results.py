from __future__ import annotations

import msgspec
import pytest

from services.kvbm.tickets.results import TicketLimits
from shared.messages import kvbm as wire
from shared.pool.socket_frames import MOST_REQUEST_BLOCKS, Answered, Asked, encode_frame


def test_the_largest_requests_that_the_settings_allow_and_their_answers_fit_frames() -> None:
    most = msgspec.convert({"blocks_per_request": MOST_REQUEST_BLOCKS}, TicketLimits).blocks_per_request
    with pytest.raises(msgspec.ValidationError, match="32768"):
        msgspec.convert({"blocks_per_request": most + 1}, TicketLimits)
    owner, keys = "o" * 128, bytes(16 * most)
    for operation, payload in (
        ("fetch", wire.FETCH.encode(wire.Fetch(owner, keys, awaits=True))),
        ("discard", wire.DISCARD.encode(wire.Discard(owner, keys))),
    ):
        encode_frame(Asked(2**63, operation, payload, "t" * 55))
    slots, eights = bytes(4 * most), bytes(8 * most)
    fetched = wire.Fetched(2**63, 10.0, 0, slots, eights, disk=True, found=most, checksums=eights)
    granted = wire.Granted(2**63, 10.0, list(range(most)), slots)
    for payload in (wire.FETCH_REPLY.encode(fetched), wire.STORE_REPLY.encode(granted)):
        encode_frame(Answered(2**63, payload))

"""What becomes of the requests of a simulated fleet, and the times between the tokens of their answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.virtual.loads import TraceRequest


@dataclass(slots=True)
class Journey:
    """What became of one request."""

    request: TraceRequest
    asked_s: float = -1.0
    """When the request came. In an open loop this is its arrival time in the load."""
    attempt: int = -1
    last_attempt: int = -1
    """The highest attempt number in use: a worker that is to decode has one from the start."""
    decoder: str = ""
    """The worker that will decode what the current attempt hands over. Empty if there is none."""
    hand_overs: int = 0
    begun: int = -1
    """The attempt whose first token has come; -1 before it."""
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    """The part of the cached tokens that came from the block store's memory."""
    cached_disk_tokens: int = 0
    first_token_s: float = -1.0
    end_s: float = -1.0
    failed: str = ""
    produced: int = 0
    """How many tokens of the answer have come."""
    last_token_s: float = -1.0
    """When the last of them came."""

    @property
    def output(self) -> bytes:
        """Packed tokens, one for each that has come. They are not those that were drawn, but differ as those do."""
        number = self.request.number
        return array("I", [number >> 8 * (index % 3) & 255 for index in range(self.produced)]).tobytes()

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.asked_s


class TokenGaps:
    """The times between the tokens of answers. A token's time is when its step ended, since a frame carries a step."""

    def __init__(self) -> None:
        self.all_s = array("d")
        """Seconds from each token to the next one of the same answer, hand-overs included."""
        self.handed_over_s = array("d")
        """Seconds from the first token of a request to its second one, where another worker computed that."""

    def add(self, journey: Journey, now_s: float, *, new_worker: bool = False) -> None:
        """Take up a new token of a request. `new_worker` says whether it is the first after a hand-over."""
        if journey.last_token_s >= 0:
            self.all_s.append(now_s - journey.last_token_s)
            if new_worker:
                self.handed_over_s.append(now_s - journey.last_token_s)
        journey.last_token_s = now_s

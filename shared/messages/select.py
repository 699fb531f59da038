"""frontend → router: select a worker and reserve its load in one step; and the reservations, to every router. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.codec import Codec


class Select(Struct, frozen=True, tag="select"):
    """Choose an instance for a prompt and reserve its load there."""

    request: str
    attempt: int
    frontend: str
    """The instance id of the frontend that asks; its reservations end with its lease."""
    model: str
    hashes: bytes
    """The sequence hashes of the prompt's full blocks, packed u64, with the seed of LoRA and salt."""
    prompt_tokens: int
    max_tokens: int
    """The maximum number of tokens that are still to be decoded."""
    excluded: tuple[str, ...] = ()
    """The instances that failed or refused this request."""
    lora: str = ""
    priority: int = 0
    """Requests of a higher priority are computed first: the negative of what the client sent."""
    session: str = ""
    """Requests of one session prefer one instance, if all else is nearly equal. Empty means no session."""
    explain: bool = False
    """Whether the answer must name the candidates that were not chosen."""
    time_left_s: float = 0.0
    """The time left for the request, in seconds. 0 if unknown."""
    wait_limit_s: float = 0.0
    """The longest wait for earlier prompts, in seconds: if no candidate is predicted to begin the request by then, the
    router refuses it as overloaded. 0 means no limit."""
    whole: bool = False
    """Whether one worker must compute the whole request: an embedding, log-probabilities of the prompt, or an answer
    that a worker of the model cannot continue exactly."""
    unreported: bool = False
    """Whether the worker's reports never have the attempt, because a gateway sends the request to the server that the
    worker is attached to. Finished releases its reservation, or the end of `time_left_s` or of the frontend's lease."""
    images: int = 0
    """The number of images in the prompt. Their keys are in `hashes`."""
    image_tokens: int = 0
    """How many of the prompt's tokens stand for them."""
    image_hashes: bytes = b""
    """The first 8 bytes of each image's embedding key, if its embeddings may be needed."""
    image_ends: tuple[int, ...] = ()
    """For each of `image_hashes`, the index in the prompt of the token after the image."""


class Overlap(Struct, frozen=True, array_like=True):
    """The number of leading blocks that were found, each counted in its fastest tier."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    """In the memory of other machines' block stores, which the candidate's own store can read."""

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk + self.remote

    @property
    def here(self) -> int:
        """The blocks on the candidate's own machine."""
        return self.device + self.host + self.disk


class Candidate(Struct, frozen=True):
    """One row of a decision: an (instance, rank), and the reasons for and against it."""

    instance: str
    rank: int
    overlap: Overlap
    score: float
    """The cost that the policy computed; lower is better."""
    active_blocks: int
    queued_tokens: int
    reason: str
    predicted_s: float | None = None
    """The predicted time to the first token, in seconds. None if the worker has not reported its speed yet."""


class Selected(Struct, frozen=True, tag="selected"):
    """The router's choice. The load stays reserved until Finished, or until a lease ends."""

    request: str
    attempt: int
    instance: str
    rank: int
    router: str
    overlap: Overlap
    reason: str
    candidates: tuple[Candidate, ...] = ()
    """The best few candidates, best first; empty unless `Select.explain` asked for them."""
    decode: str = ""
    """The worker that takes the request over after its first token, as attempt + 1, whose load is reserved there;
    `instance` computes only the prompt. Empty if `instance` computes all of it."""
    decode_rank: int = 0
    encode: str = ""
    """The worker that encodes images of the prompt before `instance` hears of it. Empty if none does."""
    encode_images: tuple[int, ...] = ()
    """Which ones, by their number in `Select.image_ends`."""
    encode_wait_s: float = 0.0
    """The most seconds to wait for it. Afterwards `instance` encodes what is not there."""


class SelectRefused(Struct, frozen=True, tag="refused"):
    """The router could not choose an instance."""

    request: str
    attempt: int
    code: Literal["no_instances", "all_excluded", "unknown_model", "bad_request", "overloaded"]
    reason: str
    retry_after_s: float = 1.0


SelectReply = Selected | SelectRefused


class Reserved(Struct, frozen=True, tag="reserved"):
    """A router chose `instance` for this attempt, and counts its load there."""

    request: str
    attempt: int
    frontend: str
    instance: str
    rank: int
    uncached_tokens: int
    blocks: int
    """The number of blocks that the prompt will occupy, without those that it finds on the device, which others may
    share."""
    router: str = ""
    """The router that made the reservation; it ignores its own message."""
    priority: int = 0
    """The priority of its Select."""
    delay_s: float = 0.0
    """The longest time, in seconds, until the worker hears of the attempt, which another one hands over. 0 if it hears
    of it at once."""
    unreported: bool = False
    """Whether the worker's reports never have the attempt, as `Select.unreported` says."""
    lasts_s: float = 0.0
    """For an unreported attempt: the seconds after which its frontend has said Finished at the latest."""
    awaited: bytes = b""
    """The sequence hashes of the first blocks that the instance will compute, packed u64, if the prompt waits there for
    others. Such a message follows or precedes the same one without them, and may be lost."""


class Prefilled(Struct, frozen=True, tag="prefilled"):
    """The attempt's first token has come: its prefill load ends, its blocks stay in use."""

    request: str
    attempt: int
    cached_tokens: int
    """-1 if unknown."""
    first_token_s: float = 0.0
    """The time from the request's arrival at the frontend to its first token, in seconds. 0 if unknown."""
    instance: str = ""
    """The worker that computed the prompt. Empty if unknown."""
    cached_host_tokens: int = 0
    """How many of `cached_tokens` came from a kvbm's host memory."""
    cached_disk_tokens: int = 0
    """How many of `cached_tokens` came from a kvbm's disk."""


class Finished(Struct, frozen=True, tag="finished"):
    """The attempt has ended, for whatever reason."""

    request: str
    attempt: int


LoadEvent = Reserved | Prefilled | Finished


class LoadEvents(Struct, frozen=True):
    """A batch of load events for one model."""

    model: str
    events: list[LoadEvent]


class ReservationsRequest(Struct, frozen=True, tag="reservations_request"):
    """Ask a router for all reservations of a model that have not ended."""

    model: str


class Reservations(Struct, frozen=True, tag="reservations"):
    """A part of the reservations that one router knows, oldest first. New ones come on the load subject meanwhile."""

    model: str
    reserved: list[Reserved]
    prefilled: list[tuple[str, int]]
    """The (request, attempt) of each reservation whose first token has come."""


SELECT: Codec[Select] = Codec(Select, "select")
SELECT_REPLY: Codec[SelectReply] = Codec(SelectReply, "select reply")
LOAD_EVENTS: Codec[LoadEvents] = Codec(LoadEvents, "load events")
RESERVATIONS_REQUEST: Codec[ReservationsRequest] = Codec(ReservationsRequest, "reservations request")
RESERVATIONS: Codec[Reservations] = Codec(Reservations, "reservations")

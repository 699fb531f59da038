"""ImageEncoding: which images of a prompt another worker encodes, and which worker that is. Pure.

    the chosen worker lacks images of the prompt ──▶ seen lately? ── yes ──▶ they are in a cache, or in the kvbm
                                                           │ no
    encode workers of its kvbm ──▶ the one that is done first ──▶ sooner than in place? ── yes ──▶ it encodes them

    in place = images * seconds of one there * (1 + requests there)
    apart    = (images that wait + images) * seconds of one there + hand-over

Every request that decodes at a worker waits while an image is encoded there, so all of their seconds count, and an idle
worker encodes its own images. A router that takes an image for new although the kvbm has it costs a message: the encode
worker looks there first. docs/decisions/0081 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from msgspec import Struct

from services.router.selection.candidates import CandidateState
from shared.errors import ProtocolError
from shared.hashing import unpack_hashes
from shared.messages.cards import ModelCard
from shared.messages.load import EncoderState
from shared.messages.select import Select

UNKNOWN_IMAGE_S = 1.0
"""The seconds of an image where no worker has encoded one yet."""
HAND_OVER_S = 0.02
"""The seconds to send an image's pixels to an encode worker, and to copy its embeddings to the kvbm and from there."""
SEEN_S = 60.0
"""The seconds for which an image that was asked for counts as found. Later the kvbm may have evicted it."""
MOST_SEEN = 1 << 14
"""The most images that are remembered; beyond it the oldest is forgotten."""
MOST_IMAGES = 1 << 10
"""The most images of a Select."""
WAIT_LEAST_S, WAIT_MOST_S = 1.0, 8.0
"""The bounds of the time that a frontend waits for an encode worker: twice as long as expected, within them."""


class EncodePlan(Struct, frozen=True):
    """Images of a prompt that an encode worker encodes."""

    instance: str
    images: tuple[int, ...]
    """The numbers of the images in the prompt."""
    apart_s: float
    """Seconds until they are handed over."""
    in_place_s: float
    """Seconds that the chosen worker would take, all its requests together."""

    @property
    def wait_s(self) -> float:
        """How long the frontend waits for them at most, in seconds."""
        return min(max(2 * self.apart_s, WAIT_LEAST_S), WAIT_MOST_S)

    @property
    def reason(self) -> str:
        """The choice, in words."""
        many = "1 image" if len(self.images) == 1 else f"{len(self.images)} images"
        return f"{self.instance} encodes {many}: {self.apart_s:.2f} s, in place {self.in_place_s:.2f} s"


class _Encoder(Struct):
    """What is known of one worker's encoding."""

    image_s: float = 0.0
    waiting: int = 0
    """Images that waited there at its last report, and those that were sent there since."""


class ImageEncoding:
    """The encoding of images for one model. Times are seconds on a monotonic clock."""

    def __init__(self) -> None:
        self._encoders: dict[str, _Encoder] = {}
        """Instance → what it last reported."""
        self._seen: dict[int, tuple[float, str]] = {}
        """An image's hash → when it was first asked for, and by which request; the oldest first."""

    def apply_report(self, instance: str, state: EncoderState | None) -> None:
        """Apply what a worker of this model reports."""
        if state is not None:
            self._encoders[instance] = _Encoder(_plausible(state.image_s), max(state.waiting, 0))

    def remove_instance(self, instance: str) -> None:
        """Forget a worker that has gone."""
        self._encoders.pop(instance, None)

    def plan(
        self, select: Select, chosen: CandidateState, block_size: int, encoding: Sequence[ModelCard], now_s: float
    ) -> EncodePlan | None:
        """Return which images of the prompt that `chosen` computes are encoded elsewhere, by which of the workers
        `encoding`. None if it encodes them itself, or needs none."""
        lacking = self._lacking(select, chosen, block_size, now_s) if encoding else []
        if not lacking:
            return None
        own_s = self._image_s(chosen.id[0])
        costs = {}
        for card in encoding:
            encoder = self._encoders.get(card.instance) or _Encoder()
            image_s = encoder.image_s or own_s or UNKNOWN_IMAGE_S
            costs[card.instance] = (encoder.waiting + len(lacking)) * image_s + HAND_OVER_S
        instance = min(costs, key=lambda each: costs[each])
        own_s = own_s or self._image_s(instance) or UNKNOWN_IMAGE_S
        in_place_s = len(lacking) * own_s * (1 + chosen.load.requests)
        if costs[instance] >= in_place_s:
            return None
        self._encoders.setdefault(instance, _Encoder()).waiting += len(lacking)
        return EncodePlan(instance, tuple(lacking), costs[instance], in_place_s)

    def _image_s(self, instance: str) -> float:
        encoder = self._encoders.get(instance)
        return 0.0 if encoder is None else encoder.image_s

    def _lacking(self, select: Select, chosen: CandidateState, block_size: int, now_s: float) -> list[int]:
        """Return the numbers of the images that must be encoded, and remember them as asked for."""
        known = chosen.overlap.blocks * block_size
        hashes = unpack_hashes(select.image_hashes)
        lacking: dict[int, int] = {}
        for number, (name, end) in enumerate(zip(hashes, select.image_ends, strict=True)):
            seen_s, request = self._seen.get(name, (0.0, ""))
            if end <= known or name in lacking:
                continue
            if request and request != select.request and now_s - seen_s < SEEN_S:
                continue
            lacking[name] = number
        for name in lacking:
            self._seen.pop(name, None)
            self._seen[name] = now_s, select.request
        while len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return list(lacking.values())

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._seen) <= MOST_SEEN
        assert all(encoder.waiting >= 0 for encoder in self._encoders.values())


def encode_workers(cards: Mapping[str, ModelCard], chosen: str, left_out: Set[str]) -> list[ModelCard]:
    """Return the workers that may encode images for the worker `chosen`: those of its kvbm, whose embeddings it can
    use."""
    own = cards[chosen]
    if not (own.embeddings_layout and own.kvbm):
        return []
    return [
        card
        for card in cards.values()
        if card.role == "encode"
        and (card.kvbm, card.embeddings_layout, card.images) == (own.kvbm, own.embeddings_layout, own.images)
        and card.instance not in left_out
    ]


def check_images(select: Select) -> None:
    """Raise ProtocolError if what a Select says of its images contradicts itself."""
    ends = select.image_ends
    if len(ends) > MOST_IMAGES or len(select.image_hashes) != 8 * len(ends):
        raise ProtocolError(f"image_ends has {len(ends)} images, image_hashes {len(select.image_hashes)} bytes")
    if any(not 0 < end <= select.prompt_tokens for end in ends):
        raise ProtocolError("image_ends: an image ends outside the prompt")


def _plausible(seconds: float) -> float:
    """Return a duration that a worker reports; 0 if it makes no sense."""
    return seconds if 0.0 < seconds < 3600.0 else 0.0

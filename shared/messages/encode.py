"""frontend → worker with the role encode: encode an image for other workers. Pure."""

from __future__ import annotations

from msgspec import Struct

from shared.messages.codec import Codec


class Encode(Struct, frozen=True, tag="encode"):
    """Store an image's embeddings in the machine's kvbm, unless they are there. The answer comes when that is done."""

    model: str
    key: bytes
    """The key of the embeddings (32 bytes): `salted_image_key` of the image's key and the tenant's salt."""
    pixels: bytes
    """The prepared image, in the form of `Image.pixels`."""
    time_left_s: float
    """The time after which the frontend waits no longer, in seconds."""
    width: int = 0
    """The pixels of a row. 0 means those of the card's `ImageInput`, as for `height`."""
    height: int = 0


class Encoded(Struct, frozen=True, tag="encoded"):
    """The embeddings are in the kvbm or on their way there, unless `failed` says why not."""

    failed: str = ""


ENCODE: Codec[Encode] = Codec(Encode, "encode")
ENCODED: Codec[Encoded] = Codec(Encoded, "encoded")

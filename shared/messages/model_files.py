"""How a frontend reads the files of a model that are on a worker's machine, in parts. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shared.messages.codec import Codec

PART_BYTES = 512 << 10
"""The maximum size of a part; half of what a NATS server takes as a payload by default."""


class ReadModelFile(Struct, frozen=True):
    """Send a part of one of `shared.model_file.FILES`."""

    name: str
    offset: Annotated[int, Meta(ge=0)] = 0


class ModelFilePart(Struct, frozen=True):
    """A part of a file, from the offset that was asked for."""

    data: bytes = b""
    size: int = -1
    """The size of the whole file in bytes. -1 if there is no such file."""
    changed_ns: int = 0
    """When the file was last changed; another value in a later part means another file."""
    failed: str = ""
    """Why the file cannot be read. Empty if it can, or is not there."""


READ_MODEL_FILE: Codec[ReadModelFile] = Codec(ReadModelFile, "question for a model file")
MODEL_FILE_PART: Codec[ModelFilePart] = Codec(ModelFilePart, "part of a model file")

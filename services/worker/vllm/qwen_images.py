"""Images of Qwen2-VL's family: how many pixels their processor's file lets them have, and their patches.

▢▢▢▢▢▢   each square of `merge` by `merge` patches is a token of the prompt; the patches of a token follow each other,
▢▢▢▢▢▢   each with all values of one colour, then of the next one. A picture is a film of equal frames, as many as
▢▢▢▢▢▢   a patch has
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from services.worker.native.vision_config import filter_name, read_processor
from shared.errors import ModelError
from shared.messages.cards import ImageInput

_MOST_PIXELS = 1 << 30
"""The most pixels that a file may allow an image, far beyond any real one."""
_MOST_SIDE = 1 << 10
"""The most of each number of a patch."""
DEFAULT_TOKENS = 1280
"""Most tokens of an image if vLLM's `mm_processor_kwargs` say nothing else. The files of these models allow 16,384, of
which a message over NATS holds a ninth: photos would be refused in place of resized."""
_ARGUMENTS = ("min_pixels", "max_pixels", "size")
"""The names in vLLM's `mm_processor_kwargs` that are read."""


class PatchShape(Struct, frozen=True):
    """The shape of the patches that a vision tower takes."""

    side: int
    """Pixels of a side."""
    merge: int
    """Patches along the side of a token."""
    frames: int
    """Frames of a patch, which are equal in a picture."""

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.side * self.merge


class _Size(Struct, frozen=True):
    shortest_edge: int | None = None
    longest_edge: int | None = None


class _ProcessorJson(Struct, frozen=True):
    size: _Size = _Size(56 * 56, 28 * 28 * 1280)
    min_pixels: int | None = None
    max_pixels: int | None = None
    do_resize: bool | None = True
    resample: int = 3
    patch_size: int | None = None
    merge_size: int | None = None
    temporal_patch_size: int | None = None


def read_input(
    directory: Path, token_id: int, vocab: int, patch: PatchShape, arguments: Mapping[str, Any]
) -> ImageInput:
    """Return how the images of a model are prepared. `arguments` are vLLM's `mm_processor_kwargs`. Raise ModelError
    naming file and field."""
    path, settings = read_processor(directory, "size", "min_pixels", "image_processor_type")
    said = _convert(str(path), settings)
    for field, number in (
        ("patch_size", patch.side),
        ("merge_size", patch.merge),
        ("temporal_patch_size", patch.frames),
    ):
        if getattr(said, field) not in (None, number):
            raise ModelError(f"{path}: {field} is {getattr(said, field)}; the vision tower's is {number}")
        if not 1 <= number <= _MOST_SIDE:
            raise ModelError(f"{directory}: vision_config has a {field} of {number}; expected 1 to {_MOST_SIDE}")
    if not said.do_resize:
        raise ModelError(f"{path}: do_resize is {said.do_resize}; only true is supported")
    if not 0 <= token_id < vocab:
        raise ModelError(f"{directory}: image_token_id is {token_id}; expected one of the {vocab} tokens")
    if unknown := set(arguments) - {*_ARGUMENTS}:
        raise ModelError(f"mm_processor_kwargs: {min(unknown)} is not read; {', '.join(_ARGUMENTS)} are")
    asked, least, most = _convert("mm_processor_kwargs", {"size": {}, **arguments}), 0, 0
    for one in (said, asked):
        least = one.min_pixels or one.size.shortest_edge or least
        most = one.max_pixels or one.size.longest_edge or most
    if not 1 <= least <= most <= _MOST_PIXELS or most < patch.unit**2:
        why = f"images have {least} to {most} pixels (min_pixels, max_pixels, or size's shortest_edge, longest_edge)"
        raise ModelError(f"{path}: {why}; expected an ascending range, with a token's {patch.unit**2} below its end")
    if not (asked.max_pixels or asked.size.longest_edge):
        most = min(most, max(least, DEFAULT_TOKENS * patch.unit**2))
    filtered = filter_name(path, said.resample)
    return ImageInput(token_id, 0, 0, 0, 0, filtered, unit=patch.unit, least_pixels=least, most_pixels=most)


def grid_of(width: int, height: int, patch: PatchShape) -> tuple[int, int, int]:
    """Return a picture's numbers of patches in time, of rows, and in a row."""
    return 1, height // patch.side, width // patch.side


def patches_of(pixels: bytes, width: int, height: int, patch: PatchShape) -> NDArray[np.uint8]:
    """Return the patches of a prepared image, one in each row of the result."""
    side, merge = patch.side, patch.merge
    _, rows, columns = grid_of(width, height, patch)
    colours = np.frombuffer(pixels, np.uint8).reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
    ordered = colours.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]
    filmed = np.broadcast_to(ordered, (*ordered.shape[:5], patch.frames, side, side))
    return filmed.reshape(rows * columns, 3 * patch.frames * side * side)


def _convert(where: str, settings: Mapping[str, Any]) -> _ProcessorJson:
    try:
        return msgspec.convert({name: value for name, value in settings.items() if value is not None}, _ProcessorJson)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{where}: {wrong}") from None

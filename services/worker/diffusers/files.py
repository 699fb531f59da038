"""Writes pictures and videos as files in memory."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any, Literal

from shared.messages.frames import NOT_FINITE
from shared.messages.generate import FRAMES_PER_S

QUALITY = 90
"""The quality of JPEG and WebP, of 100."""
COMPRESS_LEVEL = 1
"""The level of PNG's compression: noise gets hardly smaller by more of it, which takes many times as long."""
PREVIEW_PIXELS = 256
"""The longer side of a preview."""


def finished_file(pixels: Any, form: Literal["png", "jpeg", "webp", "mp4"]) -> bytes | str:
    """Return a picture (height, width, 3; floats of 0 … 1) or a video (frames, …) as a file. A text says why there is
    none: the model's numbers are not finite, which would be black."""
    import numpy
    from PIL import Image

    if not numpy.isfinite(pixels).all():
        return f"{NOT_FINITE}: the pixels; worker.diffusers.dtype=float32 may help"
    if pixels.ndim == 4:
        return video_file(pixels)
    return picture_file(Image.fromarray((pixels * 255).round().astype(numpy.uint8)), form)


def picture_file(image: Any, form: Literal["png", "jpeg", "webp", "mp4"]) -> bytes:
    """Return an image of Pillow's as a file."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format=form.upper(), quality=QUALITY, compress_level=COMPRESS_LEVEL)
    return buffer.getvalue()


def video_file(frames: Any) -> bytes:
    """Return an array of frames (frames, height, width, 3; floats of 0 … 1) as an MP4 file."""
    import imageio
    import numpy

    pixels = (numpy.clip(frames, 0.0, 1.0) * 255).round().astype(numpy.uint8)
    with tempfile.TemporaryDirectory() as directory:  # ffmpeg writes an MP4's index last, so it cannot write to a pipe
        path = Path(directory, "video.mp4")
        with imageio.get_writer(path, fps=FRAMES_PER_S, macro_block_size=1, codec="libx264") as writer:
            for frame in pixels:
                writer.append_data(frame)
        return path.read_bytes()


def preview_file(image: Any) -> bytes:
    """Return an image of Pillow's as a small JPEG."""
    small = image.convert("RGB")
    small.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS))
    return picture_file(small, "jpeg")

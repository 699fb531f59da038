"""Tries in which ways a pipeline makes pictures: a small one of one step in each.

The picture of a way that works has the size that was asked for. Several images are taken if the second one changes the
picture, and computing it again does not: some pipelines ignore it.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable

from PIL import Image

from services.worker.diffusers.files import picture_file
from services.worker.diffusers.pipeline import Pipeline, PipelineRun
from services.worker.diffusers.ways import PipelineWay, WayName
from shared.errors import ModelError
from shared.messages.cards import PictureOutput
from shared.messages.generate import Picture

MOST_IMAGES = 16
"""Most images that a picture is made from, if it is made from several."""
LEAST_SIDE = 64
"""The least width and height of a picture that is made as a trial, in pixels."""
_NO_MEMORY = "OutOfMemoryError"
"""The name of torch's error."""
_COLOURS = ((200, 60, 40), (20, 90, 220))

_log = logging.getLogger(__name__)


def try_ways(pipeline: Pipeline, limit_s: float, begins: Callable[[], object]) -> None:
    """Find the ways of a pipeline that work; `begins` is called before each trial. Raise ModelError if no way works, or
    a trial takes longer than `limit_s` seconds, and MemoryError if the device lacks the memory for one, which it may
    have at the next start."""
    wrong = ""
    found: dict[WayName, list[bytes | str] | None] = {}
    for name, ways in pipeline.candidates.items():
        for way in ways:
            picture = trial_picture(name, pipeline.output)
            begins()
            made = _made(way, picture, limit_s)
            fault = made.failed or _size_fault(made, picture)
            if not fault:
                pipeline.ways[name], found[name] = way, made.files
                break
            if _NO_MEMORY in fault:
                raise MemoryError(f"a picture from {name} was tried: {fault}")
            wrong = fault
            _log.info("%s makes no pictures from %s: %s", type(way.pipe).__name__, name, fault)
    if not pipeline.ways:
        raise ModelError(f"the pipeline cannot compute a step: {wrong}")
    if "image" in pipeline.ways:
        again: list[list[bytes | str] | None] = []
        for images in (1, 2):
            begins()
            picture = trial_picture("image", pipeline.output, images)
            again.append(_made(pipeline.ways["image"], picture, limit_s).files)
        one, two = again
        pipeline.images = MOST_IMAGES if two is not None and found["image"] == one != two else 1


def trial_picture(name: WayName, output: PictureOutput, images: int = 1) -> Picture:
    """Return the smallest picture of one step that is made in a way, from this number of images."""
    side = output.multiple * max(1, LEAST_SIDE // output.multiple)
    files = [picture_file(Image.new("RGB", (side, side), colour), "png") for colour in _COLOURS[:images]]
    mask = picture_file(Image.new("L", (side, side), 255), "png")
    return Picture(
        "probe",
        side,
        side,
        1,
        0,
        frames=1 if output.frames else 0,
        format="mp4" if output.frames else "png",
        images=() if name == "text" else tuple(files),
        mask=mask if name == "mask" else b"",
        strength=None if name == "text" else 1.0,
    )


def _made(way: PipelineWay, picture: Picture, limit_s: float) -> PipelineRun:
    """Return a run of a picture that has ended. Raise ModelError if the time passes before."""
    run, until_s = PipelineRun(way, [picture], lambda: None), time.monotonic() + limit_s
    while not run.ended:
        if run.resting and not run.computed:
            run.advance()
        if time.monotonic() >= until_s:
            raise ModelError(f"the pipeline did not compute a step in {limit_s:g} s")
        time.sleep(0.01)
    return run


def _size_fault(run: PipelineRun, picture: Picture) -> str:
    """Return what is wrong with the size of a run's picture. Empty if nothing is, or there is no picture to see."""
    file = run.files[0] if run.files else ""
    if picture.frames or isinstance(file, str):
        return ""
    with Image.open(io.BytesIO(file)) as image:
        size = image.size
    return "" if size == (picture.width, picture.height) else f"it has {size[0]} by {size[1]} pixels, not those asked"

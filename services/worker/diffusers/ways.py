"""The ways in which a pipeline makes pictures: from a text alone, from images, or from an image and a mask.

A way is the pipeline itself if its call takes what the way needs, or else the pipeline of diffusers that does so with
the same parts: its AutoPipelines know which. Signatures do not say whether an image may be left out, or several may be
given; so the ways are tried (trial.py), and the first one that works is taken.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Sequence
from typing import Any, Literal

import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, AutoPipelineForText2Image
from PIL import Image

from shared.errors import ModelError
from shared.messages.cards import PictureEdit
from shared.messages.generate import Picture

WayName = Literal["text", "image", "mask"]
_NEEDS: dict[WayName, frozenset[str]] = {
    "text": frozenset(("prompt",)),
    "image": frozenset(("prompt", "image")),
    "mask": frozenset(("prompt", "image", "mask_image")),
}
"""What a call has at least, and the most that it may not leave out."""
_TWINS = {"text": AutoPipelineForText2Image, "image": AutoPipelineForImage2Image, "mask": AutoPipelineForInpainting}


class PipelineWay:
    """One way of a pipeline."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.call = inspect.signature(type(pipe).__call__).parameters

    @property
    def pauses(self) -> bool:
        """True if the pipeline calls back after each step. Otherwise a whole picture is one step."""
        return "callback_on_step_end" in self.call

    @property
    def is_video(self) -> bool:
        return "num_frames" in self.call

    @property
    def guidance(self) -> str:
        """The argument that says how closely a picture follows its prompt. Empty if there is none."""
        name = "guidance_scale" if self._is_distilled is not False else "true_cfg_scale"
        return name if name in self.call else ""

    @property
    def takes_negative(self) -> bool:
        """True if a text of what a picture must not show changes it. A scale of 1 has the pipeline ignore it."""
        is_ignored = self._is_distilled is not None and self.call["true_cfg_scale"].default <= 1.0
        return "negative_prompt" in self.call and not is_ignored

    @property
    def _is_distilled(self) -> bool | None:
        """True if the network itself takes a guidance, False if the pipeline guides it by a `true_cfg_scale` and a
        negative prompt, and ignores `guidance_scale`. None for pipelines that do not have both."""
        config = getattr(getattr(self.pipe, "transformer", None), "config", None)
        takes: bool | None = getattr(config, "guidance_embeds", None if "guidance_scale" in self.call else False)
        return takes if "true_cfg_scale" in self.call else None

    def copied(self) -> Any:
        """Return the pipeline with a scheduler of its own, because that counts the steps."""
        own = copy.copy(self.pipe)
        own.scheduler = copy.deepcopy(self.pipe.scheduler)
        return own

    def edit(self, images: int) -> PictureEdit:
        """Return what requests may ask for that have at most `images` images."""
        strength = self.call["strength"].default if "strength" in self.call else 0.0
        return PictureEdit(images, float(strength), bool(self.guidance), self.takes_negative)

    def arguments(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Return the arguments of the pipeline's call. The noise comes from a generator for each picture, on the CPU,
        so that it is the same on each device and in each batch."""
        first = pictures[0]
        found: dict[str, Any] = {
            "prompt": [picture.prompt for picture in pictures],
            "width": first.width,
            "height": first.height,
            "num_inference_steps": first.steps,
            "generator": [torch.Generator("cpu").manual_seed(picture.seed) for picture in pictures],
            "output_type": "np",
        }
        if first.frames:
            found["num_frames"] = first.frames
        if first.guidance is not None and self.guidance:
            found[self.guidance] = first.guidance
            if self.guidance == "true_cfg_scale":
                found["negative_prompt"] = [" "] * len(pictures)  # without one nothing is guided
        if first.negative:
            found["negative_prompt"] = [picture.negative for picture in pictures]
        if first.images:
            images = [_opened(image, "RGB") for image in first.images]
            found["image"] = images if len(images) > 1 else images[0]
            found["max_area"] = first.width * first.height  # some pipelines otherwise choose a size of their own
        if first.mask:
            found["mask_image"] = _opened(first.mask, "L")
        if first.strength is not None:
            found["strength"] = first.strength
        return {name: value for name, value in found.items() if name in self.call}


def way_of(picture: Picture) -> WayName:
    """Return the way in which a picture is made."""
    return "mask" if picture.mask else "image" if picture.images else "text"


def find_ways(pipe: Any) -> dict[WayName, list[PipelineWay]]:
    """Return the ways that a pipeline may have, for each the better one first. Raise ModelError if it has none."""
    own = PipelineWay(pipe)
    needed = {name for name, one in own.call.items() if one.default is inspect.Parameter.empty}
    needed -= {"self", "args", "kwargs"}
    found: dict[WayName, list[PipelineWay]] = {}
    for name, needs in _NEEDS.items():
        ways = [own] if needs <= own.call.keys() and needed <= needs else []
        if (twin := _twin(pipe, name)) is not None and not own.is_video:
            ways.append(twin)
        if ways:
            found[name] = ways
    if not found:
        raise ModelError(f"{type(pipe).__name__} makes pictures neither from a text nor from images")
    return found


def _twin(pipe: Any, name: WayName) -> PipelineWay | None:
    """Return the way of another pipeline with the same parts. None if there is none."""
    try:
        twin = _TWINS[name].from_pipe(pipe)
    except Exception:  # noqa: BLE001 - it is whatever the library raises about pipelines that it does not know
        return None
    twin.set_progress_bar_config(disable=True)
    return None if type(twin) is type(pipe) else PipelineWay(twin)


def _opened(file: bytes, mode: str) -> Image.Image:
    """Return an image of a request, which a frontend has written."""
    with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
        return image.convert(mode)

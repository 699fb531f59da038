"""A pipeline of diffusers, and runs of it that pause after each denoising step.

    engine's thread     advance ──▶            ──▶ advance ──▶           … ──▶ advance ──▶
    the run's thread            └ step 1, rests ┘            └ step 2, rests ┘          └ decodes, writes files, ends

A pipeline is one call that makes all of its steps. So each run has a thread, which stands still between two steps in
the pipeline's own callback. Runs share the weights; each has a scheduler of its own. ways.py has how pictures are made.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from services.worker.config import MODEL_INDEX, DiffusersConfig
from services.worker.diffusers.files import PREVIEW_PIXELS, finished_file, preview_file
from services.worker.diffusers.ways import PipelineWay, WayName, find_ways, way_of
from services.worker.engine.one_line import one_line
from shared.errors import ModelError
from shared.messages.cards import PictureOutput
from shared.messages.frames import BLOCKED
from shared.messages.generate import Picture

DEFAULT_PIXELS = 512
"""The width and height of a picture if neither the pipeline nor its model says one."""
DEFAULT_STEPS = 50
DEFAULT_FRAMES = 81

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """A run was stopped; it ends its thread."""


class Pipeline:
    """A loaded pipeline."""

    def __init__(self, pipe: Any, config: DiffusersConfig, device: str) -> None:
        self._pipe = pipe
        self._config = config
        self.device = device
        self.candidates = find_ways(pipe)
        """The ways in which it may make pictures."""
        self.ways: dict[WayName, PipelineWay] = {}
        """The ways that work, once they were tried."""
        self.images = 1
        """Most images that a picture without a mask is made from."""

    @property
    def pauses(self) -> bool:
        """True if each way calls back after each step. Otherwise a whole picture is one step."""
        return all(way.pauses for way in self.ways.values())

    @property
    def output(self) -> PictureOutput:
        """What it makes."""
        return _output(self._pipe, self.ways, self.images, self._config)

    def run(self, pictures: Sequence[Picture], wake: Callable[[], None]) -> PipelineRun:
        """Begin a run of compatible pictures, which stands still until `advance`; `wake` is called when it rests."""
        return PipelineRun(self.ways[way_of(pictures[0])], pictures, wake)

    def free_memory(self) -> None:
        """Give what a failed run had back to the device."""
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int, int, int] | None:
        """Return the device's memory in bytes: used, kept, of others, free. None on a CPU."""
        if self.device != "cuda":
            return None
        free, total = torch.cuda.mem_get_info()
        used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return used, reserved - used, max(0, total - free - reserved), free

    def gpus(self) -> tuple[str, ...]:
        """Return the UUID of the GPU. Empty on a CPU."""
        return (f"GPU-{torch.cuda.get_device_properties(0).uuid}",) if self.device == "cuda" else ()


class PipelineRun(threading.Thread):
    """One call of a pipeline, in a thread of its own."""

    def __init__(self, way: PipelineWay, pictures: Sequence[Picture], wake: Callable[[], None]):
        super().__init__(name="pictures", daemon=True)
        self._way = way
        self._pictures = pictures
        self._wake = wake
        self._may_go = threading.Semaphore(0)
        self._stopping = False
        self.resting = True
        """True if it stands still, or has ended. It is only set by the run's thread while the engine waits for it."""
        self.step = 0
        """How many steps have ended."""
        self.previews = [b""] * len(pictures)
        """A preview of each picture, of the step that has just ended. Empty if none is due."""
        self.files: list[bytes | str] | None = None
        """The files, once they are complete. A text in place of one says why there is none."""
        self.computed = False
        """True once the pipeline has ended, and the files are being written. `wake` is called again afterwards."""
        self.failed = ""
        """Why there are no files."""

    def advance(self) -> None:
        """Compute one step, or what comes after the last one. `wake` is called at its end."""
        assert self.resting
        self.resting = False
        if self.ident is None:
            self.start()
        self._may_go.release()

    def stop(self) -> None:
        """End the thread of a run that rests. Idempotent."""
        self._stopping = True
        self._may_go.release()

    @property
    def ended(self) -> bool:
        return self.files is not None or bool(self.failed)

    def run(self) -> None:
        self._may_go.acquire()
        try:
            if self._stopping:
                return
            arguments = self._way.arguments(self._pictures)
            if self._way.pauses:
                arguments["callback_on_step_end"] = self._on_step
            made = self._way.copied()(**arguments)
            del arguments
            self.computed = self.resting = True
            self._wake()
            self.files = self._write(made)
        except Stopped:
            return
        except Exception as wrong:  # noqa: BLE001 - whatever a pipeline raises ends its pictures, and not the engine
            self.failed = one_line(wrong)
        self.resting = True
        self._wake()

    def _on_step(self, pipe: Any, index: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        self.step = index + 1
        self.previews = [self._preview(pipe, tensors, number) for number in range(len(self._pictures))]
        self.resting = True
        self._wake()
        self._may_go.acquire()
        if self._stopping:
            raise Stopped
        return tensors

    def _preview(self, pipe: Any, tensors: dict[str, Any], number: int) -> bytes:
        """Return a preview of a picture if one is due. Empty if none can be made, as of a pipeline without a VAE: no
        picture fails for want of it."""
        picture, latents = self._pictures[number], tensors.get("latents")
        steps = getattr(pipe, "num_timesteps", picture.steps)  # fewer than asked for, if an image is changed a little
        if latents is None or latents.dim() != 4 or not is_preview_due(self.step, picture, steps):
            return b""
        try:
            return _small_picture(pipe, latents[number : number + 1])
        except Exception as wrong:  # noqa: BLE001 - whatever a pipeline that is not known here lacks
            _log.warning("no preview of %s: %s", type(pipe).__name__, one_line(wrong))
            return b""

    def _write(self, made: Any) -> list[bytes | str]:
        pixels = made.frames if self._pictures[0].frames else made.images
        blocked = getattr(made, "nsfw_content_detected", None) or [False] * len(self._pictures)
        return [
            BLOCKED if is_blocked else finished_file(one, picture.format)
            for one, picture, is_blocked in zip(pixels, self._pictures, blocked, strict=True)
        ]


def is_preview_due(step: int, picture: Picture, steps: int) -> bool:
    """Return whether a preview is sent after this one of `steps`: they are spread evenly, and none comes after the
    last."""
    count = min(picture.previews, steps - 1)
    return any(step == steps * number // (count + 1) for number in range(1, count + 1))


def _small_picture(pipe: Any, latents: Any) -> bytes:
    """Return the picture of latents as a small JPEG. They are made smaller before they are decoded, so that it costs a
    small part of a step."""
    pixels = getattr(pipe, "vae_scale_factor", 8) * max(latents.shape[-2:])
    with torch.no_grad():
        factor = min(1.0, PREVIEW_PIXELS / pixels)
        small = torch.nn.functional.interpolate(latents.float(), scale_factor=factor)
        scaled = small / pipe.vae.config.scaling_factor + (getattr(pipe.vae.config, "shift_factor", None) or 0.0)
        image = pipe.vae.decode(scaled.to(pipe.vae.dtype), return_dict=False)[0]
    return preview_file(pipe.image_processor.postprocess(image.float(), output_type="pil")[0])


def load(model: str, config: DiffusersConfig) -> Pipeline:
    """Load a pipeline from a directory, as `save_pretrained` writes it. No code of the model's is run, and no pickle is
    read. Raise ModelError."""
    if not Path(model, MODEL_INDEX).is_file():
        raise ModelError(f"{model} has no {MODEL_INDEX}: it is no pipeline of diffusers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    try:
        pipe = DiffusionPipeline.from_pretrained(
            model, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as wrong:
        raise ModelError(f"{model} cannot be loaded: {one_line(wrong)}") from wrong
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return Pipeline(pipe, config, device)


def _output(pipe: Any, ways: Mapping[WayName, PipelineWay], images: int, config: DiffusersConfig) -> PictureOutput:
    """Return what a pipeline makes in these ways, from at most `images` images."""
    call = inspect.signature(type(pipe).__call__).parameters
    texts = ways.get("text")
    is_video = "num_frames" in call
    scale = getattr(pipe, "vae_scale_factor", 0) or getattr(pipe, "vae_scale_factor_spatial", 0) or 8
    network = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    size = getattr(pipe, "default_sample_size", None) or getattr(getattr(network, "config", None), "sample_size", None)
    multiple = scale * (1 if getattr(pipe, "unet", None) is not None else 2)
    width, height = (_default(call, name) or _pixels(size, scale) for name in ("width", "height"))
    temporal = getattr(pipe, "vae_scale_factor_temporal", 1) if is_video else 1
    frames = min(config.most_frames, _default(call, "num_frames") or DEFAULT_FRAMES) if is_video else 0
    return PictureOutput(
        pipeline=type(pipe).__name__,
        width=max(multiple, width // multiple * multiple),
        height=max(multiple, height // multiple * multiple),
        multiple=multiple,
        most_pixels=config.most_pixels,
        steps=min(config.most_steps, _default(call, "num_inference_steps") or DEFAULT_STEPS),
        most_steps=config.most_steps,
        frames=max(1, (frames - 1) // temporal * temporal + 1) if is_video else 0,
        most_frames=config.most_frames if is_video else 0,
        frame_multiple=temporal,
        guidance=texts is not None and bool(texts.guidance),
        negative=texts is not None and texts.takes_negative,
        texts=texts is not None,
        edit=ways["image"].edit(images) if "image" in ways else None,
        masked_edit=ways["mask"].edit(1) if "mask" in ways else None,
    )


def _pixels(size: Any, scale: int) -> int:
    return int(size) * scale if isinstance(size, int) else DEFAULT_PIXELS


def _default(call: Any, name: str) -> int:
    """Return the default of an argument that is a positive number. 0 if it has none."""
    default = call[name].default if name in call else 0
    return default if isinstance(default, int) else 0

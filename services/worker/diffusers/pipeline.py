"""A pipeline of diffusers, and runs of it that pause after each denoising step.

    engine's thread     advance ──▶            ──▶ advance ──▶           … ──▶ advance ──▶
    the run's thread            └ step 1, rests ┘            └ step 2, rests ┘          └ decodes, writes files, ends

A pipeline is one call that makes all of its steps. So each run has a thread, which stands still between two steps in
the pipeline's own callback. Runs share the weights; each has a scheduler of its own, because that counts the steps.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from services.worker.config import MODEL_INDEX, DiffusersConfig
from services.worker.diffusers.files import PREVIEW_PIXELS, finished_file, preview_file
from services.worker.engine.one_line import one_line
from shared.errors import ModelError
from shared.messages.cards import PictureOutput
from shared.messages.frames import BLOCKED
from shared.messages.generate import Picture

DEFAULT_PIXELS = 512
"""The width and height of a picture if neither the pipeline nor its model says one."""
DEFAULT_STEPS = 50
DEFAULT_FRAMES = 81


class Stopped(Exception):
    """A run was stopped; it ends its thread."""


class Pipeline:
    """A loaded pipeline."""

    def __init__(self, pipe: Any, config: DiffusersConfig, device: str) -> None:
        self._pipe = pipe
        self.device = device
        call = inspect.signature(type(pipe).__call__).parameters
        self._takes = frozenset(call)
        self.output = _output(pipe, call, config)

    @property
    def pauses(self) -> bool:
        """True if the pipeline calls back after each step. Otherwise a whole picture is one step."""
        return "callback_on_step_end" in self._takes

    def run(self, pictures: Sequence[Picture], wake: Callable[[], None]) -> PipelineRun:
        """Begin a run of compatible pictures, which stands still until `advance`; `wake` is called when it rests."""
        own = copy.copy(self._pipe)
        own.scheduler = copy.deepcopy(self._pipe.scheduler)
        return PipelineRun(own, self._arguments(pictures), pictures, wake)

    def _arguments(self, pictures: Sequence[Picture]) -> dict[str, Any]:
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
        if first.guidance is not None and self.output.guidance:
            found["guidance_scale"] = first.guidance
        if first.negative:
            found["negative_prompt"] = [picture.negative for picture in pictures]
        return {name: value for name, value in found.items() if name in self._takes}

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

    def __init__(self, pipe: Any, arguments: dict[str, Any], pictures: Sequence[Picture], wake: Callable[[], None]):
        super().__init__(name="pictures", daemon=True)
        self._pipe = pipe
        self._arguments = arguments
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
            if "callback_on_step_end" in inspect.signature(type(self._pipe).__call__).parameters:
                self._arguments["callback_on_step_end"] = self._on_step
            made = self._pipe(**self._arguments)
            self.computed = self.resting = True
            self._wake()
            self.files = self._write(made)
        except Stopped:
            return
        except Exception as wrong:  # noqa: BLE001 - whatever a pipeline raises ends its pictures, and not the engine
            self.failed = one_line(wrong)
        self._arguments = {}
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
        """Return a preview of a picture if one is due. Its latents are made smaller before they are decoded, so that it
        costs a small part of a step. Empty for a pipeline whose latents are not a small picture."""
        picture, latents = self._pictures[number], tensors.get("latents")
        if not is_preview_due(self.step, picture) or latents is None or latents.dim() != 4:
            return b""
        shape = latents.shape[-2:]
        pixels = getattr(pipe, "vae_scale_factor", 8) * max(shape)
        factor = min(1.0, PREVIEW_PIXELS / pixels)
        with torch.no_grad():
            small = torch.nn.functional.interpolate(latents[number : number + 1].float(), scale_factor=factor)
            scaled = small.to(pipe.vae.dtype) / pipe.vae.config.scaling_factor
            image = pipe.vae.decode(scaled, return_dict=False)[0]
        return preview_file(pipe.image_processor.postprocess(image.float(), output_type="pil")[0])

    def _write(self, made: Any) -> list[bytes | str]:
        pixels = made.frames if self._pictures[0].frames else made.images
        blocked = getattr(made, "nsfw_content_detected", None) or [False] * len(self._pictures)
        return [
            BLOCKED if is_blocked else finished_file(one, picture.format)
            for one, picture, is_blocked in zip(pixels, self._pictures, blocked, strict=True)
        ]


def is_preview_due(step: int, picture: Picture) -> bool:
    """Return whether a preview is sent after this step: they are spread evenly, and none comes after the last."""
    count = min(picture.previews, picture.steps - 1)
    return any(step == picture.steps * number // (count + 1) for number in range(1, count + 1))


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


def _output(pipe: Any, call: Any, config: DiffusersConfig) -> PictureOutput:
    """Return what a pipeline makes. Raise ModelError if it does not make pictures from texts alone."""
    needed = [
        name
        for name, one in call.items()
        if one.default is inspect.Parameter.empty and name not in ("self", "prompt", "args", "kwargs")
    ]
    if "prompt" not in call or "image" in needed:
        raise ModelError(f"{type(pipe).__name__} does not make pictures from a text alone")
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
        guidance="guidance_scale" in call,
        negative="negative_prompt" in call,
    )


def _pixels(size: Any, scale: int) -> int:
    return int(size) * scale if isinstance(size, int) else DEFAULT_PIXELS


def _default(call: Any, name: str) -> int:
    """Return the default of an argument that is a positive number. 0 if it has none."""
    default = call[name].default if name in call else 0
    return default if isinstance(default, int) else 0

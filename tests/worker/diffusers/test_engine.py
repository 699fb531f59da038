"""A diffusers engine in its process: what it makes, of one seed, in batches, and what ends it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from PIL import Image

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import (
    CancelAttempt,
    Failed,
    Loading,
    Probed,
    ProbeDevice,
    Ready,
    Stepped,
    Submit,
)
from services.worker.engine.process import EngineProcess
from shared.messages.cards import PictureEdit
from shared.messages.frames import BLOCKED, NOT_FINITE, Part
from shared.messages.generate import Picture, Sampling
from tests.worker.diffusers.environment import (
    BROKEN_VAE,
    EDITS,
    FLUX,
    IMAGES,
    LIMIT_S,
    PLACE,
    PYTHON,
    STRICT_CHECKER,
    needs_diffusers,
    run_there,
    write_image_pipeline,
    write_video_pipeline,
)

pytestmark = [needs_diffusers, pytest.mark.timeout(1800)]
PICTURE = Picture("a mill at the river", 64, 64, 6, 7)
ALONE = f"""{PLACE}
import sys
from diffusers import DiffusionPipeline
torch.set_num_threads(1)
pipe = DiffusionPipeline.from_pretrained(sys.argv[1]).to(*place)
generator = [torch.Generator("cpu").manual_seed(7)]
made = pipe(prompt=["a mill at the river"], width=64, height=64, num_inference_steps=6, generator=generator)
made.images[0].save(sys.argv[2])
"""


EDITED = f"""{PLACE}
import sys, diffusers
from PIL import Image
torch.set_num_threads(1)
pipe = getattr(diffusers, "AutoPipelineFor" + sys.argv[2]).from_pretrained(sys.argv[1]).to(*place)
masked = sys.argv[2] == "Inpainting"
more = dict(mask_image=Image.open(sys.argv[3] + "/half.in.png"), width=64, height=64) if masked else {{}}
made = pipe(prompt=["a mill at the river"], image=Image.open(sys.argv[3] + "/grey.in.png"), num_inference_steps=6,
    generator=[torch.Generator("cpu").manual_seed(7)], strength=1.0 if masked else 0.5, **more)
made.images[0].save(sys.argv[4])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_pipeline(tmp_path_factory.mktemp("pictures") / "tiny")


class Engine:
    """An engine that serves."""

    def __init__(self, process: EngineProcess, facts: Ready) -> None:
        self.process = process
        self.facts = facts
        self.parts: dict[str, list[Part]] = {}
        self.picture_steps = 0
        """The steps of single pictures so far."""
        self._count = 0

    def submit(self, picture: Picture, **more: Any) -> str:
        self._count += 1
        fields: dict[str, Any] = {"time_left_s": LIMIT_S, "number": self._count, "picture": picture} | more
        name, tokens = f"r{self._count}", b"\0\0\0\0" * picture.steps
        assert self.process.submit(Submit(name, 1, "f1", tokens, picture.steps, Sampling(1), **fields))
        return name

    async def read(self) -> object:
        report = await self.process.receive()
        if isinstance(report, Stepped):
            self.picture_steps = report.load.picture_steps
            for part in (part for each in report.parts.values() for part in each):
                self.parts.setdefault(part.request, []).append(part)
        return report

    async def end_of(self, name: str) -> Part:
        async with asyncio.timeout(LIMIT_S):
            while not (self.parts.get(name) and self.parts[name][-1].finish is not None):
                report = await self.read()
                assert not isinstance(report, Failed), report
        return self.parts[name][-1]

    async def file_of(self, name: str) -> bytes:
        last = await self.end_of(name)
        assert last.finish == "stop", last.error
        return b"".join(part.picture.content for part in self.parts[name] if part.picture is not None)


def config_of(model: Path, settings: Mapping[str, object] | None = None) -> WorkerConfig:
    table: dict[str, object] = {"model": str(model), "engine": "diffusers", "threads": 1, "max_running": 4}
    table |= {"stall_s": LIMIT_S} | dict(settings or {})
    table["diffusers"] = {"python": str(PYTHON), "most_together": 1, **table.get("diffusers", {})}  # type: ignore[dict-item]
    return msgspec.convert(table, WorkerConfig)


@asynccontextmanager
async def engine(model: Path, **settings: object) -> AsyncIterator[Engine]:
    process = await EngineProcess.start(config_of(model, settings), "tiny", "worker")
    try:
        async with asyncio.timeout(LIMIT_S):
            while isinstance(report := await process.receive(), Loading):
                pass
        assert isinstance(report, Ready), report
        yield Engine(process, report)
    finally:
        await process.end(5.0)


async def test_a_picture_is_that_of_the_pipeline_alone_and_of_its_seed(model: Path, tmp_path: Path) -> None:
    async with engine(model) as one:
        assert one.facts.pictures is not None
        assert (one.facts.pictures.width, one.facts.pictures.height, one.facts.pictures.frames) == (64, 64, 0)
        assert one.facts.pictures.pipeline == "StableDiffusionPipeline"
        names = [one.submit(each) for each in (PICTURE, PICTURE, replace(PICTURE, seed=8))]
        first, again, other = [await one.file_of(name) for name in names]
        assert first == again != other
        steps = [part.picture.step for part in one.parts[names[0]] if part.picture is not None]
        assert steps[:6] == [1, 2, 3, 4, 5, 6]
    run_there(ALONE, str(model), str(tmp_path / "alone.png"))
    alone = Image.open(tmp_path / "alone.png")
    assert Image.open(io.BytesIO(first)).tobytes() == alone.tobytes()


async def test_pictures_from_images_are_those_of_the_pipelines_alone(model: Path, tmp_path: Path) -> None:
    """The pipeline of texts makes them, with the parts that it has."""
    grey, dark, half = (image_of(tmp_path, name) for name in ("grey", "dark", "half"))
    async with engine(model, diffusers={"most_together": 3}) as one:
        output = one.facts.pictures
        assert output is not None
        assert output.texts
        assert output.edit == PictureEdit(1, 0.8)
        assert output.masked_edit == PictureEdit(1, 1.0)
        from_grey = replace(PICTURE, images=(grey,), strength=0.5, previews=2)
        asked = (
            *(from_grey, from_grey, replace(from_grey, images=(dark,)), replace(from_grey, strength=1.0)),
            replace(from_grey, mask=half, strength=1.0),
        )
        names = [one.submit(each) for each in asked]
        first, again, other, stronger, masked = [await one.file_of(name) for name in names]
        assert first == again
        assert len({first, other, stronger, masked}) == 4
        pieces = [part.picture for part in one.parts[names[0]] if part.picture is not None]
        assert [piece.step for piece in pieces if piece.preview] == [1, 2], "three of six steps are computed"
        assert await one.file_of(one.submit(PICTURE)) not in (first, stronger)
    for name, kind, file in (("image", "Image2Image", first), ("mask", "Inpainting", masked)):
        run_there(EDITED, str(model), kind, str(tmp_path), str(tmp_path / f"{name}.png"))
        assert Image.open(io.BytesIO(file)).tobytes() == Image.open(tmp_path / f"{name}.png").tobytes()


async def test_a_pipeline_that_edits_makes_no_pictures_from_texts(tmp_path: Path) -> None:
    """InstructPix2Pix: its signature lets the image be left out, and it cannot be. Its network has channels for it, so
    no other pipeline takes its parts."""
    async with engine(write_image_pipeline(tmp_path / "tiny", EDITS)) as one:
        output = one.facts.pictures
        assert output is not None
        assert (output.pipeline, output.texts) == ("StableDiffusionInstructPix2PixPipeline", False)
        assert (output.edit, output.masked_edit) == (PictureEdit(1, 0.0), None)
        edit = replace(PICTURE, images=(image_of(tmp_path, "grey"),))
        first, other = [await one.file_of(one.submit(each)) for each in (edit, replace(edit, seed=8))]
        assert first != other
        one.process.send(ProbeDevice((1,)))
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(report := await one.read(), Probed):
                pass
        assert report.failed == ""


async def test_an_image_that_cannot_be_read_ends_its_picture_alone(model: Path, tmp_path: Path) -> None:
    async with engine(model) as one:
        broken = replace(PICTURE, images=(image_of(tmp_path, "grey")[:60],), strength=0.5)
        failed, fine = one.submit(broken), one.submit(PICTURE)
        assert (await one.end_of(failed)).finish == "error"
        await one.file_of(fine)


def image_of(folder: Path, name: str) -> bytes:
    """A PNG file of 64 by 64 pixels, which is also written into the folder."""
    image = Image.new("RGB", (64, 64), {"grey": (130, 130, 120), "dark": (10, 20, 30), "half": (0, 0, 0)}[name])
    if name == "half":
        image.paste((255, 255, 255), (32, 0, 64, 64))
    image.save(folder / f"{name}.in.png")
    return (folder / f"{name}.in.png").read_bytes()


async def test_a_batch_makes_each_picture_from_its_own_seed(model: Path) -> None:
    """Arithmetic may round in another way in a batch: at most the last bit of a pixel differs."""
    async with engine(model, diffusers={"most_together": 3}) as one:
        alone = await one.file_of(one.submit(PICTURE))
        names = [one.submit(replace(PICTURE, seed=seed, prompt=f"{PICTURE.prompt}")) for seed in (6, 7, 8)]
        files = [await one.file_of(name) for name in names]
        pixels = [list(Image.open(io.BytesIO(file)).tobytes()) for file in (alone, files[1], files[2])]
        assert max(abs(one - other) for one, other in zip(pixels[0], pixels[1], strict=True)) <= 1
        assert pixels[0] != pixels[2]


async def test_previews_formats_and_the_end_of_those_that_are_not_wanted(model: Path) -> None:
    async with engine(model) as one:
        long = one.submit(replace(PICTURE, steps=200))
        late = one.submit(replace(PICTURE, steps=200), time_left_s=1.0)
        shown = one.submit(replace(PICTURE, previews=2, format="webp"))
        assert Image.open(io.BytesIO(await one.file_of(shown))).format == "WEBP"
        pieces = [part.picture for part in one.parts[shown] if part.picture is not None]
        previews = [(piece.step, piece.preview) for piece in pieces if piece.preview]
        assert [step for step, _ in previews] == [2, 4]
        assert all(Image.open(io.BytesIO(preview)).size == (64, 64) for _, preview in previews)
        one.process.send(CancelAttempt(long, 1))
        assert (await one.end_of(long)).finish == "cancelled"
        assert (await one.end_of(late)).finish == "deadline"
        await one.file_of(one.submit(PICTURE))


WITHOUT_VAE = """
import time, types, numpy, torch
from services.worker.diffusers.pipeline import PipelineRun
from services.worker.diffusers.ways import PipelineWay
from shared.messages.generate import Picture
class PixelPipeline:
    scheduler = None
    def __call__(self, prompt, callback_on_step_end):
        for step in range(4):
            callback_on_step_end(self, step, 0, {"latents": torch.zeros(1, 3, 8, 8)})
        return types.SimpleNamespace(images=numpy.zeros((1, 8, 8, 3)))
run = PipelineRun(PipelineWay(PixelPipeline()), [Picture("a mill", 8, 8, 4, 0, previews=3)], lambda: None)
while not run.ended:
    if run.resting and not run.computed:
        assert run.previews == [b""]
        run.advance()
    time.sleep(0.01)
print(run.failed or run.files[0][:4])
"""


def test_a_picture_of_a_pipeline_without_a_vae_has_no_previews_and_does_not_fail() -> None:
    assert run_there(WITHOUT_VAE).strip().endswith("b'\\x89PNG'")


TRIED = """
import sys, time, torch
from services.worker.config import DiffusersConfig
from services.worker.diffusers.pipeline import load
from services.worker.diffusers.trial import try_ways
begun, monotonic = [], time.monotonic
time.monotonic = lambda: monotonic() + 400.0 * len(begun)
def no_memory():
    raise torch.OutOfMemoryError("no memory")
pipeline = load(sys.argv[1], DiffusersConfig())
unet, call = pipeline._pipe.unet, CALL
computed = unet.forward
unet.forward = lambda *arguments, **named: (computed(*arguments, **named)[0] + call(),)
try:
    try_ways(pipeline, 600.0, lambda: begun.append(1))
    print(sorted(pipeline.ways), pipeline.images, len(begun))
except MemoryError as wrong:
    print(wrong)
"""


def test_a_start_without_the_memory_for_a_way_is_tried_again_and_noise_is_no_second_image(model: Path) -> None:
    noise = run_there(TRIED.replace("CALL", "lambda: torch.rand(())"), str(model))
    assert noise.strip() == "['image', 'mask', 'text'] 1 5", "five trials, each of which has ten minutes"
    assert "a picture from text was tried: OutOfMemoryError" in run_there(
        TRIED.replace("CALL", "no_memory"), str(model)
    )


GUIDED = """
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from msgspec.structs import replace
from services.worker.diffusers.ways import PipelineWay
from shared.messages.generate import Picture
plain = Picture("a mill", 64, 64, 2, 7)
for takes in (True, False):
    pipe.transformer = network(takes)
    way = PipelineWay(pipe)
    one, other = (way.copied()(**way.arguments([each])).images for each in (plain, replace(plain, guidance=9.0)))
    print(way.guidance, way.takes_negative, bool((one != other).any()))
none = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer"))
qwen = PipelineWay(QwenImagePipeline(**none, transformer=QwenImageTransformer2DModel(
    num_layers=1, attention_head_dim=16, num_attention_heads=1, joint_attention_dim=16, axes_dims_rope=(8, 4, 4))))
given = qwen.arguments([replace(plain, guidance=2.5), replace(plain, guidance=2.5)])
print(qwen.edit(1), given["true_cfg_scale"], given["negative_prompt"], "guidance_scale" in given)
print(qwen.arguments([replace(plain, negative="rain")])["negative_prompt"])
"""


def test_a_guidance_changes_the_picture_and_a_negative_prompt_that_would_not_is_not_taken(tmp_path: Path) -> None:
    """Flux's pipeline has a `guidance_scale` that only a distilled network takes, and ignores negative prompts;
    Qwen-Image's ignores `guidance_scale`."""
    assert run_there(IMAGES.replace("CHANGE", FLUX) + GUIDED, str(tmp_path / "tiny")).splitlines() == [
        "guidance_scale False True",
        "true_cfg_scale False True",
        "PictureEdit(images=1, strength=0.0, guidance=True, negative=True) 2.5 [' ', ' '] False",
        "['rain']",
    ]


async def test_a_group_that_waits_for_its_turn_computes_nothing_once_it_is_not_wanted(model: Path) -> None:
    async with engine(model) as one:
        names = [one.submit(replace(PICTURE, steps=steps)) for steps in (199, 200)]
        async with asyncio.timeout(LIMIT_S):
            while not all(name in one.parts for name in names):
                await one.read()
        for name in names:
            one.process.send(CancelAttempt(name, 1))
        for name in names:
            assert (await one.end_of(name)).finish == "cancelled"
        before = one.picture_steps
        await one.file_of(one.submit(PICTURE))
        assert one.picture_steps - before - PICTURE.steps <= 1, "only the step that was being computed"


async def test_an_idle_engine_computes_a_step_when_it_is_probed(model: Path) -> None:
    async with engine(model) as one:
        one.process.send(ProbeDevice((1,)))
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(report := await one.read(), Probed):
                pass
        assert report.failed == ""


async def test_a_picture_that_cannot_be_computed_ends_alone(model: Path) -> None:
    """A width that the worker's validation would refuse: the pipeline raises."""
    async with engine(model) as one:
        failed, fine = one.submit(replace(PICTURE, width=65)), one.submit(PICTURE)
        last = await one.end_of(failed)
        assert (last.finish, last.error[:10]) == ("error", "ValueError")
        await one.file_of(fine)


async def test_a_picture_of_numbers_that_are_not_finite_is_an_error_and_not_black(tmp_path: Path) -> None:
    async with engine(write_image_pipeline(tmp_path / "tiny", BROKEN_VAE)) as one:
        last = await one.end_of(one.submit(PICTURE))
        said = f"{NOT_FINITE}: the pixels; worker.diffusers.dtype=float32 may help"
        assert (last.finish, last.error) == ("error", said)


async def test_a_picture_that_the_safety_checker_blocks_is_an_error_and_not_black(tmp_path: Path) -> None:
    async with engine(write_image_pipeline(tmp_path / "tiny", STRICT_CHECKER)) as one:
        last = await one.end_of(one.submit(PICTURE))
        assert (last.finish, last.error) == ("error", BLOCKED)


async def test_a_step_that_takes_too_long_ends_the_engine(model: Path) -> None:
    async with engine(model, stall_s=0.001) as one:
        one.submit(replace(PICTURE, width=512, height=512))
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(report := await one.read(), Failed):
                pass
        assert report.reason == "a step took longer than worker.stall_s, 0.001 s"
        assert not report.model


async def test_an_engine_says_that_it_lives_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder stands still until it is let go on."""
    encoder, goes_on = tmp_path / "ffmpeg", tmp_path / "go"
    real = run_there("import imageio_ffmpeg; print(imageio_ffmpeg.get_ffmpeg_exe())").strip()
    wait = f'case "$*" in *libx264*) while [ ! -e {goes_on} ]; do sleep 0.1; done;; esac'
    encoder.write_text(f'#!/bin/sh\n{wait}\nexec {real} "$@"\n')
    encoder.chmod(0o700)
    model = write_video_pipeline(tmp_path / "video")
    goes_on.touch()  # for the engine's own first steps
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
    async with engine(model) as one:
        goes_on.unlink()
        name = one.submit(Picture("a mill", 64, 64, 2, 7, frames=33, format="mp4"))
        seen: set[int] = set()
        async with asyncio.timeout(LIMIT_S):
            while not any(part.picture and part.picture.step for part in one.parts.get(name, ())) or len(seen) < 8:
                if isinstance(report := await one.read(), Stepped):
                    seen.add(report.progress)
        goes_on.touch()
        await one.file_of(name)


async def test_a_directory_that_is_no_pipeline_is_fatal(tmp_path: Path, model: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoSuchPipeline"}')
    for directory, reason in ((tmp_path, "cannot be loaded"), (model / "unet", "no model_index.json")):
        process = await EngineProcess.start(config_of(directory), "tiny", "worker")
        try:
            async with asyncio.timeout(LIMIT_S):
                while isinstance(report := await process.receive(), Loading):
                    pass
            assert isinstance(report, Failed)
            assert report.model
            assert reason in report.reason
        finally:
            await process.end(0.0)


async def test_a_video_is_an_mp4_of_its_seed(tmp_path: Path) -> None:
    async with engine(write_video_pipeline(tmp_path / "video")) as one:
        assert one.facts.pictures is not None
        assert (one.facts.pictures.pipeline, one.facts.pictures.frame_multiple) == ("WanPipeline", 4)
        assert one.facts.pictures.frames % 4 == 1
        video = Picture("a mill", 32, 32, 4, 7, frames=9, format="mp4")
        names = [one.submit(each) for each in (video, video, replace(video, seed=8))]
        first, again, other = [await one.file_of(name) for name in names]
        assert first == again != other
        assert first[4:8] == b"ftyp"


async def test_a_video_begins_with_an_image(tmp_path: Path) -> None:
    async with engine(write_video_pipeline(tmp_path / "video", from_images=True)) as one:
        output = one.facts.pictures
        assert output is not None
        assert (output.pipeline, output.texts, output.edit) == ("WanImageToVideoPipeline", False, PictureEdit(1))
        video = Picture("a mill", 64, 64, 2, 7, frames=9, format="mp4", images=(image_of(tmp_path, "grey"),))
        asked = video, video, replace(video, images=(image_of(tmp_path, "dark"),))
        first, again, other = [await one.file_of(one.submit(each)) for each in asked]
        assert first == again != other
        assert first[4:8] == b"ftyp"

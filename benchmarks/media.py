"""How many pictures a second does Headrace make, of those that the pipeline alone makes?

Pictures of one size and number of steps are made in turn by the pipeline alone and through Headrace, ROUNDS times each
in one run, both loaded all the time:

    alone       a process with diffusers' Python calls the pipeline with batches, as its own documents do, and writes
                each picture as PNG when it has it
    headrace    an `up` with one worker; as many clients as two batches ask for a picture each, again and again, at
                /v1/images/generations

The goal is the median of the ratios of neighbours. Weights are random: what is drawn costs the same. Without --model a
pipeline is made: of Stable Diffusion's shape, tiny, or with --shape sdxl as large as SDXL. `./headrace
install-diffusers` comes first.

What could mislead: on a CPU each picture is a batch by itself, and the yardstick has as many threads as the worker. A
tiny picture takes milliseconds, of which a request over HTTP and NATS is a part that a large one does not see. The
yardstick writes its files while nothing is computed; Headrace writes them meanwhile.

    python -m benchmarks.media [--shape tiny|sdxl] [--model DIRECTORY] [--steps N] [--size WxH] [--batch N]
                               [--rounds N] [--quick] [--json]

SDXL's shape is 7 GB: TMPDIR says where. Its pictures of 30 steps need a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.report import Goal, print_report
from deploy.local import install_diffusers
from deploy.local.size.started_up import running_up
from deploy.local.terminal import Terminal
from shared.errors import Unavailable
from shared.processors import usable_processors
from tests.worker.diffusers.environment import write_image_pipeline

ROUNDS, QUICK_ROUNDS = 5, 2
SECONDS, QUICK_SECONDS = 20.0, 4.0
"""Seconds that each turn takes at least."""
GOAL = 0.97
SHAPES = {"tiny": ("64x64", 20), "sdxl": ("1024x1024", 30)}
"""Shape → size and steps."""
LIMIT_S = 1800.0
Row = dict[str, Any]

SDXL = """
import sys, torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
torch.manual_seed(0)
words = CLIPTokenizer.from_pretrained(sys.argv[2])
scheduler = EulerDiscreteScheduler(beta_schedule="scaled_linear")
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": 49408}
StableDiffusionXLPipeline(
    vae=AutoencoderKL(
        block_out_channels=[128, 256, 512, 512], layers_per_block=2, latent_channels=4, sample_size=1024,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        scaling_factor=0.13025, force_upcast=False,
    ),
    unet=UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
    ),
    text_encoder=CLIPTextModel(CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12, **ends,
    )),
    text_encoder_2=CLIPTextModelWithProjection(CLIPTextConfig(
        hidden_size=1280, intermediate_size=5120, num_attention_heads=20, num_hidden_layers=32, projection_dim=1280,
        **ends,
    )),
    tokenizer=words, tokenizer_2=words, scheduler=scheduler,
).save_pretrained(sys.argv[1])
"""

ALONE = """
import io, json, sys, time, torch
from diffusers import DiffusionPipeline
path, width, height, steps, batch, threads = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
pipe = DiffusionPipeline.from_pretrained(path, dtype=dtype, use_safetensors=True).to(device)
pipe.set_progress_bar_config(disable=True)
seed = 0
def make():
    global seed
    generators = [torch.Generator("cpu").manual_seed(seed + index) for index in range(batch)]
    seed += batch
    made = pipe(["a mill"] * batch, width=width, height=height, num_inference_steps=steps, generator=generators)
    for image in made.images:
        image.save(io.BytesIO(), "PNG", compress_level=1)
make()
print("ready", torch.cuda.get_device_name() if on_gpu else device, flush=True)
for line in sys.stdin:
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < float(line):
        make()
        count += batch
    print(json.dumps([count, time.perf_counter() - began]), flush=True)
"""


@contextmanager
def alone(python: Path, words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the device of a pipeline alone, and what makes pictures there for some seconds."""
    process = subprocess.Popen([str(python), "-c", ALONE, *words], stdin=-1, stdout=-1, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    try:
        word, _, device = stdout.readline().strip().partition(" ")
        if word != "ready":
            raise SystemExit("the pipeline alone did not start")

        def rate(seconds: float) -> float:
            stdin.write(f"{seconds}\n")
            stdin.flush()
            made, took_s = json.loads(stdout.readline())
            return float(made / took_s)

        yield device, rate
    finally:
        stdin.close()
        process.wait(60)
        stdout.close()


def headrace_rate(url: str, body: Row, batch: int, seconds: float) -> float:
    """Return the pictures a second that clients get, over whole batches: those of one come at the same moment. The
    first and the last pictures of each client do not count: they are not under full load. Raise Unavailable if one
    fails."""
    numbers, stop, ends, clients = count(), threading.Event(), list[float](), 2 * batch

    def client() -> None:
        while not stop.is_set():
            ask_picture(url, {**body, "seed": next(numbers)})
            ends.append(time.perf_counter())

    def end_of(number: int) -> float:
        """Wait until this many pictures have come; return when the last of them did."""
        while len(ends) < number:
            for each in running:
                if each.done():
                    each.result()
            time.sleep(0.001)
        return sorted(ends)[number - 1]

    with ThreadPoolExecutor(clients) as threads:
        running = [threads.submit(client) for _ in range(clients)]
        try:
            began_s = end_of(clients)
            time.sleep(seconds)
            made = ((len(ends) - clients) // batch + 1) * batch
            took_s = end_of(clients + made) - began_s
        finally:
            stop.set()
    return made / took_s


def ask_picture(url: str, body: Row) -> None:
    """Ask for a picture and read it. Raise Unavailable if there is none."""
    request = urllib.request.Request(
        f"{url}/images/generations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as wrong:
        raise Unavailable(f"status {wrong.code}: {wrong.read().decode(errors='replace')}") from None


def write_model(python: Path, shape: str, target: Path) -> Path:
    """Write a pipeline with random weights."""
    tiny = write_image_pipeline(target / "tiny")
    if shape == "tiny":
        return tiny
    subprocess.run([str(python), "-c", SDXL, str(target / shape), str(tiny / "tokenizer")], check=True)
    return target / shape


def measure(flags: argparse.Namespace, python: Path, model: Path, terminal: Terminal) -> list[Row]:
    """Return the pictures a second of both in each round."""
    size, steps = flags.size or SHAPES[flags.shape][0], flags.steps or SHAPES[flags.shape][1]
    on_gpu = install_diffusers.device_of() == "cuda"
    batch, threads = (flags.batch if on_gpu else 1), usable_processors()
    words = [str(model), *size.split("x"), str(steps), str(batch), str(threads)]
    up = ("--engine", "diffusers", "--model", str(model), "--workers", "1", "--frontends", "1", "--routers", "1")
    settings = f"worker.max_running={batch}", f"worker.threads={threads}"
    more = *("--set", settings[0], "--set", settings[1]), *("--discovery", "file")  # with a GPU there may be no etcd
    body = {"prompt": "a mill", "size": size, "steps": steps}
    seconds = QUICK_SECONDS if flags.quick else SECONDS
    rows: list[Row] = []
    with alone(python, words) as (device, rate), running_up((*up, *more), terminal, "pictures") as (url, _):
        for number in range(flags.rounds or (QUICK_ROUNDS if flags.quick else ROUNDS)):
            row: Row = {"round": number, "device": device, "size": size, "steps": steps, "batch": batch}
            rows.append({**row, "alone": rate(seconds), "headrace": headrace_rate(url, body, batch, seconds)})
            terminal.notice(f"round {number}: {rows[-1]['alone']:.3f} alone, {rows[-1]['headrace']:.3f} a second")
    return rows


def goals_of(rows: list[Row]) -> list[Goal]:
    """Return the goal. *Pure.*"""
    ratio = statistics.median(row["headrace"] / row["alone"] for row in rows)
    return [Goal("pictures_ratio", ratio, "of the pipeline alone", GOAL, ratio >= GOAL)]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    flags, terminal = parser.parse_args(), Terminal()
    python = install_diffusers.require()
    with tempfile.TemporaryDirectory(prefix="media-") as folder:
        model = flags.model or write_model(python, flags.shape, Path(folder))
        rows = measure(flags, python, model, terminal)
    goals = goals_of(rows)
    print_report("media", goals, rows, as_json=flags.json)


if __name__ == "__main__":
    main()

"""What does the encoder cache spare, and what does an image cost a frontend?

CONVERSATIONS chats of TURNS turns run at the same time over the OpenAI API of a real `up`: two native workers on the
CPU with a LLaVA of random weights, whose tower is CLIP's ViT-B/16 in float32. Each turn shows a picture, of which 4 of
5 were shown before, in any chat.

    encoded         images that workers encoded, all turns together; each new picture once is the goal
    first token     p50 over all turns, with the encoder cache and its embeddings in kvbm, of that without both
    after a kill    images that are encoded again once all engines were killed: for the next turn of each chat, and
                    for new chats about the same pictures, whose KV blocks are nowhere
    frontend        CPU of a frontend and its decoders for a request with a new JPEG of 2 MB, of Pillow's decode to RGB
                    plus the file's SHA-256 in one process, in turns
    shown again     the same for a JPEG that a former request had

What could mislead: the decoder is small (5 M parameters, the tower 86 M), so that encoding is most of a first token. In
LLaVA 1.5 7B an image costs as much as 28 tokens and stands for 576, so that the cache spares little. An answer is one
token, whose time is that of the whole answer, with the queue before it. Without the cache a worker still keeps the
newest image. A frontend reads base64, resizes, and sends the pixels on, which the yardstick does not; for
`frontend_resized_ratio` Pillow resizes too. A new JPEG is one file with other bytes after its end: its worker encodes
it, whose CPU does not count.

    python -m benchmarks.images [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from benchmarks.process_costs import cpu_of
from benchmarks.report import Goal, print_report
from deploy.local.size.started_up import command, running_up
from deploy.local.terminal import Terminal
from shared.errors import Unavailable
from tests.process_tree import below, children
from tests.tiny_model import CLIP, write_tiny_model

CONVERSATIONS, TURNS, QUICK_TURNS = 8, 8, 3
QUICK_LAYERS = 4
NEW_EACH = 5
"""One of five pictures is new."""
SIDE = 224
TOWER = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"image_size": SIDE, "patch_size": 16},
}
DECODER: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "intermediate": 1024,
    "context_length": 4096,
}
FLEET = ("--engine", "native", "--workers", "2", "--frontends", "1", "--routers", "1")
PATIENT = ("--set", "frontend.limits.frozen_s=120")
"""An image is one step, and a step is progress at its end alone: a busy machine may take longer than the default."""
WITHOUT = ("--kvbm-bytes", "0", "--set", "worker.encoder_cache_bytes=0")
WITH = ("--kvbm-bytes", "1GiB", "--set", "worker.kvbm.embeddings=true", "--set", "kvbm.pool.arenas=2")
JPEG_BYTES, JPEG_REQUESTS = 2_000_000, 20
FIRST_GOAL, FRONTEND_GOAL, AGAIN_GOAL = 0.5, 1.3, 0.5
WARM_UP = 1000
"""The number of the first picture of the warm-up, which opens embeddings' layout in kvbm and starts the decoders."""
KILL_LIMIT_S, ANSWER_LIMIT_S = 60.0, 120.0
Message = dict[str, Any]
Row = dict[str, Any]


def pictures_shown(turns: int) -> list[list[int]]:
    """Return the number of the picture of each turn of each chat. One of NEW_EACH is new, the others were in an earlier
    turn or come with its new ones."""
    draw = Random(3)
    numbers: list[int] = []
    for place in range(turns * CONVERSATIONS):
        known = place // NEW_EACH
        numbers.append(draw.randrange(known + 1) if place % NEW_EACH else known)
    return [numbers[chat::CONVERSATIONS] for chat in range(CONVERSATIONS)]


def picture(number: int) -> str:
    """Return a picture as a data URI."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    return _uri(Image.fromarray(pixels), "png")


def photo() -> bytes:
    """Return a JPEG of about JPEG_BYTES, with the detail of a photo."""
    draw = np.random.default_rng(1)
    coarse = Image.fromarray(draw.integers(0, 256, (60, 90, 3), np.uint8)).resize((3000, 2000))
    pixels = np.clip(np.asarray(coarse, np.int16) + draw.normal(0, 9, (2000, 3000, 1)), 0, 255).astype(np.uint8)
    sizes: dict[int, bytes] = {}
    for quality in range(60, 96, 5):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        sizes[quality] = file.getvalue()
    return min(sizes.values(), key=lambda each: abs(len(each) - JPEG_BYTES))


def _uri(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _question(url: str, text: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": url}]}


class Fleet:
    """An `up` that runs, as its clients and its operator see it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, state: Path) -> None:
        self._http = http
        self._url = url.removesuffix("/v1")
        self._state = state

    async def ask(self, messages: Sequence[Message], *, max_tokens: int = 1) -> float:
        """Return the seconds until an answer is complete."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        began_s = time.perf_counter()
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise Unavailable(f"status {response.status}: {text}")
        return time.perf_counter() - began_s

    async def images(self) -> dict[str, int]:
        """Return how many images workers found in their caches, took from kvbm and encoded, since the start."""
        await asyncio.sleep(1.5)  # engines report their counts a few times a second
        counts = {"hit": 0, "kvbm": 0, "encoded": 0}
        for address in self._addresses():
            async with self._http.get(f"{address}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if line.startswith("headrace_images_total{"):
                        labels, _, value = line.rpartition(" ")
                        counts[labels.split('outcome="')[1].split('"')[0]] += int(float(value))
        return counts

    def pids(self, program: str) -> list[int]:
        """Return the processes of a service."""
        record = json.loads((self._state / "run" / "up.json").read_text())
        return [each["pid"] for name, each in record["programs"].items() if name.startswith(program)]

    async def kill_engines(self) -> None:
        """Kill the engines of all workers, and wait until others serve requests."""
        for pid in [child for worker in self.pids("worker") for child in children(worker)]:
            os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + KILL_LIMIT_S
        await asyncio.sleep(1)
        while sum(len(model["instances"]) for model in self._status()["models"]) < 2:  # without any there is no model
            if time.monotonic() > until_s:
                raise Unavailable(f"the killed engines are not there again after {KILL_LIMIT_S:g} s")
            await asyncio.sleep(0.5)

    def _status(self) -> Any:
        words = command("status", "--json", "--state", str(self._state))
        return json.loads(subprocess.run(words, capture_output=True, check=True).stdout)

    def _addresses(self) -> list[str]:
        return [each["http"] for each in self._status()["instances"] if each["service"] == "worker"]


async def chats(fleet: Fleet, shown: Sequence[Sequence[int]]) -> tuple[list[float], list[list[Message]]]:
    """Run all chats at once. Return the seconds of each turn's first token, and the chats."""
    histories: list[list[Message]] = [[] for _ in shown]

    async def one(chat: int) -> list[float]:
        seconds = []
        for turn, number in enumerate(shown[chat]):
            histories[chat].append(_question(picture(number), f"Chat {chat}, turn {turn}: what is this?"))
            seconds.append(await fleet.ask(histories[chat]))
            histories[chat].append({"role": "assistant", "content": "A picture."})
        return seconds

    return [each for part in await asyncio.gather(*map(one, range(len(shown)))) for each in part], histories


async def measure(url: str, state: Path, shown: Sequence[Sequence[int]], *, kill: bool) -> Row:
    """Run the chats, then kill the engines and go on, if asked."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)) as http:
        fleet = Fleet(http, url, state)
        warm_up = ([_question(picture(WARM_UP + number), "Warm-up.")] for number in range(4))
        await asyncio.gather(*map(fleet.ask, warm_up))
        before, began_s = await fleet.images(), time.perf_counter()
        seconds, histories = await chats(fleet, shown)
        took_s, after = time.perf_counter() - began_s, await fleet.images()
        counts = {outcome: after[outcome] - before[outcome] for outcome in after}
        row: Row = {
            **{"requests": len(seconds), "pictures": len({each for chat in shown for each in chat}), **counts},
            **{"first_p50_s": statistics.median(seconds), "first_max_s": max(seconds)},
            "took_s": took_s,
        }
        if not kill:
            return row
        await fleet.kill_engines()
        again = [[*chat, {"role": "user", "content": "And all of them?"}] for chat in histories]
        again += [[_question(picture(number), f"Once more, {number}.")] for number in range(row["pictures"])]
        await asyncio.gather(*map(fleet.ask, again))
        last = await fleet.images()
        row |= {f"{outcome}_after_kill": last[outcome] - after[outcome] for outcome in after}
        return row | await frontend_cost(fleet)


async def frontend_cost(fleet: Fleet) -> Row:
    """Return the CPU of a request with a photo, new and shown again, and of Pillow's decode and SHA-256, in turns."""
    file = photo()
    await fleet.ask(_photo_question(file))  # the decoder runs from now on
    (frontend,) = fleet.pids("frontend")
    processes = (frontend, *below(frontend))
    served, again, plain, resized = list[float](), list[float](), list[float](), list[float]()
    for number in range(JPEG_REQUESTS):
        for seconds, shown in ((served, file + number.to_bytes(4, "little")), (again, file)):
            asked = _photo_question(shown)
            began_s = sum(cpu_of(pid).sum_s for pid in processes)
            await fleet.ask(asked)
            seconds.append(sum(cpu_of(pid).sum_s for pid in processes) - began_s)
        own_s = time.process_time()
        with Image.open(io.BytesIO(file), formats=["JPEG"]) as image:
            rgb = image.convert("RGB")
        hashlib.sha256(file).digest()
        plain.append(time.process_time() - own_s)
        rgb.resize((SIDE * rgb.width // rgb.height, SIDE), Image.Resampling.BICUBIC)
        resized.append(time.process_time() - own_s)
    frontend_s, again_s, plain_s, resized_s = map(statistics.mean, (served, again, plain, resized))
    return {
        **{"jpeg_bytes": len(file), "frontend_cpu_s": frontend_s, "again_cpu_s": again_s},
        **{"plain_cpu_s": plain_s, "resized_cpu_s": resized_s, "frontend_ratio": frontend_s / plain_s},
        **{"frontend_again_ratio": again_s / plain_s, "frontend_resized_ratio": frontend_s / resized_s},
    }


def _photo_question(file: bytes) -> list[Message]:
    return [_question(f"data:image/jpeg;base64,{base64.b64encode(file).decode()}", "What is this?")]


def main() -> None:
    """Measure without the cache, then with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TURNS} turns a chat, {QUICK_LAYERS} layers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args()
    shown, terminal, rows = pictures_shown(QUICK_TURNS if flags.quick else TURNS), Terminal(), list[Row]()
    with tempfile.TemporaryDirectory(prefix="headrace-images-") as home:
        tower = {**CLIP, **TOWER, **({"num_hidden_layers": QUICK_LAYERS} if flags.quick else {})}
        model = write_tiny_model(
            Path(home) / "model",
            architecture="LlavaForConditionalGeneration",
            tied=False,
            llava={"vision_config": tower},
            **DECODER,
        )
        for way, words in (("without", WITHOUT), ("with", WITH)):
            with running_up(("--model", str(model), *FLEET, *PATIENT, *words), terminal, f"chats {way} the cache") as (
                url,
                state,
            ):
                rows.append({"way": way, **asyncio.run(measure(url, state, shown, kill=way == "with"))})
    goals = goals_of(*rows)
    print_report("images", goals, rows, as_json=flags.json)


def goals_of(without: Row, cached: Row) -> list[Goal]:
    """Compare the two ways with the goals."""
    figures = (
        ("times that each picture was encoded", cached["encoded"] / cached["pictures"], "times", 1.0),
        ("first token p50, of that without", cached["first_p50_s"] / without["first_p50_s"], "times", FIRST_GOAL),
        ("images encoded again after a kill", float(cached["encoded_after_kill"]), "images", 0.0),
        ("CPU of a frontend for a JPEG, of Pillow and SHA-256", cached["frontend_ratio"], "times", FRONTEND_GOAL),
        ("the same for a JPEG that was shown before", cached["frontend_again_ratio"], "times", AGAIN_GOAL),
    )
    return [Goal(name, value, unit, goal, value <= goal) for name, value, unit, goal in figures]


if __name__ == "__main__":
    main()

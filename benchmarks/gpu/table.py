"""The goals on a GPU, part by part, and the table that compares figures with them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from benchmarks.report import Goal

Figures = Mapping[str, float]
"""Figures by the promise's name."""
MET: dict[bool | None, str] = {True: "met", False: "NOT MET", None: ""}


class Promise(Struct, frozen=True):
    """One line of the table: a figure and its bound, if it has one."""

    part: str
    name: str
    unit: str
    least: float | None = None
    most: float | None = None
    """The upper bound. A line without a bound is only shown and has no goal."""
    gpus: int = 1
    """The GPUs that it needs. A line that needs several is left out if it was not measured."""

    @property
    def bound(self) -> str:
        """Return the bound as text."""
        if self.least is not None:
            return f"≥ {self.least:g}"
        return "" if self.most is None else f"≤ {self.most:g}"

    def belongs(self, figures: Figures) -> bool:
        """Say whether these figures have a line of it."""
        return self.gpus == 1 or self.name in figures

    def met(self, value: float | None) -> bool | None:
        """Say whether the goal is met; None without a goal. A missing figure misses its goal."""
        if self.least is None and self.most is None:
            return None
        if value is None:
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


PINNED, ALONE, RATE = "of the pinned rate", "of the step alone", "of the memory's rate"
RATES = "of the rate of both memories"
SHARE = "of the step"
GREEDY, TIMES = "of greedy's step", "times the rate"
TORCH = "of torch's time"
ENGINE = "of the engine alone"
PROMISES = (
    Promise("copies", "64 and 512 blocks of 2 MiB, in a row, at worst", PINNED, least=0.95),
    Promise("copies", "64 and 512 blocks of 2 MiB, one batch copied, at worst", PINNED, least=0.95),
    Promise("copies", "64 and 512 blocks of 2 MiB, one batch asked for and told, at worst", PINNED),
    Promise("copies", "8 blocks of 2 MiB, in a row, at worst", PINNED, least=0.85),
    Promise("copies", "8 blocks of 2 MiB, one batch copied, at worst", PINNED, least=0.85),
    Promise("copies", "8 blocks of 2 MiB, one batch asked for and told, at worst", PINNED),
    Promise("copies", "both directions at once, at worst", "of the duplex rate", least=0.93),
    Promise("copies", "the same, of pieces of 2 MiB copied bare", "of their duplex rate"),
    Promise("beside", "decode step beside a saturating offload", ALONE, most=1.05),
    Promise("beside", "decode step beside a saturating onboard", ALONE, most=1.10),
    Promise("beside", "decode step beside both", ALONE),
    Promise("memory", "allocate and free, slowest size", "µs", most=3.0),
    Promise("memory", "allocations in 200 decode steps", "allocations", most=0.0),
    Promise("memory", "8B shape, sleep of level 1: memory given back", "GB"),
    Promise("memory", "8B shape, sleep of level 1, with 2 GB of KV", "s"),
    Promise("memory", "8B shape, wake from it, with its graphs", "s"),
    Promise("decode", "decode, batch 1, graph", RATE, least=0.75),
    Promise("decode", "decode, batch 1, eager", RATE),
    Promise("decode", "decode, batch 32, graph", RATE, least=0.65),
    Promise("decode", "decode, batch 32, eager", RATE),
    Promise("decode", "decode, batch 128, graph", RATE, least=0.60),
    Promise("decode", "decode, batch 128, eager", RATE),
    Promise("decode", "decode, 8 of 300, graph", RATE),
    Promise("decode", "decode, 8 of 300, eager", RATE),
    Promise("decode", "decode, 8 of 300 and 1 of 8,192, graph", RATE),
    Promise("decode", "decode, 8 of 300 and 1 of 8,192, eager", RATE),
    Promise("decode", "decode, 15 of 512 and 1 of 8,192, graph", RATE),
    Promise("decode", "decode, 15 of 512 and 1 of 8,192, eager", RATE),
    Promise("decode", "decode, 31 of 1,024 and 1 of 32,768, graph", RATE),
    Promise("decode", "decode, 31 of 1,024 and 1 of 32,768, eager", RATE),
    Promise("decode", "decode, 64 of 64 to 4,096, graph", RATE),
    Promise("decode", "decode, 64 of 64 to 4,096, eager", RATE),
    Promise("decode", "whole step of batch 32, busy_wait_events off", "of the default's"),
    Promise("decode", "whole step of batch 32, output_copy_stream on", "of the default's"),
    Promise("decode", "decode, 1 of 131,072, graph", RATE),
    Promise("decode", "decode, 1 of 131,072, eager", RATE),
    Promise("decode", "prefill of 2,048 tokens", "of the matrix rate", least=0.78),
    Promise("decode", "prefill of 8,192 tokens", "of the matrix rate", least=0.78),
    Promise("decode", "prefill of the fourth 8,192 of 32,768", "of the matrix rate", least=0.68),
    Promise("decode", "prefill of the last 8,192 of 131,072", "of the matrix rate"),
    Promise("decode", "step of 2,048 of a prompt beside 64 decodes", "of both alone", most=0.95),
    Promise("decode", "prefill of 8,192 with log-probabilities of all positions", "of without", most=1.25),
    Promise("decode", "16 prompts of 512 embedded", "of the step that draws a token each", most=1.10),
    Promise("decode", "the same, the slower pooling", "tokens/s"),
    Promise("torch_llama", "decode, batch 1", TORCH, most=1.0),
    Promise("torch_llama", "decode, batch 32", TORCH, most=1.0),
    Promise("torch_llama", "decode, batch 128", TORCH, most=1.0),
    Promise("torch_llama", "prefill of 8,192 tokens", TORCH, most=1.0),
    Promise("kernels", "decode, batch 1: products", SHARE),
    Promise("kernels", "decode, batch 1: attention", SHARE),
    Promise("kernels", "decode, batch 1: the rest", SHARE),
    Promise("kernels", "decode, batch 32: products", SHARE),
    Promise("kernels", "decode, batch 32: attention", SHARE),
    Promise("kernels", "decode, batch 32: the rest", SHARE),
    Promise("kernels", "decode, batch 128: products", SHARE),
    Promise("kernels", "decode, batch 128: attention", SHARE),
    Promise("kernels", "decode, batch 128: the rest", SHARE),
    Promise("kernels", "prefill of 8,192: products", SHARE),
    Promise("kernels", "prefill of 8,192: attention", SHARE),
    Promise("kernels", "prefill of 8,192: the rest", SHARE),
    Promise("kernels", "the fourth 8,192 of 32,768: products", SHARE),
    Promise("kernels", "the fourth 8,192 of 32,768: attention", SHARE),
    Promise("kernels", "the fourth 8,192 of 32,768: the rest", SHARE),
    Promise("attention", "2,048 tokens after 0, of the kernel for all GPUs", TIMES),
    Promise("attention", "2,048 tokens after 0, of cuDNN", TIMES),
    Promise("attention", "8,192 tokens after 0, of the kernel for all GPUs", TIMES),
    Promise("attention", "8,192 tokens after 0, of cuDNN", TIMES, least=0.8),
    Promise("attention", "8,192 tokens after 24,576, of the kernel for all GPUs", TIMES),
    Promise("attention", "8,192 tokens after 122,880, of the kernel for all GPUs", TIMES),
    Promise("sampling", "64 rows, temperature", GREEDY),
    Promise("sampling", "64 rows, top_p", GREEDY, most=1.08),
    Promise("sampling", "64 rows, top_k", GREEDY, most=1.08),
    Promise("sampling", "64 rows, min_p", GREEDY, most=1.08),
    Promise("sampling", "64 rows, penalties", GREEDY, most=1.08),
    Promise("sampling", "64 rows, bias", GREEDY, most=1.08),
    Promise("sampling", "64 rows, all of these", GREEDY, most=1.08),
    Promise("sampling", "64 rows, one row with top_p", GREEDY, most=1.05),
    Promise("sampling", "64 rows, logprobs 0", GREEDY),
    Promise("sampling", "64 rows, logprobs 5", GREEDY, most=1.25),
    Promise("sampling", "64 rows, logprobs 20", GREEDY),
    Promise("parallel", "two GPUs, 70B shape: decode, batch 1", RATES, least=0.65, gpus=2),
    Promise("parallel", "two GPUs, 70B shape: decode, batch 32", RATES, least=0.60, gpus=2),
    Promise("parallel", "two GPUs, 70B shape: decode, batch 128", RATES, least=0.55, gpus=2),
    Promise("parallel", "two GPUs, 70B shape: whole step of decode, batch 1", "ms", gpus=2),
    Promise("parallel", "two GPUs, 70B shape: whole step of decode, batch 32", "ms", most=23.9, gpus=2),
    Promise("parallel", "two GPUs, 70B shape: whole step of decode, batch 128", "ms", gpus=2),
    Promise("parallel", "two GPUs, 8B shape: decode, batch 1", "times as fast as one", least=1.5, gpus=2),
    Promise(
        "parallel", "two ranks, save of a block, of one rank's", "of one rank's rate times GPUs", least=0.9, gpus=2
    ),
    Promise(
        "parallel", "two ranks, load of a block, of one rank's", "of one rank's rate times GPUs", least=0.9, gpus=2
    ),
    Promise("first", "first token of 8,192 from memory, less a step", "of its bytes' time", most=1.25),
    Promise("first", "first token of 8,192 from memory, a step and all", "ms"),
    Promise("first", "first token of 8,192, computed", "ms"),
    Promise("images", "tower of ViT-L/14 at 336, batch 16, speed", "of torch's with SDPA", least=0.9),
    Promise("images", "the same, batch 1, speed", "of torch's with SDPA"),
    Promise("images", "images a second, batch 16", "images/s"),
    Promise("images", "embedding of 576 x 4,096 bf16 from the pool, asked for and told", PINNED, least=0.8),
    Promise("images", "16 of them in a row", PINNED),
    Promise("lifetimes", "sleep of level 1, of the weights", "GB/s", least=25.0),
    Promise("lifetimes", "weights of it, without a service", "s", most=1.5),
    Promise("lifetimes", "start to the first token, without a service", "s"),
    Promise("lifetimes", "start to the first token, with a service", "s", most=3.0),
    Promise("lifetimes", "wake from level 1, without a service", "ms"),
    Promise("lifetimes", "wake from level 2, without a service", "ms"),
    Promise("lifetimes", "wake from level 1, with a service", "ms", most=50.0),
    Promise("lifetimes", "wake from level 2, with a service", "ms", most=300.0),
    Promise("lifetimes", "second engine: memory beyond KV and buffers", "GB", most=2.0),
    Promise("lifetimes", "killed engine to the stream's next token, a standby", "s", most=0.5),
    Promise("lifetimes", "killed engine to the stream's next token, no standby", "s"),
    Promise("lifetimes", "turn of two models to the first token, with a service", "s", most=0.6),
    Promise("lifetimes", "turn of two models to the first token, without a service", "s"),
    Promise("stack", "1 stream: output", ENGINE, least=0.97),
    Promise("stack", "32 streams: output", ENGINE, least=0.97),
    Promise("stack", "64 streams: output", ENGINE, least=0.97),
    Promise("stack", "128 streams: output", ENGINE, least=0.97),
    Promise("stack", "1 stream: first token p50", ENGINE, most=1.5),
    Promise("stack", "32 streams: first token p50", ENGINE, most=1.5),
    Promise("stack", "64 streams: first token p50", ENGINE, most=1.5),
    Promise("stack", "128 streams: first token p50", ENGINE, most=1.5),
    Promise("stack", "64 streams, the card's sampling: output", "of greedy", least=0.97),
    Promise("stack", "64 streams, top_p 0.9: output", "of greedy", least=0.97),
    Promise("stack", "requests that failed", "requests", most=0.0),
    Promise("serving", "two workers, 64 streams: requests that failed", "requests", most=0.0),
    Promise("serving", "two workers, 64 streams: output", "tokens/s"),
    Promise("serving", "two engines without a network: output", "tokens/s"),
    Promise("serving", "one engine without a network: output", "tokens/s"),
    Promise("serving", "two workers: first token p50", "ms"),
    Promise("serving", "two workers: first token p99", "ms"),
    Promise("serving", "two workers: between tokens p50", "ms"),
    Promise("serving", "two workers: between tokens p99", "ms"),
    Promise("serving", "one worker on one GPU, 64 streams: output", "tokens/s", gpus=2),
    Promise("serving", "two workers on two GPUs, 64 streams: output", "tokens/s", gpus=2),
    Promise("serving", "two workers on two GPUs, 128 streams: output", "tokens/s", gpus=2),
    Promise("serving", "the same, of one worker's with 64 streams", "of one's", least=1.95, gpus=2),
)
PARTS = tuple(dict.fromkeys(promise.part for promise in PROMISES))


def goals(part: str, figures: Figures) -> list[Goal]:
    """Return the goals of one part: its lines with a bound."""
    found: list[Goal] = []
    for promise in PROMISES:
        bound = promise.most if promise.least is None else promise.least
        value = figures.get(promise.name)
        if promise.part == part and bound is not None and promise.belongs(figures):
            found.append(Goal(promise.name, value, promise.unit, bound, bool(promise.met(value))))
    return found


def lines(parts: Sequence[str], figures: Mapping[str, Figures]) -> list[str]:
    """Return the table of these parts: name, goal, figure, whether it is met. `figures` has each part's."""
    cells = [("what", "goal", "figure", "", "")]
    for promise in PROMISES:
        own = figures.get(promise.part, {})
        if promise.part in parts and promise.belongs(own):
            value = own.get(promise.name)
            said = "not measured" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
            cells.append((promise.name, promise.bound, said, promise.unit, MET[promise.met(value)]))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
        for row in cells
    ]


def unknown(part: str, figures: Figures) -> list[str]:
    """Return figures that no promise of the part names, which are spelling mistakes."""
    known = {promise.name for promise in PROMISES if promise.part == part}
    return [name for name in figures if name not in known]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` percent of the values do not exceed; any order."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

"""How fast is the router's index at 64 instances and a million (block, instance) pairs, and how large?

`shared`: 128 chains of 1,024 blocks, each held to a random depth by 15 random instances. Finds ask for the chains'
first 16, 128 or 1,024 blocks, so a deep find passes some fifteen changes of holders. `apart`: no block is held twice,
the worst case for bytes a pair. `events` is the whole way from a msgpack payload over token hashing into the index.

What could mislead: figures are CPU time of one process, medians over rounds, with hot caches as far as a million
pairs allow; prompts of real traffic repeat, so their blocks are warmer than here, or colder on a busy machine. Bytes
are traced allocations of the index alone; the map of an engine's own hashes is reported apart.

    python -m benchmarks.index [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeVar

from services.router.chains import Chains
from services.router.events import decode
from services.router.index import Index, Slot
from shared.messages import EVENT_BATCH, BlockStored, EventBatch

ROOT = Path(__file__).resolve().parents[1]
INSTANCES = 64
DEPTH = 1024
HOLDERS = 15
UNLIMITED = 1 << 40
BLOCK_SIZE = 16
BYTES_GOAL = 60.0
STALL_GOAL_MS = 3.0

T = TypeVar("T")


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, fewer rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    chains, rounds = (13, 20) if flags.quick else (128, 100)
    rows = [*_speed(chains, rounds), *_events(rounds), *_sizes(chains)]
    if flags.json:
        print(json.dumps(_report(rows)))
        return 0
    for row in rows:
        print(f"{row['what']:<44} {row['value']:>12,.2f} {row['unit']}")
    return 0


def _row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "unit": unit}


def _hashes(draw: Random, count: int) -> list[int]:
    """As they come from a message: ints of their own."""
    return array("Q", draw.randbytes(8 * count)).tolist()


def _shared(index: Index, chains: int) -> tuple[list[Slot], list[list[int]], int]:
    """Fills the index; (slots, chains, pairs)."""
    draw = Random(7)
    slots = [index.open((f"{number:016x}", 0)) for number in range(INSTANCES)]
    made = [_hashes(draw, DEPTH) for _ in range(chains)]
    pairs = 0
    for chain in made:
        for slot in draw.sample(slots, HOLDERS):
            depth = draw.randrange(DEPTH + 1)
            for start in range(0, depth, 8):
                index.stored(slot, 0, chain[start : min(start + 8, depth)])
            pairs += depth
    return slots, made, pairs


def _cpu_ns(work: Callable[[T], object], items: Sequence[T]) -> int:
    began = time.process_time_ns()
    for item in items:
        work(item)
    return time.process_time_ns() - began


def _speed(chains: int, rounds: int) -> list[dict[str, Any]]:
    index = Index(limit_bytes=UNLIMITED)
    slots, made, pairs = _shared(index, chains)
    rows = [_row("pairs", pairs, "pairs"), _row("sets of holders", index.statistics().holder_sets, "sets")]
    for depth in (16, 128, 1024):
        prompts = [chain[:depth] for chain in made]
        spent = [_cpu_ns(index.find, prompts) for _ in range(rounds)]
        rows.append(_row(f"find at depth {depth}", median(spent) / len(prompts) / 1000, "us"))
    draw = Random(8)
    for size in (1, 8, 64):
        stored, removed = [], []
        for _ in range(rounds):
            slot = draw.choice(slots)
            new = _hashes(draw, 1024)
            batches = [new[start : start + size] for start in range(0, 1024, size)]
            stored.append(_cpu_ns(partial(index.stored, slot, 0), batches))
            removed.append(_cpu_ns(partial(index.removed, slot, 0), batches))
        rows.append(_row(f"stored, {size} blocks at once", median(stored) / 1024, "ns a block"))
        rows.append(_row(f"removed, {size} blocks at once", median(removed) / 1024, "ns a block"))
    return rows


def _events(rounds: int) -> list[dict[str, Any]]:
    """From payload to index, and the stall of clearing what came that way."""
    rows = []
    draw = Random(9)
    for size in (1, 8, 64):
        index = Index(limit_bytes=UNLIMITED)
        chains = _chains(index, 10**6)
        spent: list[int] = []
        for _ in range(rounds):
            payloads = _payloads(draw, size, 256 // size)
            spent.append(_cpu_ns(partial(_apply, chains), payloads))
        rows.append(
            _row(f"event of {size} stored blocks, decoded and applied", median(spent) / (256 // size) / 1e3, "us")
        )
    index = Index(limit_bytes=UNLIMITED)
    chains = _chains(index, 10**6)
    payloads = _payloads(draw, 64, 256)
    tracemalloc.start()
    for payload in payloads:
        _apply(chains, payload)
    apart = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*router/index.py")])
    held = sum(trace.size for trace in apart.statistics("filename"))
    tracemalloc.stop()
    rows.append(_row("map of an engine's own hashes", held / chains.statistics().blocks, "bytes a block"))
    clearing = chains.clear()
    stalls: list[int] = []
    more = True
    while more:
        began = time.perf_counter_ns()
        more = clearing.step(1024)
        stalls.append(time.perf_counter_ns() - began)
    rows.append(_row("longest stall of clearing", max(stalls) / 1e6, "ms"))
    return rows


def _chains(index: Index, limit: int) -> Chains:
    return Chains(
        index, ("a", 0), block_size=BLOCK_SIZE, vocab_size=1 << 17, limit_blocks=limit, orphan_limit_blocks=1000
    )


def _payloads(draw: Random, size: int, count: int) -> list[bytes]:
    """Batches of one stored run each, all new, as our workers send them."""
    made = []
    for _ in range(count):
        tokens = [draw.randrange(1 << 17) for _ in range(size * BLOCK_SIZE)]
        event = BlockStored([*_hashes(draw, size)], None, tokens, BLOCK_SIZE, medium="GPU")
        made.append(EVENT_BATCH.encode(EventBatch(0.0, [event], 0)))
    return made


def _apply(chains: Chains, payload: bytes) -> None:
    for event in decode(payload).events:
        chains.apply(event)


def _sizes(chains: int) -> list[dict[str, Any]]:
    rows = []
    tracemalloc.start()
    index = Index(limit_bytes=UNLIMITED)
    _, made, pairs = _shared(index, chains)
    size, _ = tracemalloc.get_traced_memory()
    rows.append(_row("shared: bytes a pair", (size - _lists(made)) / pairs, "bytes"))
    rows.append(_row("shared: estimate over traced", index.bytes / (size - _lists(made)), ""))
    rows.append(_row("shared: bytes a distinct block", (size - _lists(made)) / index.statistics().blocks, "bytes"))
    del index, made
    tracemalloc.clear_traces()
    index = Index(limit_bytes=UNLIMITED)
    draw = Random(7)
    slots = [index.open((f"{number:016x}", 0)) for number in range(INSTANCES)]
    count = chains * DEPTH * HOLDERS // 2
    for _ in range(count // 512):
        index.stored(draw.choice(slots), 0, _hashes(draw, 512))
    size, _ = tracemalloc.get_traced_memory()
    rows.append(_row("apart: bytes a pair", size / index.statistics().blocks, "bytes"))
    rows.append(_row("apart: estimate over traced", index.bytes / size, ""))
    tracemalloc.stop()
    return rows


def _lists(made: list[list[int]]) -> int:
    """The benchmark's own lists of hashes; the ints are the index's too."""
    return sum(sys.getsizeof(chain) for chain in made)


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = {row["what"]: row["value"] for row in rows}
    goals = [
        ("bytes a pair", values["shared: bytes a pair"], "bytes", BYTES_GOAL),
        ("longest stall of clearing", values["longest stall of clearing"], "ms", STALL_GOAL_MS),
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "benchmark": "index",
        "machine": f"{platform.machine()}, CPython {platform.python_version()}",
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m benchmarks.index", *sys.argv[1:]]),
        "goals": [
            {"name": name, "value": value, "unit": unit, "goal": goal, "met": value <= goal}
            for name, value, unit, goal in goals
        ],
        "rows": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())

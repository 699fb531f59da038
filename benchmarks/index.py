"""How fast is the router's index at 64 instances and a million (block, instance) pairs, and how large?

Workloads (`benchmarks/index_workload.py`): `staggered`, 1,024 blocks a chain, held by 15 instances to random depths, so
that a deep find passes about fifteen changes of holders; `quarter D`, D blocks a chain, held by one instance, each
fourth chain by eight; `apart`, no block held twice, the worst case for bytes a pair. All are stored 16 blocks an event,
after their parent.

With --dynamo PYTHON (an interpreter that has ai-dynamo-runtime), its RadixTree is filled with the same chains and
asked the same questions in turn with ours, round by round. `stored` compares our `Index.stored` with its
`apply_event`: both are given hashes that are ready, but its binding takes them as JSON and parses that. `payload` is
all of our work, from a msgpack payload with token ids over hashing into the index.

What could mislead: times are process CPU, including the thread of Dynamo's tree; its wall time is longer, because each
call crosses threads. They are medians over rounds of ten passes each. A router that does other work between two finds
has colder caches and takes up to twice as long. Finds go through a thousand chains in turn, with hashes that are not
the index's own objects. The stalls are of one candidate that gets as many blocks as there are pairs. Only a host tier
is so large; the map of its engine's own hashes, one dict, then grows at once. Bytes are traced allocations of the index
alone, and for Dynamo the growth of the resident set over its first fill; the map of an engine's own hashes is reported
separately. A find of ours that leaves a run midway costs one more search; here most prompts end where a stored chain
does, or go on.

`8 stores` is an index with eight more block stores, of eight instances each. Each store holds in host memory the blocks
that any of its instances has on the device. Its ratio is to the same index without stores, asked in turn. Far more
instances are found then, each to the depth of its store's deepest one, and that is most of the cost.

    python -m benchmarks.index [--quick] [--json] [--dynamo /path/to/venv/bin/python]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from statistics import median
from typing import Any, TypeVar

import msgspec

from benchmarks import index_workload as workload
from benchmarks.index_workload import INSTANCES, Chain, draw_hashes
from benchmarks.report import ROOT, Goal, report
from services.router.index.chains import Chains
from services.router.index.index import Index, Slot
from services.router.index.kv_events import StoredEvent, decode
from shared.messages.kv_events import EVENT_BATCH, BlockStored, EventBatch

UNLIMITED = 1 << 40
BLOCK_SIZE = 16
DEPTHS = (16, 128, 1024)
STORES = 8
EVENT_BLOCKS = (1, 8, 16, 64)
BYTES_GOAL = 60.0
STALL_GOAL_MS = 3.0
FIND_GOALS = {16: 4.0, 128: 4.0, 1024: 1.5}
STORED_GOAL = 4.0

T = TypeVar("T")
Row = dict[str, Any]


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, fewer rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter with ai-dynamo-runtime, to compare with")
    flags = parser.parse_args()
    pairs, rounds = (100_000, 3) if flags.quick else (1_000_000, 9)
    with _peer(flags.dynamo) as peer:
        rows = [*_compared(peer, pairs, rounds), *_with_stores(pairs, rounds)]
    rows += [*_payloads_applied(rounds), *_sizes(pairs), *_stalls(pairs)]
    if flags.json:
        print(msgspec.json.encode(_report(rows)).decode())
        return 0
    for row in rows:
        against = f"{row['dynamo']:>12,.2f} {row['ratio']:>7.1f} x" if "ratio" in row else ""
        if "times one without" in row:
            against = f"{row['times one without']:.2f} x one without"
        print(f"{row['what']:<52} {row['value']:>12,.2f} {row['unit']:<14} {against}")
    return 0


# --- the peer

Ask = Callable[..., Any]


@contextmanager
def _peer(python: str | None) -> Iterator[Ask | None]:
    """Yield a function that asks Dynamo's tree, in a process of its own; None without Dynamo."""
    if python is None:
        yield None
        return
    command = [python, str(ROOT / "benchmarks" / "index_dynamo.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        def ask(*question: object) -> Any:
            questions.write(json.dumps(question) + "\n")
            questions.flush()
            return json.loads(answers.readline())

        yield ask
        questions.close()


def _row(what: str, value: float, unit: str, dynamo: float | None = None) -> Row:
    row = {"what": what, "value": round(value, 3), "unit": unit}
    return row if dynamo is None else row | {"dynamo": round(dynamo, 3), "ratio": round(dynamo / value, 2)}


def _against(what: str, unit: str, rounds: int, ours: Callable[[], float], theirs: Callable[[], float] | None) -> Row:
    """Measure both sides in turn, and return the medians over the rounds."""
    spent: list[float] = []
    peers: list[float] = []
    for _ in range(rounds):
        spent.append(ours())
        if theirs is not None:
            peers.append(theirs())
    return _row(what, median(spent), unit, median(peers) if peers else None)


# --- finds and events


def _filled(name: str, pairs: int) -> tuple[Index, list[Slot], list[Chain]]:
    index = Index(limit_bytes=UNLIMITED)
    slots = [index.open_slot((f"{number:016x}", 0)) for number in range(INSTANCES)]
    chains = list(workload.fill(name, pairs))
    for chain in chains:
        for number, depth in chain.held:
            _hold(index, slots[number], 0, chain.hashes[:depth])
    return index, slots, chains


def _hold(index: Index, slot: Slot, tier: int, hashes: list[int]) -> None:
    """Store a chain's blocks, 16 in each event."""
    for start in range(0, len(hashes), 16):
        index.add_blocks(slot, tier, hashes[start : start + 16], hashes[start - 1] if start else None)


def _compared(peer: Ask | None, pairs: int, rounds: int) -> Iterator[Row]:
    for name in ("staggered", *(f"quarter {depth}" for depth in DEPTHS)):
        index, _, chains = _filled(name, pairs)
        filled = None if peer is None else peer("fill", name, pairs)
        statistics = index.statistics()
        yield _row(f"{name}: pairs", statistics.pairs["device"], "pairs")
        yield _row(f"{name}: blocks a run", statistics.blocks / statistics.runs, "blocks")
        if name == "staggered" and filled is not None:
            yield _row("Dynamo, staggered: bytes a pair", filled["bytes"] / filled["pairs"], "bytes")
        prompts = workload.asked(chains)
        for depth in DEPTHS if name == "staggered" else (len(prompts[0]),):
            asked = [prompt[:depth] for prompt in prompts]
            theirs = None if peer is None else partial(peer, "find", depth)
            yield _against(f"{name}: find at depth {depth}", "ns", rounds, partial(_find, index, asked), theirs)
    index, slots, _ = _filled("quarter 1024", pairs)  # the peer has it too: it was the last
    for size in EVENT_BLOCKS:
        ours: list[tuple[float, float]] = []
        peers: list[tuple[float, float]] = []
        for _ in range(rounds):
            ours.append(_event(index, slots, size))
            if peer is not None:
                peers.append(peer("events", size))
        for number, done in enumerate(("stored", "removed")):
            yield _row(
                f"{done}, {size} blocks an event",
                median(each[number] for each in ours),
                "ns a block",
                median(each[number] for each in peers) if peers else None,
            )


def _with_stores(pairs: int, rounds: int) -> Iterator[Row]:
    """Measure the cost of block stores that workers are attached to."""
    for name in ("staggered", *(f"quarter {depth}" for depth in DEPTHS)):
        plain, _, chains = _filled(name, pairs)
        index, slots, _ = _filled(name, pairs)
        stores = [index.open_slot((f"store {number}", 0)) for number in range(STORES)]
        for number, slot in enumerate(slots):
            index.set_store(slot.candidate, stores[number % STORES].candidate)
        for chain in chains:
            for number, store in enumerate(stores):
                depth = max([depth for instance, depth in chain.held if instance % STORES == number], default=0)
                _hold(index, store, 1, chain.hashes[:depth])
        asked = workload.asked(chains)
        times = [(_find(plain, asked), _find(index, asked)) for _ in range(rounds)]
        without, with_stores = (median(each) for each in zip(*times, strict=True))
        row = _row(f"{name}: find with {STORES} stores", with_stores, "ns")
        yield {**row, "times one without": round(with_stores / without, 2)}


def _cpu_ns(work: Callable[[T], object], items: Sequence[T]) -> int:
    began = time.process_time_ns()
    for item in items:
        work(item)
    return time.process_time_ns() - began


def _find(index: Index, prompts: list[list[int]]) -> float:
    spent = sum(_cpu_ns(index.find, prompts) for _ in range(workload.PASSES))
    return spent / len(prompts) / workload.PASSES


def _event(index: Index, slots: list[Slot], size: int) -> tuple[float, float]:
    """Store a chain of 1,024 blocks in events and remove it from its end; return ns a block of each."""
    draw = Random(8)
    slot = draw.choice(slots)
    hashes = draw_hashes(draw, 1024)
    events = [(hashes[at : at + size], hashes[at - 1] if at else None) for at in range(0, 1024, size)]
    stored = removed = 0
    for _ in range(workload.PASSES):
        stored += _cpu_ns(lambda event: index.add_blocks(slot, 0, *event), events)
        removed += _cpu_ns(lambda event: index.remove_blocks(slot, 0, event[0]), events[::-1])
    return stored / 1024 / workload.PASSES, removed / 1024 / workload.PASSES


# --- the whole way of a payload


def _payloads_applied(rounds: int) -> Iterator[Row]:
    draw = Random(9)
    for size in EVENT_BLOCKS:
        chains = _chains(Index(limit_bytes=UNLIMITED))
        spent = [_cpu_ns(partial(_apply, chains), _payloads(draw, size, 512 // size)) / 512 for _ in range(rounds)]
        yield _row(f"payload, {size} blocks: decoded, hashed, stored", median(spent), "ns a block")


def _chains(index: Index) -> Chains:
    return Chains(
        index, ("a", 0), block_size=BLOCK_SIZE, vocab_size=1 << 17, limit_blocks=10**7, orphan_limit_blocks=1000
    )


def _payloads(draw: Random, size: int, count: int) -> list[bytes]:
    """Make batches of one stored run each, one after another, as our workers send them."""
    made = []
    parent: int | None = None
    for _ in range(count):
        tokens = [draw.randrange(1 << 17) for _ in range(size * BLOCK_SIZE)]
        names = draw_hashes(draw, size)
        event = BlockStored([*names], parent, tokens, BLOCK_SIZE, medium="GPU")
        parent = names[-1]
        made.append(EVENT_BATCH.encode(EventBatch(0.0, [event], 0)))
    return made


def _apply(chains: Chains, payload: bytes) -> None:
    for event in decode(payload).events:
        chains.apply(event)


# --- sizes


def _sizes(pairs: int) -> Iterator[Row]:
    for name in ("staggered", *(f"quarter {depth}" for depth in DEPTHS)):
        tracemalloc.start()
        index, _, chains = _filled(name, pairs)
        traced, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # The benchmark's own lists are not the index's; the ints in them are.
        size = traced - sum(sys.getsizeof(chain.hashes) + sys.getsizeof(chain.held) for chain in chains)
        statistics = index.statistics()
        yield _row(f"{name}: bytes a pair", size / statistics.pairs["device"], "bytes")
        yield _row(f"{name}: bytes a distinct block", size / statistics.blocks, "bytes")
        yield _row(f"{name}: estimate over traced", statistics.bytes / size, "")
        del index, chains
    tracemalloc.start()
    index = Index(limit_bytes=UNLIMITED)
    draw = Random(7)
    slots = [index.open_slot((f"{number:016x}", 0)) for number in range(INSTANCES)]
    for _ in range(pairs // 16):
        index.add_blocks(draw.choice(slots), 0, draw_hashes(draw, 16))
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    yield _row("apart: bytes a pair", traced / index.statistics().blocks, "bytes")
    yield _row("apart: estimate over traced", index.bytes / traced, "")


# --- stalls


def _stalls(pairs: int) -> Iterator[Row]:
    """Measure the CPU time of single calls, for which others wait, while blocks are stored and cleared."""
    index = Index(limit_bytes=UNLIMITED)
    chains = _chains(index)
    draw = Random(10)
    payloads = _payloads(draw, 64, 256)
    tracemalloc.start()
    for payload in payloads:
        _apply(chains, payload)
    apart = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(False, "*router/index/index.py"), tracemalloc.Filter(False, "*router/index/runs.py")]
    )
    held = sum(trace.size for trace in apart.statistics("filename"))
    tracemalloc.stop()
    yield _row("map of an engine's own hashes", held / len(chains.blocks_in(0)), "bytes a block")
    slot = index.open_slot(("b", 0))
    longest = _longest(lambda: index.add_blocks(slot, 0, draw_hashes(draw, 64)), pairs // 64)
    yield _row("longest stall of storing", longest, "ms")
    longest = _longest(lambda: chains.apply(_told(draw, 64)), pairs // 64)
    yield _row("longest stall of storing, an engine's own hashes too", longest, "ms")
    yield _row("a full garbage collection", _longest(gc.collect, 1), "ms")
    clearing = chains.clear()
    yield _row("longest stall of clearing", _longest(lambda: clearing.step(1024), 64), "ms")


def _told(draw: Random, blocks: int) -> StoredEvent:
    """Make an event that stores blocks at the beginning of a chain."""
    tokens = draw.randbytes(4 * BLOCK_SIZE * blocks)
    return StoredEvent(
        [*draw_hashes(draw, blocks)],
        None,
        tokens,
        BLOCK_SIZE,
        0,
        None,
        windowed=False,
        lora="",
        salt="",
        routable=blocks,
    )


def _longest(work: Callable[[], object], times: int) -> float:
    longest = 0
    for _ in range(times):
        began = time.process_time_ns()
        work()
        longest = max(longest, time.process_time_ns() - began)
    return longest / 1e6


def _report(rows: list[Row]) -> dict[str, Any]:
    found = {row["what"]: row for row in rows}
    goals: list[Goal] = []
    for name in ("staggered", "quarter"):
        for depth, least in FIND_GOALS.items():
            workload_name = name if name == "staggered" else f"quarter {depth}"
            goals.append(_ratio_goal(found[f"{workload_name}: find at depth {depth}"], least))
    goals += [_ratio_goal(found[f"stored, {size} blocks an event"], STORED_GOAL) for size in EVENT_BLOCKS]
    for what, most in (
        ("staggered: bytes a pair", BYTES_GOAL),
        *((f"quarter {depth}: bytes a pair", BYTES_GOAL) for depth in DEPTHS),
        ("apart: bytes a pair", BYTES_GOAL),
        ("longest stall of storing", STALL_GOAL_MS),
        ("longest stall of storing, an engine's own hashes too", STALL_GOAL_MS),
        ("longest stall of clearing", STALL_GOAL_MS),
    ):
        row = found[what]
        goals.append(Goal(what, row["value"], row["unit"], most, met=row["value"] <= most))
    return report("index", sys.argv[1:], goals, rows)


def _ratio_goal(row: Row, least: float) -> Goal:
    """Make a goal of how many times as fast as Dynamo; without Dynamo it is not met."""
    ratio = row.get("ratio")
    name = f"{row['what']}, times as fast as Dynamo"
    return Goal(name, ratio, "x", least, met=ratio is not None and ratio >= least)


if __name__ == "__main__":
    raise SystemExit(main())

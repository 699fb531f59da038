"""Runs Dynamo's RadixTree on the workload of `benchmarks/index.py`, in an interpreter that has it.

It reads one JSON command a line on stdin and writes one JSON answer a line to stdout. Times are process CPU, the tree's
own thread included.

    ["fill", name, pairs]        → {"pairs": …, "bytes": …}       a new tree; bytes: growth of the resident set
    ["find", depth]              → nanoseconds a find
    ["events", blocks an event]  → [nanoseconds a stored block, a removed block]

The binding takes events only as JSON. Encoding them is not counted; parsing them is. A find's scores stay in Rust;
reading them from Python would cost more.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from random import Random

import index_workload as workload  # type: ignore[import-not-found]  # this folder is sys.path[0] there
from dynamo.llm import RadixTree  # type: ignore[import-not-found]

_numbers = itertools.count(1)


def _event(**change: object) -> bytes:
    return json.dumps({"event_id": next(_numbers), "data": change, "dp_rank": 0}).encode()


def _stored(hashes: list[int], parent: int | None) -> bytes:
    """Encode a stored event. Block hashes and sequence hashes may be equal: any one-to-one naming works."""
    return _event(
        stored={"parent_hash": parent, "blocks": [{"block_hash": each, "tokens_hash": each} for each in hashes]}
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class DynamoIndexer:
    """Dynamo's tree, and the chains that were put into it."""

    def fill(self, name: str, pairs: int) -> dict[str, int]:
        self.tree = RadixTree()
        gc.collect()
        before = _resident_bytes()
        chains = []
        total = 0
        for chain in workload.fill(name, pairs):
            chains.append(chain)
            total += chain.pairs
            for instance, depth in chain.held:
                for start in range(0, depth, 16):
                    blocks = chain.hashes[start : min(start + 16, depth)]
                    self.tree.apply_event(instance, _stored(blocks, chain.hashes[start - 1] if start else None))
        self.tree.find_matches([1])  # all events are in
        size = _resident_bytes() - before - sum(36 * len(chain.hashes) for chain in chains)
        self.asked = workload.asked(chains)
        return {"pairs": total, "bytes": size}

    def find(self, depth: int) -> float:
        prompts = [prompt[:depth] for prompt in self.asked]
        find = self.tree.find_matches
        began = time.process_time_ns()
        for _ in range(workload.PASSES):
            for prompt in prompts:
                find(prompt)
        asked: int = len(prompts) * workload.PASSES
        return (time.process_time_ns() - began) / asked

    def events(self, size: int) -> tuple[float, float]:
        draw = Random(8)
        instance = draw.randrange(workload.INSTANCES)
        hashes = workload.draw_hashes(draw, 1024)
        starts = range(0, 1024, size)
        stored = [_stored(hashes[at : at + size], hashes[at - 1] if at else None) for at in starts]
        removed = [_event(removed={"block_hashes": hashes[at : at + size]}) for at in reversed(starts)]
        spent = [(self._apply(instance, stored), self._apply(instance, removed)) for _ in range(workload.PASSES)]
        blocks = 1024 * workload.PASSES
        return sum(each for each, _ in spent) / blocks, sum(each for _, each in spent) / blocks

    def _apply(self, instance: int, events: list[bytes]) -> int:
        apply = self.tree.apply_event
        began = time.process_time_ns()
        for event in events:
            apply(instance, event)
        return time.process_time_ns() - began


def main() -> None:
    """Answer commands until stdin ends."""
    peer = DynamoIndexer()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main()

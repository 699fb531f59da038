"""How soon does a prompt's first token come where kvbm has its blocks in memory?

A worker with the native engine on one thread, and a device pool that holds one prompt. Two prompts are
computed once, block by block stored in a kvbm's pool, and then asked for in turn: each time the other one is on the
device, and all blocks come from the pool. `first` is the time from the request to the first token, less one step of the
engine, which computes the prompt's last token: the mean time between the tokens that follow. `copying` is what the
prompt's bytes take at the rate at which a mover by itself loads blocks of this size, measured between the requests. The
ratios are first ÷ copying, medians over the rounds.

What could mislead: NATS and discovery are in-process twins, in the benchmark's process, as are the shell and the kvbm;
over NATS the fetch takes some tenths of a millisecond more. `first` is wall time, `copying` too: both suffer from other
programs, and `first`, which goes through two processes and a thread of low priority, suffers more.

    python -m benchmarks.kvbm_first [--tokens 4096] [--rounds 15] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import mmap
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count, cycle
from pathlib import Path
from random import Random

import msgspec
import uvloop

from benchmarks.report import ROOT, Goal, report
from deploy.local.model import fetch_default
from services.worker.config import KvbmConfig, WorkerConfig
from services.worker.copies import Copy
from services.worker.host_mover import HostMover
from shared.messages import Sampling
from shared.pool_map import PoolMap, touch
from tests.worker.pool_file import make_pool
from tests.worker.shell import NAMESPACE, Shell, request, running_worker
from tests.worker.store import attached, saved, store

MODELS = ROOT / ".headrace" / "models"
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 * 30 * 3 * 64 * BLOCK_TOKENS * 4
"""SmolLM2-135M's: keys and values of 30 layers, 3 heads of 64, in float32."""
VOCABULARY = 49_152
CHUNK_TOKENS = 512
"""Of a prompt that is computed for the first time: an answer may not take longer than the rig waits."""
OUTPUT_TOKENS = 9
GOAL = 1.25

_names = count()


class Row(msgspec.Struct, frozen=True):
    """Milliseconds of one request."""

    first_ms: float
    step_ms: float
    copying_ms: float
    ratio: float


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt, and one more")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="prompts of 512 tokens, seven rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    tokens, rounds = (512, 7) if flags.quick else (flags.tokens, flags.rounds)
    rows = uvloop.run(measure(tokens, rounds))
    if flags.json:
        print(msgspec.json.encode(report("kvbm_first", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(
            f"first token, less a step {row.first_ms:8.2f} ms   step {row.step_ms:7.2f} ms"
            f"   copying {row.copying_ms:7.2f} ms   ratio {row.ratio:.2f}"
        )
    print(f"median ratio {goals(rows)[0].value:.2f}, goal {GOAL}")
    return 0


def goals(rows: Sequence[Row]) -> list[Goal]:
    """What was promised."""
    ratio = statistics.median(row.ratio for row in rows)
    return [Goal("first token from memory, less a step", ratio, "of copying alone", GOAL, met=ratio <= GOAL)]


async def measure(tokens: int, rounds: int) -> list[Row]:
    """A row a request."""
    blocks = tokens // BLOCK_TOKENS
    pool_bytes = 4 * blocks * BLOCK_BYTES + (64 << 20)
    with tempfile.TemporaryDirectory(prefix="kvbm-first-", dir="/dev/shm") as name, ExitStack() as ours:
        copying_s = ours.enter_context(_copying(Path(name), blocks))
        config = WorkerConfig(
            namespace=NAMESPACE,
            model=str(fetch_default(MODELS, lambda _what, _share: None)),
            model_name="model",
            cache=str(MODELS),
            engine="native",
            capacity_blocks=blocks + 1,
            threads=1,
            kvbm=KvbmConfig(pool=f"{name}/pool", wait_s=20.0),
        )
        async with running_worker(config) as shell, store(shell, config.kvbm.pool, "k1", size_bytes=pool_bytes):
            await attached(shell, "k1")
            draw = Random(1)
            prompts = [[draw.randrange(VOCABULARY) for _ in range(tokens + 1)] for _ in range(2)]
            for number, prompt in enumerate(prompts):
                for end in (*range(CHUNK_TOKENS, tokens, CHUNK_TOKENS), tokens + 1):
                    await _ask(shell, prompt[:end], cached_tokens=None)
                await saved(shell, (number + 1) * blocks)
            rows = []
            for prompt, _ in zip(cycle(prompts), range(rounds), strict=False):
                first_s, step_s = await _ask(shell, prompt, cached_tokens=tokens)
                alone_s = copying_s()
                ratio = (first_s - step_s) / alone_s
                rows.append(Row(1e3 * (first_s - step_s), 1e3 * step_s, 1e3 * alone_s, ratio))
    return rows


async def _ask(shell: Shell, prompt: list[int], *, cached_tokens: int | None) -> tuple[float, float]:
    """Seconds to the first token, and between the others. `cached_tokens`: all from memory; None: nobody looks."""
    name = f"r{next(_names)}"
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    began_s = time.perf_counter()
    await shell.peer.generate(request(name, prompt, sampling=sampling))
    await shell.peer.until(lambda: bool(shell.peer.parts(name)))
    first_s = time.perf_counter() - began_s
    await shell.peer.ended(name)
    last_s = time.perf_counter() - began_s
    last = shell.peer.parts(name)[-1]
    assert cached_tokens is None or last.cached_host_tokens == cached_tokens, last
    shell.peer.frames.clear()
    return first_s, (last_s - first_s) / (OUTPUT_TOKENS - 1)


@contextmanager
def _copying(directory: Path, blocks: int) -> Iterator[Callable[[], float]]:
    """Seconds that a mover takes to load so many blocks, with nothing beside it."""
    geometry = make_pool(directory / "yardstick", (blocks * BLOCK_BYTES + (1 << 20)) >> 16 << 16)
    pool = PoolMap(directory / "yardstick")
    slots = pool.arena(geometry.arena(0, 1, BLOCK_BYTES))
    touch(slots.bytes)
    device = mmap.mmap(-1, blocks * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    device.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(device) as memory, closing(HostMover(memory, BLOCK_BYTES, time.monotonic)) as mover:
        touch(memory)
        mover.attach(slots)
        places = Random(1).sample(range(slots.arena.slots), blocks)
        copies = [Copy(place, number) for number, place in enumerate(places)]

        def seconds() -> float:
            began_s = time.perf_counter()
            mover.load(0, copies)
            select.select([mover], [], [])
            [copied] = mover.ended()
            assert all(copied.good)
            return time.perf_counter() - began_s

        yield seconds
    slots.close()
    pool.close()


if __name__ == "__main__":
    sys.exit(main())

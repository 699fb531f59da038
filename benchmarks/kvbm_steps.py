"""How much does storing its blocks in kvbm slow the native engine?

Two workers with the same settings and engine processes of their own decode the same number of sequences, one after the
other, round by round; one of them stores each block in a real kvbm's pool as soon as it is full, the other has none.
`own` is the time of the engine's thread for a token, without the time when other programs had the core: computing,
deciding, talking to the shell, and waiting for the mover's thread to release the GIL. `cpu` is that thread's CPU time,
`process` that of all of the engine's threads, so it includes the copies. The ratios are medians over the rounds.

What could mislead: one BLAS thread, SmolLM2-135M, whose tokens are cheap to compute for the bytes of their KV (45 KiB
in float32), on a machine with a core left for the mover; where all cores compute, the mover takes up to a tenth of one.
NATS and discovery are in-process twins, in the benchmark's process, as are both shells and the kvbm.

    python -m benchmarks.kvbm_steps [--model DIRECTORY_OR_GGUF] [--sequences 8] [--rounds 30] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import uvloop

from benchmarks.report import ROOT, Goal, report
from deploy.local.stack.model import fetch_default
from services.worker.config import KVConnectorConfig, WorkerConfig
from shared.messages.generate import Sampling
from tests.worker.shell import NAMESPACE, WORKER, Shell, request, running_worker
from tests.worker.store import attached, saved, store

MODELS = ROOT / ".headrace" / "models"
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 17
"""Output tokens of a round: one block, as the last token is drawn and not computed. The prompt is one block too. Rounds
are short, so that both workers of a pair find the machine in the same state."""
BLOCKS = 2
VOCABULARY = 49_152
MOST_SLOWER = 1.03

_names = count()


class Use(msgspec.Struct, frozen=True):
    """The times of one round, in milliseconds a token."""

    own: float
    cpu: float
    process: float


class KvbmStepRow(msgspec.Struct, frozen=True):
    """Medians in milliseconds a token, without and with storing, and the median of the rounds' ratios."""

    what: str
    without_ms: float
    storing_ms: float
    ratio: float
    least: float
    most: float
    """The largest of the rounds' ratios; `least` is the smallest."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="default: the model that `up` serves")
    parser.add_argument("--sequences", type=int, default=8, help="that decode together")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="eight rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    model = flags.model or fetch_default(MODELS, lambda _what, _share: None)
    rows = uvloop.run(measure(model, flags.sequences, 8 if flags.quick else flags.rounds))
    if flags.json:
        print(msgspec.json.encode(report("kvbm_steps", sys.argv[1:], goals(rows), rows)).decode())
        return 0
    for row in rows:
        print(
            f"{row.what:<8} {row.without_ms:8.3f} ms a token, storing {row.storing_ms:8.3f}"
            f"   ratio {row.ratio:.3f}  ({row.least:.3f} … {row.most:.3f})"
        )
    return 0


def goals(rows: Sequence[KvbmStepRow]) -> list[Goal]:
    """Compare the rows with the goals."""
    ratio = next(row.ratio for row in rows if row.what == "own")
    return [Goal("a token's time, storing", ratio, "of that without", MOST_SLOWER, met=ratio <= MOST_SLOWER)]


async def measure(model: Path, sequences: int, rounds: int) -> list[KvbmStepRow]:
    """Measure; return a row for each kind of time."""
    with tempfile.TemporaryDirectory(prefix="kvbm-steps-", dir="/dev/shm") as directory:
        plain = WorkerConfig(
            namespace=NAMESPACE,
            model=str(model),
            model_name="model",
            cache=str(MODELS),
            engine="native",
            capacity_blocks=4 * BLOCKS * sequences,
            threads=1,
        )
        storing = msgspec.structs.replace(plain, kvbm=KVConnectorConfig(pool=directory))
        size_bytes = 256 << 20
        async with (
            running_worker(plain) as without,
            running_worker(storing) as shell,
            store(shell, directory, "k1", size_bytes=size_bytes),
        ):
            await asyncio.gather(
                without.peer.until(lambda: ("model", WORKER) in without.directory.cards), attached(shell, "k1")
            )
            uses: list[dict[Shell, Use]] = []
            for number in range(rounds + 1):
                order = (without, shell) if number % 2 else (shell, without)
                uses.append({each: await _round(each, sequences) for each in order})
                await saved(shell, (number + 1) * BLOCKS * sequences)
    pairs = [(use[without], use[shell]) for use in uses[1:]]  # the first was to warm up
    return [_row(what, pairs) for what in Use.__struct_fields__]


async def _round(shell: Shell, sequences: int) -> Use:
    """Decode all sequences together until the last one has ended."""
    pid = shell.worker.engine.pid
    assert pid is not None
    draw = Random(next(_names))
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    shell.peer.frames.clear()
    before, began_s = _scheduled(pid), time.perf_counter()
    for _ in range(sequences):
        prompt = [draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        await shell.peer.generate(request(f"r{next(_names)}", prompt, sampling=sampling))

    def ended() -> bool:
        parts = [part for frame in shell.peer.frames for part in frame.parts]
        return sum(part.finish is not None for part in parts) == sequences

    await shell.peer.until(ended)
    took_s = time.perf_counter() - began_s
    main_s, waited_s, all_s = (after - at for after, at in zip(_scheduled(pid), before, strict=True))
    tokens = sequences * OUTPUT_TOKENS
    return Use(*(1e3 * seconds / tokens for seconds in (took_s - waited_s, main_s, all_s)))


def _scheduled(pid: int) -> tuple[float, float, float]:
    """Return the seconds that the first thread ran and waited for a core, and that all threads ran."""
    stats = {
        int(task.name): [int(field) for field in (task / "schedstat").read_text().split()]
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    ran, waited, _ = stats[pid]
    return ran / 1e9, waited / 1e9, sum(fields[0] for fields in stats.values()) / 1e9


def _row(what: str, uses: Sequence[tuple[Use, Use]]) -> KvbmStepRow:
    pairs = [(getattr(without, what), getattr(storing, what)) for without, storing in uses]
    ratios = [storing / without for without, storing in pairs]
    return KvbmStepRow(
        what=what,
        without_ms=statistics.median(without for without, _ in pairs),
        storing_ms=statistics.median(storing for _, storing in pairs),
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
    )


if __name__ == "__main__":
    sys.exit(main())

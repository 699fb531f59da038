from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.kvbm.disk_rig import content, running
from tests.kvbm.disk_writer import SHAPE

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = 8


def _write_until_killed(directory: Path, seed: int, after_s: float) -> None:
    command = [sys.executable, "-m", "tests.kvbm.disk_writer", str(directory), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"on\n", "the lock of the one killed before is free"
        with suppress(subprocess.TimeoutExpired):
            writer.wait(after_s)  # the instant is drawn: that it is any instant is the point
        writer.kill()


async def test_a_process_killed_at_any_instant_leaves_only_right_bytes_and_misses(tmp_path: Path) -> None:
    kept = {content(number).key: content(number) for number in range(100)}
    draw = random.Random(5)
    found_in_all = misses = 0
    for seed in range(ROUNDS):
        await asyncio.to_thread(_write_until_killed, tmp_path / "disk", seed, draw.uniform(0, 0.15))
        async with running(tmp_path / "disk", SHAPE) as rig:
            found = await rig.back()
            for key, record in found.items():
                misses += not await rig.holds(record, kept[key])  # asserts that what it gives is right
            found_in_all += len(found)
    assert found_in_all > ROUNDS
    assert misses <= 8 * ROUNDS, "at most what was under way when it was killed"

"""Writes blocks over one another in a disk tier until it is killed; says "on" first. Arguments: directory, seed."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from tests.kvbm.disk_rig import content, running, small

RECORDS = 24
PAYLOAD_BYTES = 300_000
SHAPE = small(RECORDS, 5, PAYLOAD_BYTES)


async def main(directory: Path, seed: int) -> None:
    """Write eight records at a time, each with content drawn again."""
    draw = random.Random(seed)
    async with running(directory, SHAPE) as rig:
        await rig.back()
        print("on", flush=True)
        while True:
            records = draw.sample(range(RECORDS), 8)
            await asyncio.gather(*(rig.write(record, content(draw.randrange(100))) for record in records))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))

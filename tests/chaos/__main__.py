"""Chaos by hand, or for hours: `python -m tests.chaos --seed N --minutes M` (or `--hours H`).

Exit status: 0 if nothing was wrong. `--default-detection` leaves lease and time-outs as the services have them by
default, instead of shortening them to see more faults in less time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.chaos.report import account, draw, summary
from tests.chaos.stack import DEFAULTS, FAST
from tests.chaos.storm import Settings, run
from tests.namespaces import unfit


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m tests.chaos", description="Real processes under seeded faults."
    )
    parser.add_argument("--seed", type=int, help="one is drawn, and shown, if not given")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--hours", type=float, default=0.0, help="instead of minutes")
    parser.add_argument("--per-s", type=float, default=4.0, help="requests")
    parser.add_argument("--instances", type=int, default=2, help="of each service")
    parser.add_argument("--roles", action="store_true", help="workers compute prompts or decode, --instances of each")
    parser.add_argument("--clusters", action="store_true", help="clusters of NATS and etcd, partitions; needs root")
    parser.add_argument("--partitions", default="1,30", help="durations of partitions, s; one is drawn for each")
    parser.add_argument("--default-detection", action="store_true")
    parser.add_argument("--durations", default="0.5,2,4", help="of faults, s; one is drawn for each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda wants --keep in /dev/shm")
    parser.add_argument("--keep", type=Path, help="a directory for logs and settings, instead of one that is deleted")
    parser.add_argument("--json", action="store_true", help="one object, last")
    parser.add_argument("--plot", type=Path, help="a PNG; sizes go into another one beside it")
    flags = parser.parse_args()
    if flags.clusters and (flags.roles or (why := unfit())):
        parser.error("--clusters has no roles" if flags.roles else f"--clusters: {why}")
    settings = Settings(
        seed=random.SystemRandom().randrange(1 << 32) if flags.seed is None else flags.seed,
        most_s=3600 * flags.hours or 60 * flags.minutes,
        per_s=flags.per_s,
        instances=flags.instances,
        durations_s=tuple(map(float, flags.durations.split(","))),
        device=flags.device,
        roles=flags.roles,
        clusters=flags.clusters,
        partitions_s=tuple(map(float, flags.partitions.split(","))),
        detection=DEFAULTS if flags.default_detection else FAST,
    )
    print(f"seed {settings.seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = flags.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(run(settings, directory, lambda told: print(told, flush=True)))
    if flags.plot:
        draw(outcome, flags.plot)
    if flags.json:
        print(msgspec.json.encode(account(settings, outcome, sys.argv[1:])).decode())
    else:
        print(summary(outcome))
    return 0 if outcome.verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())

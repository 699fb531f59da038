"""Do the routing policies hold for loads that are unlike the trace?

unshared   prompts with nothing in common: `kv` must do as well as least-loaded
chats      conversations of some eight turns
agents     loops of about fifteen calls after one system prompt of 8,192 tokens
slow one   the chats, and one of four workers takes three times as long for everything
cpu        few chats on two workers as slow as a laptop (300 tokens/s, one token at a time)

Synthetic loads (`loads.py`), four workers, in virtual time; rates are shares of what the workers can do (`trace.py`).

What could mislead: the loads are made up; arrivals are Poisson, and a conversation's next turn comes whether or not its
last answer has.

    python -m benchmarks.policies [--quick] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec

from benchmarks.report import Goal, report
from benchmarks.trace import TraceRow, capacity, default_timing, line, run_open
from services.router.selection.policy import BUILT_IN
from services.virtual.loads import LoadTrace, agents, chats, unshared
from services.virtual.machine import StepTime
from services.worker.config import SimulatedConfig
from services.worker.simulated.timing import Timing

WORKERS = 4
SLOW = 3.0
AS_GOOD = 1.1
"""The factor up to which times to the first token count as equal."""
LAPTOP = SimulatedConfig(fixed_s=1e-3, weights_s=10e-3, row_s=3e-3, token_s=3.3e-3, pair_s=1e-7, kv_token_s=2e-6)


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--policies", nargs="+", default=list(BUILT_IN), help="by name or module:attribute")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    rows: dict[str, list[TraceRow]] = {}
    for case, load, workers, part in _cases(500 if flags.quick else 2500):
        rows[case] = [run_open(load, policy, workers, part) for policy in flags.policies]
        if not flags.json:
            print(case)
            print("\n".join(line(row) for row in rows[case]))
    if flags.json:
        told = [{"case": case, **msgspec.to_builtins(row)} for case, found in rows.items() for row in found]
        print(msgspec.json.encode(report("policies", sys.argv[1:], _goals(rows), told)).decode())
    return 0


def _cases(requests: int) -> Iterator[tuple[str, LoadTrace, Sequence[StepTime], float]]:
    """Yield name, load at its pace, workers, and the load as a share of what they can do."""
    alone, talk, loops = unshared(requests, Random(1)), chats(requests, Random(2)), agents(requests, Random(3))
    quick, laptop = default_timing(), Timing(LAPTOP).step_s
    equal = [quick] * WORKERS
    rate = capacity(alone) * WORKERS
    for part in (0.5, 0.9):
        yield f"unshared {part}", alone.at(part * rate), equal, part
    rate = capacity(talk)
    yield "chats 0.8", talk.at(0.8 * rate * WORKERS), equal, 0.8
    uneven = [*equal[1:], lambda works: SLOW * quick(works)]
    yield "slow one 0.8", talk.at(0.8 * rate * (WORKERS - 1 + 1 / SLOW)), uneven, 0.8
    rate = capacity(loops) * WORKERS
    for part in (0.3, 0.8):
        yield f"agents {part}", loops.at(part * rate), equal, part
    few = chats(requests // 8, Random(4))
    few = replace(few, requests=[replace(each, output_tokens=min(each.output_tokens, 100)) for each in few.requests])
    rate = capacity(few, laptop) * 2
    yield "cpu 0.3", few.at(0.3 * rate), [laptop] * 2, 0.3


def _goals(rows: dict[str, list[TraceRow]]) -> list[Goal]:
    """Require that `kv` is as good as the best other policy, to the first token, everywhere."""
    goals = []
    for case, found in rows.items():
        kv = next((row for row in found if row.policy == "kv"), None)
        rivals = [row.ttft_mean_s for row in found if row.policy != "kv"]
        if kv is not None and rivals:
            bound = AS_GOOD * min(rivals)
            goals.append(Goal(f"{case}: mean ttft of kv", kv.ttft_mean_s, "s", bound, kv.ttft_mean_s <= bound))
    return goals


if __name__ == "__main__":
    raise SystemExit(main())

"""What does it cost to constrain answers to a schema?

    decode, batch 8        tokens per CPU second of eight sequences with SCHEMA, as a share of eight without a grammar
    free, batch 8          the same with text that is free until a strict tool's call: a mask a token, and no call
    check                  a frontend's request to the process that compiles grammars for it

Steps with and without a grammar take turns, a block of each, so that other programs on the machine slow both. Sequences
with the schema write greedily what it allows; the others write on.

What could mislead: the share counts the CPU of all threads, even if masks cost no time because another core makes them.
A row has the clock's time, which on a busy machine says little. A step of this small model takes tens of milliseconds
on a CPU, and a mask about 60 µs meanwhile in another thread; on a GPU steps are ten times as short.

    python -m benchmarks.structured [--threads 1] [--rounds 9] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Goal, report

if TYPE_CHECKING:  # NumPy reads the number of BLAS threads when it is first imported
    from services.worker.contracts.runner import Work
    from services.worker.native.runner import NativeRunner

MODELS = Path(__file__).resolve().parents[1] / ".headrace" / "models"
BATCH = 8
BLOCK_SIZE = 16
STEPS = 16
"""Steps of one kind before the other kind's turn."""
ROUNDS = 9
BLOCKS = (64 + (ROUNDS + 1) * STEPS) // BLOCK_SIZE
"""The blocks of one sequence."""
GOAL = 0.85
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["rivers", "mills", "boats"]}},
        "home": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}}},
    },
    "required": ["name", "age", "likes", "home"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
"""A schema whose array no sequence completes."""


def main() -> int:
    """Print a table, or with --json one object."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=1, help="of BLAS")
    parser.add_argument("--rounds", type=int, default=ROUNDS, choices=range(1, ROUNDS + 1))
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(flags.threads)
    rounds = 3 if flags.quick else flags.rounds
    decode, free = _decode("decode", _grammar(), rounds), _decode("free", _strict(), rounds)
    rows = [*decode, *free, *asyncio.run(_compile())]
    goals = [
        Goal(f"{name}, batch 8: tokens/s of CPU {held}, of free", share, "share", GOAL, share >= GOAL)
        for name, held, share in (
            ("decode", "held to a schema", decode[0]["share"]),
            ("free", "beside a strict tool", free[0]["share"]),
        )
    ]
    if flags.json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(report("structured", sys.argv[1:], goals, rows))))
        return 0
    for row in rows:
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    for goal in goals:
        print(f"{goal.name}: {goal.value:.3f}, goal {GOAL}")
    return 0


def _grammar() -> str:
    return _held(structured_outputs={"json": SCHEMA})


def _strict() -> str:
    """Return a grammar of text with a strict tool; after random prompts the model calls no tool."""
    function = {"name": "remember", "parameters": PERSON, "strict": True}
    return _held(tools=[{"type": "function", "function": function}])


def _held(**fields: Any) -> str:
    """Return the grammar of a chat with these fields."""
    import msgspec

    from services.frontend.protocol.chat import ChatRequest
    from services.frontend.structured.grammar import answer_grammar
    from services.frontend.tool_parsers.parser import ParsePlan

    request = msgspec.convert({"messages": [{"role": "user", "content": "?"}], **fields}, ChatRequest)
    found = answer_grammar(request, ParsePlan("hermes"), {})
    assert found is not None
    return found.grammar


def _decode(what: str, grammar: str, rounds: int) -> list[dict[str, Any]]:
    runner = _runner()
    free = [_work(sequence, "") for sequence in range(BATCH)]
    held = [_work(BATCH + sequence, grammar) for sequence in range(BATCH)]
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for counted in range(rounds + 1):
        pair = _steps(runner, free), _steps(runner, held)
        if counted:
            pairs.append(pair)
    runner.close()
    rows = []
    for which, name in enumerate(("CPU", "the clock")):
        free_s, held_s = ([of[which] for of in side] for side in zip(*pairs, strict=True))
        shares = [one / other for one, other in zip(free_s, held_s, strict=True)]
        rows.append(
            {
                "what": f"{what}, batch 8, by {name}",
                "share": statistics.median(shares),
                "least": min(shares),
                "most": max(shares),
                "free_tokens_s": BATCH * STEPS / statistics.median(free_s),
                "held_tokens_s": BATCH * STEPS / statistics.median(held_s),
            }
        )
    return rows


async def _compile() -> list[dict[str, Any]]:
    from services.frontend.structured.compiler import GrammarCompiler

    grammars, times_s = GrammarCompiler(), []
    for grammar in (_grammar(), _grammar().replace("1000", "999"), _grammar()):
        begun = time.perf_counter()
        await grammars.check(grammar, "schema")
        times_s.append(time.perf_counter() - begun)
    await grammars.aclose()
    names = ("its process starts", "new to it", "known")
    return [{"what": f"check, {name}", "ms": 1e3 * taken_s} for name, taken_s in zip(names, times_s, strict=True)]


def _runner() -> NativeRunner:
    from deploy.local.stack.model import fetch_default
    from services.worker.native.prepare import prepare
    from services.worker.native.runner import NativeRunner

    directory = prepare(fetch_default(MODELS, lambda _what, _share: None), MODELS, lambda _loading: None)
    return NativeRunner(directory, capacity_blocks=2 * BATCH * BLOCKS, block_size=BLOCK_SIZE)


def _work(sequence: int, grammar: str) -> Work:
    from services.worker.contracts.runner import Work
    from shared.messages.generate import Sampling

    prompt = [(7 * sequence + 11 * position) % 1000 + 100 for position in range(32)]
    sampling = Sampling(max_tokens=1 << 20, temperature=0.0, grammar=grammar)
    blocks = range(sequence * BLOCKS, (sequence + 1) * BLOCKS)
    return Work(sequence, prompt, 0, len(prompt), blocks, sampling, len(prompt))


def _steps(runner: NativeRunner, works: list[Work]) -> tuple[float, float]:
    """Run STEPS steps; return the seconds of CPU and of the clock. The first round includes the prompts."""
    cpu, begun = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        for work, drawn in zip(works, runner.step(works), strict=True):
            assert drawn is not None
            assert not drawn.error
            work.start = work.end
            work.end += 1
            assert isinstance(work.history, list)
            work.history.append(drawn.token)
    return time.process_time() - cpu, time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())

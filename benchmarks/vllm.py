"""Headrace over one vLLM against `vllm serve` alone: both run, and are loaded in turn, on the same machine.

    sse_load ──▶ frontend ──▶ worker ──▶ vLLM          tokens a second, first token, time between tokens
    sse_load ──────────────▶ `vllm serve`              the same load, the same arguments of vLLM

The CPU time is that of our own processes: frontend, router, NATS, the worker's shell and the engine's program, without
vLLM's core. vLLM's own API server does what the frontend, the shell and the program do together, so its time is shown
next to it.

The sides take turns, and are compared round by round: a figure is the median of the rounds' ratios or differences.
Other work on the machine makes the rounds of one side differ by more.

Both have the same arguments. So neither compiles the model, which a worker does not on a CPU, unless `--compile` is
given. What a worker chooses by itself stays: its one rank computes in the core's process, and that of `vllm serve` in a
process of its own.

    python -m benchmarks.vllm --model DIR [--compile] [--quick] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import sub, truediv
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Goal, report

PYTHON = ROOT / ".headrace" / "vllm" / "bin" / "python"
NAME = "bench"
READY_LIMIT_S = 300.0
STREAMS = (1, 16, 32)
VARIABLES = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all engines of the machine share one processor
}
ARGUMENTS = {"block_size": "32", "dtype": "float32", "max_num_seqs": "64", "max_model_len": "2048"}
WARM = 2
"""Requests of a load that are not timed."""
Row = dict[str, Any]


@contextmanager
def started(
    command: Sequence[str], port: int, log: Path, path: str, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Start a server, wait until `path` answers 200, and yield its process id. `variables` are added to its
    environment."""
    own = os.environ | VARIABLES | dict(variables or {})
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=ROOT, env=own, stdout=out, stderr=out, start_new_session=True)
    try:
        until_s = time.monotonic() + READY_LIMIT_S
        while not _answers(f"http://127.0.0.1:{port}{path}"):
            if server.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"{command[:4]} did not get ready; see\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield server.pid
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def load(port: int, model: Path, streams: int, requests: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Run the load generator against a port; return its report."""
    command = [sys.executable, "-m", "benchmarks.sse_load", "--port", str(port), "--model", NAME]
    command += ["--tokenizer", str(model / "tokenizer.json"), "-c", str(streams), "-n", str(requests)]
    command += ["--isl", str(flags.isl), "--osl", str(flags.osl), "--warmup", str(min(WARM, streams))]
    command += ["--timeout", "600", "--extra", '{"ignore_eos": true, "temperature": 0}', "--seed", str(flags.seed)]
    flags.seed += 1  # each run has prompts of its own
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.strip().rpartition("\n")[2])
    return found


def cpu_s(root: int) -> dict[str, float]:
    """Return name → seconds of CPU, of all processes below one. A Python process is named by its module; vLLM's core
    and workers are `core`."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: dict[str, float] = {}
    for pid in _below(root):
        try:
            name, fields = Path(f"/proc/{pid}/stat").read_text().split("(", 1)[1].rsplit(")", 1)
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        module = words[words.index(b"-m") + 1].decode() if b"-m" in words else name
        label = "core" if name.startswith("VLLM::") else module
        seconds[label] = seconds.get(label, 0.0) + (int(fields.split()[11]) + int(fields.split()[12])) / ticks
    return seconds


def _below(process: int) -> list[int]:
    found = [process]
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        for task in tasks:
            for child in map(int, (task / "children").read_text().split()):
                found += _below(child)
    except OSError:
        pass
    return found


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each side and number of streams: medians over the rounds."""
    flags.seed = 1
    model = Path(flags.model).resolve()
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        alone = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "18101"]
        alone += ["--host", "127.0.0.1", "--served-model-name", NAME, "--disable-uvicorn-access-log"]
        alone += [word for name, value in ARGUMENTS.items() for word in (f"--{name.replace('_', '-')}", value)]
        alone += [] if flags.compile else ["--enforce-eager"]
        ours = [sys.executable, "-P", "-m", "deploy.local.cli", "up", "--engine", "vllm", "--workers", "1"]
        ours += ["--model", str(model), "--model-name", NAME, "--port", "18102", "--state", f"{folder}/state"]
        ours += ["--frontends", "1", "--routers", "1", "--set", "frontend.limits.wait_s=0", "--set", "worker.threads=1"]
        ours += ["--set", "worker.max_running=64", "--set", "worker.block_size=32"]
        ours += [
            word for name in ("dtype", "max_model_len") for word in ("--set", f"worker.vllm.{name}={ARGUMENTS[name]}")
        ]
        ours += ["--set", f"worker.vllm.enforce_eager={str(not flags.compile).lower()}"]
        with (
            started(alone, 18101, Path(folder, "alone.log"), "/health") as alone_pid,
            started(ours, 18102, Path(folder, "ours.log"), "/health") as our_pid,
        ):
            sides = {"vllm serve": (18101, alone_pid), "headrace": (18102, our_pid)}
            rows: list[dict[str, Any]] = []
            for streams in STREAMS:
                runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
                for number in range(flags.rounds):
                    for side in sorted(sides, reverse=bool(number % 2)):
                        port, pid = sides[side]
                        before = cpu_s(pid)
                        run = load(port, model, streams, max(4, flags.requests * streams), flags)
                        after = cpu_s(pid)
                        tokens = (run["n"] + min(WARM, streams)) * flags.osl
                        run["cpu_us_by"] = {
                            name: 1e6 * (spent_s - before.get(name, 0.0)) / max(1, tokens)
                            for name, spent_s in after.items()
                        }
                        run["cpu_us"] = sum(spent for name, spent in run["cpu_us_by"].items() if name != "core")
                        runs[side].append(run)
                rows += [row_of(side, streams, found) for side, found in runs.items()]
    return rows


def _median(values: Sequence[float]) -> float | None:
    """Return the median of what could be measured: of answers that came as one piece there is no time between
    tokens."""
    return round(statistics.median(values), 2) if values else None


def row_of(side: str, streams: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of some runs, the spread of their tokens a second, and what each of them measured."""
    rates = [run["out_tok_s"] for run in runs]
    keys = ("out_tok_s", "ttft_p50_ms", "gap_p50_ms", "tpot_p50_ms", "cpu_us")
    medians = {key: _median([run[key] for run in runs if run[key] is not None]) for key in keys}
    errors = sum(sum(run["errors"].values()) for run in runs)
    names = sorted({name for run in runs for name in run["cpu_us_by"]})
    cpu = {name: round(statistics.median(run["cpu_us_by"].get(name, 0.0) for run in runs)) for name in names}
    rounds = {key: [run[key] for run in runs] for key in ("out_tok_s", "ttft_p50_ms", "tpot_p50_ms")}
    shown = {"spread": [min(rates), max(rates)], "errors": errors, "cpu_us_by": cpu, "rounds": rounds}
    return {"side": side, "streams": streams, **medians, **shown}


def _of_rounds(compare: Callable[[float, float], float], ours: Row, alone: Row, key: str) -> float:
    """Return the median of what `compare` says of the two sides in each round in which both have the figure."""
    pairs = zip(ours["rounds"][key], alone["rounds"][key], strict=True)
    return statistics.median(compare(*pair) for pair in pairs if None not in pair)


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals for each number of streams."""
    goals: list[Goal] = []
    for streams in STREAMS:
        alone, ours = (
            next(r for r in rows if r["side"] == s and r["streams"] == streams) for s in ("vllm serve", "headrace")
        )
        rate = _of_rounds(truediv, ours, alone, "out_tok_s")
        gap = _of_rounds(truediv, ours, alone, "tpot_p50_ms")
        first = _of_rounds(sub, ours, alone, "ttft_p50_ms")
        goals += [
            Goal(f"tokens a second, {streams} streams", round(rate, 3), "times", 0.95, rate >= 0.95),
            Goal(f"time between tokens, {streams} streams", round(gap, 3), "times", 1.02, gap <= 1.02),
            Goal(f"first token, {streams} streams", round(first, 1), "ms more", 5.0, first <= 5.0),
        ]
        if streams == STREAMS[-1]:
            cpu = ours["cpu_us"] / alone["cpu_us"]
            name = "CPU of our processes a token, of vLLM's API server"
            goals.append(Goal(name, round(cpu, 3), "times", 1.0, cpu <= 1.0))
    return goals


def run(
    benchmark: str,
    parser: argparse.ArgumentParser,
    measure_rows: Callable[[argparse.Namespace], list[dict[str, Any]]],
    goals: Callable[[Sequence[dict[str, Any]]], list[Goal]],
) -> int:
    """Parse the command line, to which the flags of all benchmarks of vLLM are added; measure and print. Return 0."""
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    if flags.quick:
        flags.rounds = 1
    if not PYTHON.exists():
        raise SystemExit("./headrace install-vllm makes vLLM's environment")
    rows = measure_rows(flags)
    found = report(benchmark, sys.argv[1:], goals(rows), rows)
    if flags.json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return 0
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    for goal in found["goals"]:
        print(f"{goal.name}: {goal.value} {goal.unit}, goal {goal.goal:g}: {'met' if goal.met else 'missed'}")
    return 0


def main() -> int:
    """Run the benchmark. Return 0."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--requests", type=int, default=2, help="requests for each stream and round")
    parser.add_argument("--isl", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--osl", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--compile", action="store_true", help="both sides compile the model")
    return run("vllm", parser, measure, goals_of)


if __name__ == "__main__":
    sys.exit(main())

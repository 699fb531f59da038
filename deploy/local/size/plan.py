"""`headrace plan`: simulates fleets with measured times until it knows the cheapest that meets the targets.

search.py decides which fleets are run, plan_report.py what is said of them; this module runs them in processes of
services.virtual, one for each core.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import inf, prod
from pathlib import Path
from queue import SimpleQueue

import msgspec

from deploy.local import picture
from deploy.local.size import plan_plot
from deploy.local.size.files import check_parent, read_given, read_profile, read_trace
from deploy.local.size.flags import TARGETS, check_ranges, numbers, whole_numbers
from deploy.local.size.plan_files import chart_values, compose_overlay, up_words
from deploy.local.size.plan_page import COMPARED, BenchFile, Measured, compared, measured_of, page
from deploy.local.size.plan_report import PlanReport, PlanRow, Prices, order_of, render, report_of, rows_of
from deploy.local.size.profile_file import FILE_LIMIT_BYTES, Profile
from deploy.local.size.search import GIVEN_UP, FleetCandidate, FleetSearch, FleetSetting, Targets, settings_of
from deploy.local.size.traffic import REQUESTS_LIMIT, Lengths, Traffic, drawn_traffic
from deploy.local.stack.gpus import parallel_sizes
from deploy.local.table import table
from deploy.local.terminal import Terminal
from deploy.local.usage import PlanFlags
from shared.errors import MALFORMED, ConfigError, Unavailable
from shared.installation import COMMAND, TREE
from shared.messages.virtual import OUTCOME, VirtualFailure, VirtualResult, VirtualRun
from shared.percentiles import SHARES
from shared.vllm_args import read_file

RUN_LIMIT_S = 3600.0
"""The most seconds that one fleet may take to simulate."""
WRITTEN = (".html", ".png")
"""Suffixes of files that stand next to that of --out."""
WORKERS_LIMIT = 256
GPUS_LIMIT = 1024


def plan(flags: PlanFlags) -> int:
    """Print the plan and return the exit status: 1 if nothing meets the targets. Raise ConfigError or Unavailable."""
    _check(flags)
    measured = [] if flags.measured is None else _measured(flags.measured)  # before anything is run
    made = plan_of(flags, Terminal())
    print(msgspec.json.format(msgspec.json.encode(made)).decode() if flags.json else render(made))
    for each in () if flags.json else measured:
        print(f"\nplanned and measured, {each.name}:\n{table(COMPARED, compared(made.rows[0], each))}")
    _write(made, Path(flags.out), measured)
    if made.best is not None and flags.trace is None:
        print(f"the same load, once that is ready: {COMMAND} bench {' '.join(bench_words(flags))}", file=sys.stderr)
    return 1 if made.best is None else 0


def _write(made: PlanReport, out: Path, measured: Sequence[Measured]) -> None:
    """Write the page and the picture, and the files of the best fleet if there is one."""
    texts = {".html": page(made, measured)}
    if made.best is not None:
        order = order_of(made.best, made)
        texts |= {
            ".up": "\n".join(up_words(order)) + "\n",
            ".compose.yaml": compose_overlay(order),
            ".values.yaml": chart_values(order),
        }
    for ending, text in texts.items():
        (out if ending == ".up" else out.with_suffix(ending)).write_text(text, encoding="utf-8")
    if picture.can_draw():
        plan_plot.draw(made, measured, out.with_suffix(".png"))
        texts[".png"] = ""
    if made.best is None and out.exists():
        print(f"note: {out} is of an earlier plan", file=sys.stderr)
    names = [out.name if ending == ".up" else out.with_suffix(ending).name for ending in texts]
    print(f"{', '.join(names)}: written" + (f"; {COMMAND} up @{out}" if made.best is not None else ""), file=sys.stderr)


def bench_words(flags: PlanFlags) -> list[str]:
    """Return the flags of `bench` for the requests of a plan that drew them."""
    given = {"rate": flags.rate, "requests": flags.requests, "words": flags.prompt_tokens}
    given |= {"shared-words": flags.shared_tokens, "output-tokens": flags.output_tokens, "spread": flags.spread}
    given |= {"seed": flags.seed}
    return ["--tokens", *(word for name, value in given.items() for word in (f"--{name}", f"{value:.15g}"))]


def _measured(file: Path) -> list[Measured]:
    """Return the loads of a file that `bench` has written. Raise ConfigError."""
    try:
        rows = msgspec.json.decode(read_given(file, FILE_LIMIT_BYTES, "--measured"), type=BenchFile).rows
    except MALFORMED as wrong:
        raise ConfigError(f"--measured {file}: no file of `headrace bench`: {wrong}") from None
    return [measured_of(row) for row in rows]


def plan_of(flags: PlanFlags, terminal: Terminal) -> PlanReport:
    """Run fleets until the answer is known, for checked flags. Raise ConfigError or Unavailable."""
    files = [Path(name) for name in flags.profile or ["profile.json"]]
    profiles = [read_profile(file) for file in files]
    if others := {profile.subject.model for profile in profiles} - {profiles[0].subject.model}:
        raise ConfigError(f"the profiles are of different models: {profiles[0].subject.model}, {', '.join(others)}")
    gpus = _gpus(flags.gpus_a_worker, profiles)
    targets = Targets({name: limit for name in TARGETS if (limit := getattr(flags, name))})
    traffic = _traffic(flags)
    runs = [_first_run(flags, *each, traffic, targets) for each in zip(files, profiles, strict=True)]
    jobs, rows, most = flags.jobs or os.cpu_count() or 1, list[PlanRow](), inf
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as folder:
        load = Path(folder) / "load.jsonl"
        load.write_bytes(traffic.lines())
        for profile, each, run in zip(profiles, gpus, runs, strict=True):
            if most < each:
                continue  # one worker of it takes more GPUs than a fleet that is known to do
            search = FleetSearch(_settings(flags, profile), int(min(flags.most, most // each)), targets, width=jobs)
            _search(search, msgspec.structs.replace(run, trace=str(load)), jobs, terminal)
            prices = Prices(flags.price, each, flags.kv_token_bytes, flags.watts_per_gpu)
            rows += rows_of(search, profile, prices, targets)
            most = min([row.gpus for row in rows if row.meets], default=inf)
    notes = [note for each in zip(files, profiles, strict=True) for note in _notes(flags, *each, traffic)]
    return report_of(rows, profiles[0].subject.model, traffic, targets, notes)


def _settings(flags: PlanFlags, profile: Profile) -> list[FleetSetting]:
    return settings_of(
        splits=flags.roles,
        policies=flags.policies.split(","),
        max_running=whole_numbers(flags.max_running or str(profile.subject.most), "--max-running", most=65_535)[::-1],
        step_s=numbers(flags.step_s, "--step-s"),
        store_tokens=[int(size * 1e9 / flags.kv_token_bytes) for size in numbers(flags.store_gb, "--store-gb")],
    )


def _first_run(flags: PlanFlags, file: Path, profile: Profile, traffic: Traffic, targets: Targets) -> VirtualRun:
    """Return what all runs with a profile have in common. Raise ConfigError if a request has no room."""
    kv_tokens = flags.kv_tokens or profile.kv_tokens
    if not kv_tokens:
        raise ConfigError(f"{file} does not say how many tokens of KV a worker has room for: give --kv-tokens")
    longest = max(row.input_length + row.output_length for row in traffic.rows)
    if longest > kv_tokens:
        raise ConfigError(f"a request has {longest} tokens, and a worker has room for {kv_tokens} tokens of KV")
    late_s, late_most = _late(targets, len(traffic.rows))
    return VirtualRun(
        trace="",
        block_size=traffic.block_size,
        times=str(file.absolute()),
        workers=0,
        machine_workers=profile.subject.workers,
        overhead_s=profile.overhead_s,
        kv_tokens=kv_tokens,
        overtakes="://" not in profile.subject.server and "vllm" not in profile.subject.server,
        late_s=late_s,
        late_most=late_most,
    )


def _gpus(given: str, profiles: Sequence[Profile]) -> list[int]:
    """Return the GPUs of a worker of each profile. Raise ConfigError."""
    if not given:
        return [gpus_of(each.subject.server) for each in profiles]
    words = given.split(",")
    if len(words) == len(profiles) and all(word.isdecimal() and 1 <= int(word) <= GPUS_LIMIT for word in words):
        return [int(word) for word in words]
    raise ConfigError(
        f"--gpus-a-worker {given}: give as many numbers from 1 to {GPUS_LIMIT} as profiles: {len(profiles)}"
    )


def gpus_of(server: str) -> int:
    """Return the GPUs of a worker that an `up` with these flags starts. 1 if they do not say it. Raise ConfigError if
    their file of vLLM's arguments cannot be read."""
    if "cuda" in server and (ranks := re.findall(r"--tensor-parallel[ =](\d+)", server)):
        return int(ranks[-1])
    settings = [(f"--vllm.{name}", size) for name, size in re.findall(r"worker\.vllm\.([\w-]+)=(\S+)", server)]
    files = re.findall(r"--vllm-args[ =](\S+)", server)
    try:
        return prod(parallel_sizes(settings, read_file(files[-1] if files else "")).values())
    except ConfigError as wrong:
        raise ConfigError(f"{wrong}; --gpus-a-worker says how many GPUs a worker has") from None


def _notes(flags: PlanFlags, file: Path, profile: Profile, traffic: Traffic) -> list[str]:
    """Return what a reader should know of the answers that follow from a profile."""
    subject, notes = profile.subject, list[str]()
    prompt = max(row.input_length for row in traffic.rows)
    running = max(setting.max_running for setting in _settings(flags, profile))
    if "://" in subject.server and not flags.gpus_a_worker:
        notes.append(f"{file}: {subject.server} does not say how many GPUs it has, 1 is assumed: give --gpus-a-worker")
    if not profile.complete:
        notes.append(f"{file} was cut short: some of its times follow from others; the same `profile` goes on with it")
    if prompt > subject.longest:
        notes.append(
            f"{file}: prompts have up to {prompt} tokens, and times are known up to {subject.longest}; beyond that they"
            f" are too low: profile with --longest {prompt}"
        )
    if running > subject.most:
        notes.append(
            f"{file}: times are known of up to {subject.most} answers at once, not of {running}: profile with --most"
            f" {running}"
        )
    return notes


def _search(search: FleetSearch, run: VirtualRun, jobs: int, terminal: Terminal) -> None:
    with ThreadPoolExecutor(jobs) as threads, ExitStack() as stack:  # the processes end before the threads
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(jobs):
            idle.put(stack.enter_context(_simulator()))

        def one(candidate: FleetCandidate) -> tuple[FleetCandidate, VirtualResult]:
            process = idle.get()
            try:
                return candidate, _ask(process, run_of(candidate, run))
            finally:
                idle.put(process)

        share = 0.0
        while wanted := search.next():
            for candidate, result in threads.map(one, wanted):
                search.add(candidate, result)
                done = len(search.results)
                share = max(share, done / (done + len(wanted)))  # more may be wanted later
                terminal.progress("plan", share)
    terminal.clear()


def run_of(candidate: FleetCandidate, run: VirtualRun) -> VirtualRun:
    """Return the run of a fleet."""
    setting = candidate.setting
    return msgspec.structs.replace(
        run,
        workers=0 if candidate.prefill else candidate.workers,
        prefill=candidate.prefill,
        decode=candidate.workers - candidate.prefill if candidate.prefill else 0,
        policy=setting.policy,
        max_running=setting.max_running,
        step_s=setting.step_s,
        store_tokens=setting.store_tokens,
    )


@contextmanager
def _simulator() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that simulates fleets, one after the other."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))}
    words = [sys.executable, "-P", "-m", "services.virtual"]
    process = subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[bytes], run: VirtualRun) -> VirtualResult:
    """Return what came of a run. Raise ConfigError if it could not be made, Unavailable if it did not end."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(RUN_LIMIT_S, process.kill)
    timer.start()
    try:
        process.stdin.write(msgspec.json.encode(run) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    finally:
        timer.cancel()
    if not line:
        raise Unavailable(f"the simulation of a fleet ended without a result, or took over {RUN_LIMIT_S:g} s")
    outcome = OUTCOME.decode(line)
    if isinstance(outcome, VirtualFailure):
        raise ConfigError(outcome.reason)
    return outcome


def _late(targets: Targets, requests: int) -> tuple[float, int]:
    """Return when a run is hopeless: the seconds after which first tokens are late, and the number of late ones above
    which it is. Zeros if there is no target for first tokens."""
    found = [
        (GIVEN_UP * limit, int((1 - SHARES[name[-3:]]) * requests))
        for name, limit in targets.limits.items()
        if name.startswith("ttft")
    ]
    return max(found, key=lambda each: each[1], default=(0.0, 0))


def _traffic(flags: PlanFlags) -> Traffic:
    if flags.trace is not None:
        traffic = read_trace(flags.trace, flags.requests)
        return traffic.stretched(flags.rate) if flags.rate else traffic
    if not flags.rate:
        raise ConfigError("give a load: --trace FILE, or --rate with --prompt-tokens and --output-tokens")
    return drawn_traffic(
        Lengths(
            rate=flags.rate,
            requests=flags.requests,
            prompt=flags.prompt_tokens,
            output=flags.output_tokens,
            spread=flags.spread,
            shared=flags.shared_tokens,
            seed=flags.seed,
        )
    )


def _check(flags: PlanFlags) -> None:
    """Raise ConfigError for numbers out of range, and without a target."""
    ranges: dict[str, tuple[float, float]] = {
        "requests": (2, REQUESTS_LIMIT),
        "prompt_tokens": (1, 1 << 24),
        "output_tokens": (1, 1 << 24),
        "shared_tokens": (0, flags.prompt_tokens),
        "spread": (0, 10),
        "rate": (0, 1e6),
        "price": (0, 1e9),
        "watts_per_gpu": (0, 1e6),
        "most": (1, WORKERS_LIMIT),
        "kv_tokens": (0, 1 << 40),
        "kv_token_bytes": (1, 1 << 30),
        "jobs": (0, 1024),
        **dict.fromkeys(TARGETS, (0, 86_400)),
    }
    check_ranges(flags, ranges)
    check_parent("--out", flags.out)
    if Path(flags.out).suffix in WRITTEN:
        raise ConfigError(f"--out {flags.out}: leave out {Path(flags.out).suffix}, which is that of another file")
    if not any(getattr(flags, name) for name in TARGETS):
        raise ConfigError("give a target, such as --ttft-p90 0.5 or --itl-p99 0.03")
    if flags.roles and not any(numbers(flags.store_gb, "--store-gb")):
        raise ConfigError("--roles needs a block store, through which prompts are handed over: give --store-gb")

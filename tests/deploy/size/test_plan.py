"""`headrace plan`: whether it finds what trying all fleets finds, what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from deploy.local.cli import main
from deploy.local.size.plan import gpus_of, plan_of, run_of
from deploy.local.size.search import FleetCandidate, FleetSetting, Targets
from deploy.local.size.traffic import Lengths, drawn_traffic
from deploy.local.terminal import Terminal
from deploy.local.usage import PlanFlags, UpFlags, parse
from services.virtual.run import run
from shared.errors import ConfigError
from shared.messages.virtual import VirtualRun

KV_TOKENS = 200_000


def write_profile(folder: Path, speed: float = 1.0, **changes: object) -> Path:
    """Write a profile of an engine of known timing: an 8B model on a GPU that is `speed` times as fast as an H200."""
    prefill = [
        (x, y, (0.005 + 28e-6 * x + 1.3e-9 * x * (y + x / 2)) / speed) for x in (64, 2048, 8192) for y in (0, 8192)
    ]
    decode = [(x, y, (0.0045 + 28e-9 * x * y) / speed) for x in (1, 16, 64) for y in (64, 8192)]
    subject = {
        "model": "made",
        "server": "--engine simulated --model made",
        "machine": "none",
        "versions": {},
        "longest": 8192,
        "most": 64,
    }
    content = {
        "subject": subject,
        "when": "2026-01-01T00:00:00Z",
        "complete": True,
        "overhead_s": 0.0,
        "cached_seen": True,
        "kv_tokens": KV_TOKENS,
        "prefill": prefill,
        "decode": decode,
        **changes,
    }
    file = folder / "profile.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def random_case(folder: Path, seed: int) -> PlanFlags:
    draw = Random(seed)
    return PlanFlags(
        profile=[str(write_profile(folder, draw.uniform(0.4, 1.5)))],
        rate=draw.uniform(2, 12),
        requests=60,
        prompt_tokens=draw.choice([500, 1500, 4000]),
        output_tokens=draw.choice([20, 60, 120]),
        shared_tokens=draw.choice([0, 256]),
        seed=seed,
        ttft_p90=draw.choice([0.2, 0.4, 0.8]),
        itl_p99=draw.choice([0.0, 0.04, 0.08]),
        most=5,
        max_running="8,64",
        step_s="0.25,0.05",
        policies="kv,round-robin",
        jobs=2,
    )


def best_of_all(flags: PlanFlags, folder: Path) -> tuple[int, float] | None:
    """Try all fleets; return the size and the worst ratio of the best one."""
    load = folder / "load.jsonl"
    lengths = Lengths(
        flags.rate,
        flags.requests,
        flags.prompt_tokens,
        flags.output_tokens,
        flags.spread,
        flags.shared_tokens,
        flags.seed,
    )
    made = drawn_traffic(lengths)
    load.write_bytes(made.lines())
    limits = {name: limit for name in ("ttft_p90", "itl_p99") if (limit := getattr(flags, name))}
    targets = Targets(limits)
    base = VirtualRun(
        trace=str(load), block_size=made.block_size, times=flags.profile[0], workers=0, kv_tokens=KV_TOKENS
    )
    found = []
    for workers, policy, most, step_s in product(range(1, 6), ("kv", "round-robin"), (64, 8), (0.25, 0.05)):
        candidate = FleetCandidate(workers, 0, FleetSetting(False, policy, most, step_s, 0))
        worst = targets.worst(run(run_of(candidate, base)))
        found += [(workers, worst)] if worst <= 1 else []
    return min(found, default=None)


def check_case(folder: Path, seed: int) -> bool:
    """Check that a plan finds the best fleet; return whether any fleet met the targets. Runs in this process keep the
    files that they have read, so that each case has a folder of its own."""
    folder = folder / str(seed)
    folder.mkdir()
    flags = random_case(folder, seed)
    planned, known = plan_of(flags, Terminal()), best_of_all(flags, folder)
    if known is None:
        assert planned.best is None
        return False
    assert planned.best is not None
    assert (planned.best.fleet.workers, max(planned.best.of_target.values())) == known
    return True


@pytest.mark.parametrize("seed", range(3))
def test_the_known_best_of_random_loads_is_found(seed: int, tmp_path: Path) -> None:
    check_case(tmp_path, seed)


@pytest.mark.tier("long")
def test_the_known_best_of_twenty_random_loads_is_found(tmp_path: Path) -> None:
    assert sum(check_case(tmp_path, seed) for seed in range(20)) >= 10


def test_a_plan_with_roles_says_what_it_costs_and_writes_flags_that_up_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = str(write_profile(tmp_path))
    load = ["--rate", "4", "--requests", "60", "--prompt-tokens", "1000", "--output-tokens", "50"]
    choice = ["--roles", "--store-gb", "0,20", "--most", "3", "--ttft-p90", "0.5"]
    choice += ["--price", "2.5", "--watts-per-gpu", "700"]
    assert main(["plan", "--profile", profile, *load, *choice, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert {row["fleet"]["prefill"] for row in made["rows"]} >= {0}
    assert made["best"]["price_an_hour"] == 2.5 * made["best"]["gpus"]
    per_money = made["best"]["watt_hours_a_million_tokens"] / made["best"]["price_a_million_tokens"]
    assert per_money == pytest.approx(700 / 2.5)
    flags = parse(["up", f"@{tmp_path / 'plan.up'}"])
    assert isinstance(flags, UpFlags)
    assert (flags.engine, flags.model, flags.workers) == ("simulated", "made", made["best"]["fleet"]["workers"])
    assert "worker.max_running=64" in flags.set
    assert main(["plan", "--profile", profile, *load, *choice]) == 0
    shown = capsys.readouterr().out
    assert "the cheapest that meets them: " in shown
    assert "PRICE/H" in shown
    assert "PRICE/M TOKENS" in shown
    assert ">price/h<" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_without_a_price_no_column_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load = ["--rate", "4", "--requests", "20", "--prompt-tokens", "100", "--output-tokens", "10"]
    words = ["plan", "--profile", str(write_profile(tmp_path)), *load, "--most", "1", "--ttft-p90", "5"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    head, row = (line.split("  ") for line in shown.splitlines()[3:5])
    assert [cell.strip() for cell in head if cell][:3] == ["FLEET", "GPUS", "TTFT P90 MS"]
    assert "PRICE" not in shown
    assert "0.00" not in [cell.strip() for cell in row]
    assert "price" not in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_of_two_profiles_the_one_that_takes_fewer_gpus_is_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--rate", "6", "--requests", "40", "--prompt-tokens", "1000", "--output-tokens", "50"]
    for number, speed in ((1, 0.4), (2, 0.7)):
        folder = tmp_path / str(number)
        folder.mkdir()
        subject = {"model": "made", "machine": "none", "versions": {}, "longest": 8192, "most": 64}
        server = f"--engine vllm --model made --set worker.vllm.tensor_parallel_size={number}"
        words += ["--profile", str(write_profile(folder, speed, subject={**subject, "server": server}))]
    assert main([*words, "--itl-p50", "0.0095", "--json"]) == 0  # one GPU is too slow whatever the number of workers
    made = json.loads(capsys.readouterr().out)
    assert made["best"]["gpus"] == 2 * made["best"]["fleet"]["workers"]
    assert "2 GPUs each" in made["best"]["name"]
    flags = parse(["up", "@plan.up"])
    assert isinstance(flags, UpFlags)
    assert "worker.vllm.tensor_parallel_size=2" in flags.set
    assert main([*words, "--itl-p50", "0.05", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["best"]["gpus"] == made["best"]["fleet"]["workers"]
    assert main([*words, "--itl-p50", "0.05", "--gpus-a-worker", "1"]) == 2
    assert "give as many numbers from 1 to 1024 as profiles: 2" in capsys.readouterr().err


def test_gpus_of_a_worker_follow_from_the_flags_of_its_up() -> None:
    assert gpus_of("--engine native --device cuda --model made") == 1
    assert gpus_of("--device cuda --tensor-parallel 4") == gpus_of("--device=cuda --tensor-parallel=4") == 4
    assert gpus_of("--tensor-parallel 4 --model made") == 1, "processes on a CPU"
    both = "--engine vllm --set worker.vllm.tensor_parallel_size=2 --set worker.vllm.pipeline_parallel_size=3"
    assert gpus_of(both) == 6
    assert gpus_of(f"{both} --set worker.vllm.tensor-parallel-size=4") == 12, "the last of a flag counts"
    assert gpus_of("--engine vllm --set worker.vllm.data_parallel_size=2 --set worker.vllm.max_num_seqs=8") == 2


def test_gpus_of_a_worker_follow_from_vllms_own_file_that_flags_override(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("tensor-parallel-size: 4\npipeline-parallel-size: 2\n", encoding="utf-8")
    file = f"--engine vllm --vllm-args {tmp_path}/args.yaml"
    assert gpus_of(file) == 8
    assert gpus_of(f"{file} --set worker.vllm.tensor_parallel_size=1") == 2
    with pytest.raises(ConfigError, match="No such file or directory; --gpus-a-worker says how many GPUs"):
        gpus_of("--engine vllm --vllm-args=none.yaml")


def test_what_a_plan_cannot_know_is_said_with_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = {"model": "made", "server": "http://host:8000/v1", "machine": "", "versions": {}}
    file = str(write_profile(tmp_path, subject={**subject, "longest": 2048, "most": 32}))
    words = ["plan", "--profile", file, "--rate", "1", "--requests", "10", "--ttft-p90", "9", "--spread", "0"]
    words += ["--most", "1", "--step-s", "0.25", "--jobs", "1", "--out", str(tmp_path / "plan.up")]
    assert main([*words, "--prompt-tokens", "8000", "--max-running", "64"]) == 0
    said = capsys.readouterr().out
    assert f"note: {file}: http://host:8000/v1 does not say how many GPUs it has, 1 is assumed: give --gpus" in said
    assert f"note: {file}: prompts have up to 8000 tokens, and times are known up to 2048; beyond that they" in said
    assert f"note: {file}: times are known of up to 32 answers at once, not of 64: profile with --most 64" in said
    assert main([*words, "--prompt-tokens", "2048", "--gpus-a-worker", "4", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["notes"], made["best"]["gpus"]) == ([], 4)


def shared_machine(folder: Path, slower: float) -> Path:
    """Write a profile of a machine with two workers that are `slower` times as slow while both are busy."""
    file = write_profile(folder)
    made = json.loads(file.read_text(encoding="utf-8"))
    busy = {kind: [(x, y, slower * seconds) for x, y, seconds in made[kind]] for kind in ("prefill", "decode")}
    return write_profile(folder, subject={**made["subject"], "workers": 2}, busy=busy)


def test_workers_that_slow_one_another_are_planned_with_it(tmp_path: Path) -> None:
    found = list[dict[int, float]]()
    for slower in (1.0, 1.5):
        file = shared_machine(tmp_path, slower)
        flags = PlanFlags(profile=[str(file)], rate=16, requests=80, prompt_tokens=1000, output_tokens=40, most=2)
        rows = plan_of(replace(flags, itl_p50=0.001, step_s="0.25", jobs=1), Terminal()).rows  # nothing meets that
        found.append({row.fleet.workers: row.result.itl_s.p50 for row in rows})
    equal, slowed = found
    assert slowed[1] == equal[1]  # it has the machine to itself
    assert 1.1 * equal[2] < slowed[2]


def test_targets_that_nothing_meets_end_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = str(write_profile(tmp_path))
    words = ["plan", "--profile", profile, "--rate", "4", "--requests", "40", "--itl-p99", "0.001", "--most", "2"]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "no fleet of those that were tried meets the targets; the nearest is " in said.out
    assert "note: steps with parts of prompts, of up to 0.05 s, are longer than that target: --step-s\n" in said.out
    assert "earlier plan" not in said.err
    assert not Path("plan.up").exists()
    Path("plan.up").write_text("--workers\n1\n", encoding="utf-8")
    assert main(words) == 1
    assert "note: plan.up is of an earlier plan\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a target"),
        (["--ttft-p90", "0.5"], "give a load: --trace FILE, or --rate"),
        (["--ttft-p90", "0.5", "--rate", "1", "--most", "0"], "--most is 1 to"),
        (["--ttft-p90", "0.5", "--rate", "1", "--roles"], "--roles needs a block store"),
        (["--ttft-p90", "0.5", "--rate", "1", "--kv-tokens", "100"], "a worker has room for 100 tokens of KV"),
        (["--ttft-p90", "0.5", "--rate", "1", "--step-s", "x"], "--step-s: 'x'"),
        (["--ttft-p90", "0.5", "--rate", "1", "--policies", "worst", "--jobs", "1"], "worst"),
        (["--ttft-p90", "0.5", "--trace", "none.jsonl"], "none.jsonl: No such file"),
        (["--ttft-p90", "0.5", "--rate", "1", "--out", "none/plan.up"], "no such directory: none"),
        (["--ttft-p90", "0.5", "--rate", "1", "--out", "plan.html"], "leave out .html"),
    ],
)
def test_what_cannot_be_planned_gets_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile", str(write_profile(tmp_path)), *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") <= 2


def test_a_profile_that_is_none_or_has_too_few_points_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rate", "1", "--ttft-p90", "1"]
    file = write_profile(tmp_path, decode=[])
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "too few points: let `profile` go on with it" in capsys.readouterr().err
    file.write_text("[]", encoding="utf-8")
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "no profile of `headrace profile`" in capsys.readouterr().err
    write_profile(tmp_path, subject={**json.loads(write_profile(tmp_path).read_text())["subject"], "workers": 2})
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "a profile of 2 workers without times of all" in capsys.readouterr().err
    write_profile(tmp_path, format=2)
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "a profile of format 2; this version reads 1" in capsys.readouterr().err
    write_profile(tmp_path, decode=[(1, 64, 0.01), (2, 8192, 0.01)])
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "decode is no complete grid of times above 0" in capsys.readouterr().err
    write_profile(tmp_path, subject={**json.loads(file.read_text())["subject"], "model": "made\nservices: {}"})
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "characters that cannot be printed" in capsys.readouterr().err
    write_profile(tmp_path, kv_tokens=0)
    assert main(["plan", "--profile", str(file), *words]) == 2
    assert "give --kv-tokens" in capsys.readouterr().err

"""What `headrace plan` writes: files that `up`, compose and the chart take, and a page that anyone can read."""

from __future__ import annotations

import shlex
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import yaml

from deploy.local.cli import main
from deploy.local.size.plan_files import FleetOrder, chart_values, compose_overlay, step_tokens, up_words
from deploy.local.size.plan_page import Measured, front_of, page
from deploy.local.size.plan_report import PlanReport, PlanRow
from deploy.local.size.search import FleetCandidate, FleetSetting
from deploy.local.usage import BenchFlags, UpFlags, parse
from services.worker.config import WorkerConfig
from shared.config import load
from shared.messages.virtual import Percentiles, VirtualResult
from tests.deploy.size.test_plan import write_profile
from tests.kubernetes.helm import named, render

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ["--engine", "simulated", "--model", "made"]
VLLM = ["--engine=vllm", "--model", "org/name", "--set=worker.vllm.tensor_parallel_size=2"]
FLAGS = [word for each in ("max-running=8", "vllm.max-num-seqs=8") for word in ("--set", f"worker.{each}")]
SPELLED = [*VLLM, *FLAGS, "--set", "worker.vllm.cudagraph_capture_sizes=[1,2,4]"]
RANKS = ["--engine", "native", "--device", "cuda", "--tensor-parallel", "2", "--set", "worker.cuda.graphs=false"]
MADE = [*NATIVE, "--set", "worker.simulated.speed=0.5", "--set", "worker.simulated.context_length=4096"]


def order(*, started: list[str], prefill: int = 0, store_bytes: int = 0) -> FleetOrder:
    setting = FleetSetting(bool(prefill), "kv", 16, 0.25, store_bytes)
    return FleetOrder(FleetCandidate(3, prefill, setting), "made", started, store_bytes, 2, 4096)


ORDERS = [
    order(started=NATIVE),
    order(started=NATIVE, prefill=1, store_bytes=1 << 30),
    order(started=VLLM, store_bytes=3 << 30),
    order(started=[]),
    order(started=SPELLED, store_bytes=3 << 30),
    order(started=RANKS),
    order(started=MADE),
]


class Reader(HTMLParser):
    """Reads the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.parametrize("made", ORDERS)
def test_flags_are_those_of_up(made: FleetOrder) -> None:
    flags = parse(["up", *up_words(made)])
    assert isinstance(flags, UpFlags)
    assert (flags.prefill, flags.decode) == ((1, 2) if made.fleet.prefill else (None, None))
    assert made.fleet.prefill or flags.workers == 3
    wanted = "worker.vllm.max_num_batched_tokens=4096" if made.engine == "vllm" else "worker.step_s=0.25"
    assert wanted in flags.set
    assert flags.set.count("worker.vllm.tensor_parallel_size=2") == (made.engine == "vllm")


@pytest.mark.parametrize("made", ORDERS)
def test_composes_overlay_names_its_services_and_settings_that_workers_have(made: FleetOrder) -> None:
    assert ("# Not in here, as no variable can hold it: vllm.cudagraph" in compose_overlay(made)) == (
        made.started == SPELLED
    )
    overlay = yaml.safe_load(compose_overlay(made))
    known = set[str]()
    for name in ("compose.yaml", "compose.roles.yaml") if made.fleet.prefill else ("compose.yaml",):
        known |= set(yaml.safe_load((ROOT / "deploy/compose" / name).read_text(encoding="utf-8"))["services"])
    assert set(overlay["services"]) <= known
    for name, replicas in (("worker", 3 - made.fleet.prefill), ("prefill", made.fleet.prefill)):
        if replicas:
            service = overlay["services"][name]
            assert service["deploy"]["replicas"] == replicas
            config = load(WorkerConfig, flags=["--model", "m"], environ=service["environment"])
            limits = {"max_num_seqs": "16", "max_num_batched_tokens": "4096"}
            assert config.max_running == 16 or config.vllm == {"tensor_parallel_size": "2", **limits}
            assert (config.tensor_parallel, config.cuda.graphs) == ((2, False) if made.started == RANKS else (1, True))
            simulated = (config.simulated.speed, config.simulated.context_length)
            assert (simulated == (0.5, 4096)) == (made.started == MADE)
    if made.store_bytes:
        assert f"size={made.store_bytes // (1 << 20) + 64}m" in overlay["volumes"]["pool"]["driver_opts"]["o"]
    else:
        assert overlay["services"]["kvbm"]["deploy"]["replicas"] == 0


@pytest.mark.parametrize("made", ORDERS)
def test_the_charts_values_fit_its_schema_and_render_the_planned_workers(made: FleetOrder, tmp_path: Path) -> None:
    file = tmp_path / "plan.values.yaml"
    file.write_text(chart_values(made), encoding="utf-8")
    sets = [each for each in named(render(file)).values() if each["kind"] == "StatefulSet"]
    workers = [each for each in sets if each["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"]
    assert sorted(each["spec"]["replicas"] for each in workers) == ([1, 2] if made.fleet.prefill else [3])
    gpus = [
        each["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu")
        for each in workers
    ]
    on_gpus = made.started in (VLLM, SPELLED, RANKS)
    assert {str(each) for each in gpus} == ({"2"} if on_gpus else {"None"})
    for each in yaml.safe_load(chart_values(made))["workers"].values():
        ranks = {"tensor_parallel": 2, "cuda": {"graphs": False}} if made.started == RANKS else {}
        assert ranks.items() <= each["settings"].items()
        if made.started == VLLM:
            assert each["settings"]["vllm"]["tensor_parallel_size"] == 2


def test_the_tokens_of_a_step_follow_from_the_measured_times_of_prompts() -> None:
    prefill = [(64.0, 0.0, 0.01), (2048.0, 0.0, 0.1), (8192.0, 0.0, 0.5), (64.0, 8192.0, 9.0)]
    assert step_tokens(prefill, 0.1) == 2048
    assert step_tokens(prefill, 0.3) == 5120
    assert step_tokens(prefill, 0.001) == 64
    assert step_tokens(prefill, 9.0) == 8192


def row(gpus: int, worst: float, *, given_up: bool = False) -> PlanRow:
    nothing = Percentiles(0.1, 0.1, 0.1)
    result = VirtualResult(
        ttft_s=nothing,
        itl_s=nothing,
        requests_per_s=1,
        output_tokens_per_s=1,
        hit_rate=0,
        failed=0,
        given_up=given_up,
    )
    fleet = FleetCandidate(gpus, 0, FleetSetting(False, "kv", 16, 0.25, 0))
    return PlanRow(fleet, "up", fleet.name, gpus, 0.0, worst <= 1, {"ttft_p90": worst}, 1, 1, 1, 0, 64, result)


def test_the_front_has_fleets_of_which_none_is_both_cheaper_and_better() -> None:
    rows = [row(2, 0.8), row(1, 4.0, given_up=True), row(1, 1.4), row(2, 0.9), row(3, 0.85), row(4, 0.5)]
    assert [(each.gpus, each.of_target["ttft_p90"]) for each in front_of(rows)] == [(1, 1.4), (2, 0.8), (4, 0.5)]


def test_names_and_flags_of_a_strange_profile_are_text_on_the_page() -> None:
    strange = """"'></textarea></title><script>x</script>"""
    good = msgspec.structs.replace(row(2, 0.8), server=f"--model {strange}", name=strange)
    made = PlanReport(strange, 10, 1.0, {"ttft_p90": 0.5}, good, "ttft_p90", [good, row(1, 1.4)])
    text = page(made, [Measured(strange, {"tokens": 1.0})])
    tags = [tag for tag, _ in Reader(text).found]
    assert "script" not in tags
    assert (tags.count("textarea"), tags.count("section")) == (2, 2)
    assert "<script" not in text


def test_the_page_needs_nothing_else_and_each_point_leads_to_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tmp_path / "bench.json"
    spread = '{"p50": 0.2, "p90": 0.3, "p99": null}'
    bench.write_text(
        f'{{"rows": [{{"load": "rate", "value": 4, "first_token_s": {spread}, "inter_token_s": {spread},'
        ' "tokens_per_s": 200, "more": 1}]}',
        encoding="utf-8",
    )
    out = tmp_path / "plan.up"
    words = ["plan", "--profile", str(write_profile(tmp_path)), "--rate", "4", "--requests", "40", "--ttft-p90", "0.5"]
    assert main([*words, "--most", "3", "--out", str(out), "--measured", str(bench)]) == 0
    written = "plan.html, plan.up, plan.compose.yaml, plan.values.yaml, plan.png: written"
    said = capsys.readouterr()
    assert f"{written}; ./headrace up @{out}\n" in said.err
    assert "planned and measured, rate 4:\nFIGURE " in said.out
    compared = next(line.split() for line in said.out.splitlines() if line.startswith("first token p90 "))
    assert compared[5:7] == ["300.0", "ms"]
    (command,) = (line.split() for line in said.err.splitlines() if line.startswith("the same load"))
    same = parse(command[command.index("bench") :])
    assert isinstance(same, BenchFlags)
    assert (same.tokens, same.rate, same.requests, same.words) == (True, "4", 40, 2048)
    assert (same.output_tokens, same.spread, same.shared_words) == (256, 0.5, 0)
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    read = Reader(text)
    tags = [tag for tag, _ in read.found]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert "http" not in text
    links = [attributes for tag, attributes in read.found if tag == "a" and "aria-label" in attributes]
    sections = {attributes["id"] for tag, attributes in read.found if tag == "section"}
    assert links
    assert len(links) == tags.count("circle") == len(sections)
    assert {str(each["href"]).removeprefix("#") for each in links} == sections
    flags = text.split('spellcheck="false">', 1)[1].split("</textarea>", 1)[0]
    assert isinstance(parse(shlex.split(flags)[1:]), UpFlags)
    assert "Planned and measured" in read.words
    assert "300.0 ms" in read.words
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((tmp_path / "plan.values.yaml").read_text(encoding="utf-8"))["kvbm"] == {"enabled": False}
    assert (tmp_path / "plan.compose.yaml").exists()


def test_a_plan_that_nothing_meets_writes_only_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.up"
    words = ["plan", "--profile", str(write_profile(tmp_path)), "--rate", "4", "--requests", "40", "--itl-p99", "0.001"]
    assert main([*words, "--most", "2", "--out", str(out)]) == 1
    assert "plan.html" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.glob("plan.*")) == ["plan.html", "plan.png"]
    assert "No fleet of those that were tried" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["[]", "{", '{"rows": [{"load": 1}]}'])
def test_a_file_that_bench_has_not_written_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    file.write_text(content, encoding="utf-8")
    words = ["--profile", str(write_profile(tmp_path)), "--rate", "1", "--ttft-p90", "1", "--measured", str(file)]
    assert main(["plan", *words]) == 2
    assert "no file of `headrace bench`" in capsys.readouterr().err

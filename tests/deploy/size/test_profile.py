"""`headrace profile` against an `up` that it starts, and against endpoints that it cannot measure."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest

from deploy.local.cli import main
from deploy.local.size.profile import ProfileOptions, fitted, together_s
from deploy.local.size.profile_file import Profile, decode_profile
from deploy.local.size.started_up import UpSizes, gpu_shares, gpus_in_turn, sizes_of
from deploy.local.size.token_client import TimedAnswer
from deploy.local.state import StateDirectory
from services.worker.config import SimulatedConfig
from services.worker.simulated.runner import read_times
from shared.errors import ConfigError
from tests.integration.stack import running
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

FIXED_S, TOKEN_S = 0.02, 0.0002
REFUSED = (1, 20)
"""The completions that a busy endpoint refuses."""


def profiled(folder: Path, *words: str, up: Sequence[str] = ()) -> int:
    """Profile a simulated engine of known timing."""
    timing = {"fixed_s": FIXED_S, "weights_s": 0, "row_s": 0, "token_s": TOKEN_S, "context_length": 4096}
    settings = [word for name, value in timing.items() for word in ("--simulated", f"{name}={value}")]
    model = folder / "tiny"
    if not model.exists():
        write_tiny_model(model)
    up = ["--engine", "simulated", "--model", str(model), "--discovery", "file", *settings, *up]
    sizes = ["--longest", "512", "--most", "4", "--out", str(folder / "p.json")]
    return main(["profile", *sizes, *words, "--", *up])


def written(folder: Path) -> Profile:
    return decode_profile((folder / "p.json").read_bytes(), "p.json")


def test_a_sweep_that_ran_out_of_time_goes_on_and_its_file_is_a_table_of_the_simulated_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiled(tmp_path, "--limit-s", "1") == 1
    said = capsys.readouterr().out
    assert "the same command goes on" in said
    assert "does not report cached tokens" not in said
    first = written(tmp_path)
    if not (first.prefill and first.decode):  # in a second few machines get further
        few = f"{len(first.points)} points are too few, as the corners of both grids are needed"
        assert f"{tmp_path / 'p.json'}: {few}; the same command goes on, and --limit-s gives it longer\n" in said
    assert not first.complete
    assert profiled(tmp_path) == 0
    made = written(tmp_path)
    assert made.complete
    for before, after in zip(first.points, made.points, strict=False):
        assert (before.kind, before.x, before.y) == (after.kind, after.x, after.y)
        assert after.times[: len(before.times)] == before.times
    assert len(made.points) > len(first.points)
    assert [point.kind for point in made.points[:8]] == ["decode", "prefill"] * 4, "both have their corners soon"
    in_grids = {("prefill", x, y) for x, y, _ in made.prefill} | {("decode", x, y) for x, y, _ in made.decode}
    for point in made.points:
        assert point.repetitions == len(point.times)
        takes_long = point.seconds * (32 if point.kind == "decode" else 1) > 5  # on a machine that is far too busy
        assert point.repetitions >= (3 if (point.kind, point.x, point.y) in in_grids and not takes_long else 2)
    assert (made.subject.model, made.block_size, made.kv_tokens) == ("tiny", 16, 4096 * 16)
    assert made.cached_seen
    prefill = {(x, y): seconds for x, y, seconds in made.prefill}
    # Nothing takes less than the simulated engine's steps; a busy machine only makes it more.
    assert prefill[512, 0] + made.overhead_s >= FIXED_S + 512 * TOKEN_S
    assert all(seconds > FIXED_S / 4 for _, _, seconds in made.decode)
    assert read_times(SimulatedConfig(table=str(tmp_path / "p.json"))) is not None
    assert profiled(tmp_path, "--most", "8") == 2
    assert "has a profile of another most: 4 there, 8 here" in capsys.readouterr().err


def options(longest: int = 0, most: int = 0) -> ProfileOptions:
    return ProfileOptions(
        longest=longest, most=most, limit_s=1, out=Path("p"), url="", workers=1, model="", api_key="", state=None
    )


@pytest.mark.parametrize(
    ("kv_tokens", "context", "found"),
    [
        (0, 0, (8192, 32)),
        (400_000, 131_072, (8192, 32)),
        (65_536, 65_536, (7872, 8)),
        (11_648, 8192, (1152, 8)),
        (400_000, 4096, (1984, 32)),
        (1024, 8192, (128, 2)),
    ],
)
def test_a_sweep_is_as_wide_as_the_worker_has_room_for(kv_tokens: int, context: int, found: tuple[int, int]) -> None:
    fit = fitted(options(), UpSizes(1, 16, kv_tokens, context))
    assert (fit.longest, fit.most) == found
    assert fitted(options(*found), UpSizes(1, 16, kv_tokens, context)) == fit


def test_what_was_not_asked_for_follows_from_what_was() -> None:
    room = UpSizes(1, 16, 65_536, 65_536)
    assert fitted(options(most=32), room).longest == 1728
    assert fitted(options(most=2), room).longest == 8192
    assert fitted(options(longest=16_384), room).most == 3


@pytest.mark.parametrize(("longest", "most"), [(2048, 32), (6016, 1), (1024, 11)])
def test_a_sweep_that_was_asked_for_and_has_no_room_is_refused_before_it_begins(longest: int, most: int) -> None:
    said = "; the worker has room for 11648, and a context of 8192 at most: give a shorter --longest, a smaller --most"
    with pytest.raises(ConfigError, match=said):
        fitted(options(longest, most), UpSizes(1, 16, 11_648, 8192))


def test_a_worker_without_room_for_the_sweep_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = ("--set", "worker.capacity_blocks=64")
    assert profiled(tmp_path, up=up) == 2
    assert "take 2240 tokens; the worker has room for 1024" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_each_point_of_several_workers_is_also_measured_while_all_are_busy(tmp_path: Path) -> None:
    assert profiled(tmp_path, "--longest", "128", "--most", "1", "--workers", "2") == 0
    made = written(tmp_path)
    assert made.subject.workers == 2
    assert made.busy is not None
    assert all(point.busy_s > FIXED_S / 4 for point in made.points)
    assert [point[:2] for point in made.busy.decode] == [point[:2] for point in made.decode]


class _Busy(BaseHTTPRequestHandler):
    """Passes requests on to `url`, but for some of the completions: for those it has no room."""

    url = ""
    asked: ClassVar[Iterator[int]]

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/completions" and next(self.asked) in REFUSED:
            self.send_error(429)
        else:
            self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        request = urllib.request.Request(self.url + self.path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                self.send_response(answer.status)
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()
        except (OSError, http.client.HTTPException):  # the client has what it wants of an endless answer
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_an_endpoint_that_has_no_room_for_a_moment_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    up = ("--engine", "simulated", "--simulated", "fixed_s=0.001", "--model", model, "--discovery", "file")
    sizes = ["--longest", "128", "--most", "1", "--out", str(tmp_path / "p.json")]
    with (
        running(tmp_path / "up", *up, "--workers", "1", "--set", "frontend.ui.serve=off") as fleet,
        ThreadingHTTPServer(("127.0.0.1", free_port()), _Busy) as server,
    ):
        _Busy.url, _Busy.asked = fleet.url.removesuffix("/v1"), count(1)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status = main(["profile", "--url", f"http://127.0.0.1:{server.server_port}/v1", *sizes])
        server.shutdown()
    assert status == 0
    assert capsys.readouterr().err.count("measured again in 1 s: ") == len(REFUSED)
    assert written(tmp_path).complete


def test_an_endpoint_that_refuses_for_good_is_not_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    up = ("--engine", "simulated", "--simulated", "fixed_s=0.001", "--model", model, "--discovery", "file")
    sizes = ["--longest", "8192", "--most", "1", "--out", str(tmp_path / "p.json")]
    with running(tmp_path / "up", *up, "--workers", "1") as fleet:  # of 2,048 tokens
        assert main(["profile", "--url", fleet.url, *sizes]) == 2
        said = capsys.readouterr().err
        assert f"error: {fleet.url}/completions: status 400: " in said
        assert "measured again" not in said


def test_gpus_are_divided_among_the_workers_that_are_measured_at_once() -> None:
    assert gpu_shares(["4", "5", "6", "7", "8"], 2) == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="--workers 3 needs as many GPUs; CUDA shows 2"):
        gpu_shares(["0", "1"], 3)


def test_workers_share_gpus_in_turn_where_these_are_fewer() -> None:
    assert gpus_in_turn(["1"], 2) == [("1", 2), ("1", 2)]
    assert gpus_in_turn(["4", "5"], 3) == [("4", 2), ("5", 1), ("4", 2)]


def answer(first_s: float, gaps_s: tuple[float, ...], tokens: int) -> TimedAnswer:
    return TimedAnswer(0.0, first_s, first_s + sum(gaps_s), tokens, None, gaps_s)


def test_a_decode_is_timed_while_all_answers_are_under_way() -> None:
    early = answer(1.0, (0.5, 0.5, *(0.1 for _ in range(10))), 13)  # its first steps compute the other's prompt, too
    late = answer(2.0, (*(0.1 for _ in range(10)), 0.03, 0.03), 13)  # and when it has ended, steps are shorter
    assert together_s([early, late], 8) == together_s([early, late, late], 9) == pytest.approx(0.1)
    assert together_s([early, late], 10) is None
    assert together_s([early, answer(9.0, (0.1, 0.1), 3)], 1) is None
    assert together_s([answer(1.0, (0.4,) * 10, 41)], 8) == pytest.approx(0.1), "four tokens a piece"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--longest", "64"], "--longest is 128 to"),
        (["--most", "4097"], "--most is 1 to 4096"),
        (["--limit-s", "0"], "--limit-s is 1 to 86400"),
        (["--out", "none/p.json"], "no such directory: none"),
        (["--url", "http://127.0.0.1:1/v1", "--", "--engine", "echo"], "give one of the two"),
        (["--", "--workers", "3"], "--workers: `profile` starts one worker in each"),
        (["--workers", "0"], "--workers is 1 to 16"),
        (["--workers", "2"], "give flags of `up` after --"),
        (["--url", "nowhere"], "not an address"),
    ],
)
def test_what_cannot_be_profiled_gets_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_an_endpoint_the_answer_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateDirectory(tmp_path)
    state.record.parent.mkdir(parents=True)
    state.record.write_text(json.dumps({"url": f"http://127.0.0.1:{free_port()}/v1"}))
    assert main(["profile", "--state", str(tmp_path), "--out", str(tmp_path / "p")]) == 1
    said = capsys.readouterr().err
    assert said.endswith("flags of `up` after -- start a worker to measure: -- --engine native\n")


def test_an_endpoint_that_is_not_there_and_a_file_that_is_no_profile_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--url", f"http://127.0.0.1:{free_port()}/v1", "--out", str(tmp_path / "p")]) == 1
    assert "does not answer" in capsys.readouterr().err
    (tmp_path / "p").write_text(json.dumps({"format": 7}))
    with pytest.raises(Exception, match="no profile of `headrace profile`"):
        written_as(tmp_path / "p")


def written_as(file: Path) -> Profile:
    return decode_profile(file.read_bytes(), str(file))


def test_an_endpoint_of_several_workers_is_refused_and_one_that_does_not_say_it_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    up = ("--engine", "simulated", "--simulated", "fixed_s=0.001", "--model", model, "--discovery", "file")
    sizes = ["--longest", "128", "--most", "1", "--out", str(tmp_path / "p.json"), "--limit-s", "1"]
    with running(tmp_path / "two", *up, "--workers", "2") as fleet:
        assert main(["profile", "--url", fleet.url, *sizes]) == 2
        said = capsys.readouterr().err
        assert (
            f"{fleet.url}: 2 workers serve tiny, which share the requests, and a profile has the times of one" in said
        )
        assert not (tmp_path / "p.json").exists()
    split = ("--prefill", "1", "--decode", "1", "--kvbm-bytes", "64M")
    with running(tmp_path / "split", *up, *split) as fleet:
        assert main(["profile", "--url", fleet.url, *sizes]) == 2
        assert "2 workers serve tiny" in capsys.readouterr().err
    with running(tmp_path / "one", *up, "--workers", "1") as fleet:
        assert main(["profile", "--url", fleet.url, *sizes]) in (0, 1)
        assert "how many workers" not in capsys.readouterr().out
        assert written(tmp_path).workers_seen
        assert written(tmp_path).block_size == 0, "the `up` of another state directory says nothing of this one"
    (tmp_path / "p.json").unlink()
    with running(tmp_path / "no-page", *up, "--workers", "1", "--set", "frontend.ui.serve=off") as fleet:
        assert main(["profile", "--url", fleet.url, *sizes]) in (0, 1)
        assert "note: the server does not say how many workers it has" in capsys.readouterr().out
        assert not written(tmp_path).workers_seen
        assert sizes_of(fleet.state, "tiny").workers == 1

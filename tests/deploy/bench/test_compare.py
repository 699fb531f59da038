"""`headrace bench` with fleets that it starts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.local.cli import main
from tests.tiny_model import write_tiny_model


def compared(folder: Path, *words: str, up: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """The exit status of a bench of simulated fleets, and what was written."""
    model = folder / "tiny"
    if not model.exists():
        write_tiny_model(model)
    fleet = ["--model", str(model), "--discovery", "file", "--routers", "1", "--frontends", "1", *up]
    load = ["--concurrency", "4", "--requests", "12", "--words", "64", "--output-tokens", "4"]
    status = main(["bench", *load, "--out", str(folder / "b"), *words, "--", *fleet])
    file = folder / "b.json"
    return status, json.loads(file.read_text()) if file.exists() else {}


def test_fleets_take_turns_with_the_same_requests_and_their_ratios_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--compare", "policy=round-robin,kv", "--rounds", "2", "--prefix-ratio", "0.5,0.9", "--tokens")
    status, report = compared(tmp_path, *flags, up=("--simulated", "speed=100"))
    assert status == 0
    turns = [(row["round"], row["variant"], row["prefix_ratio"]) for row in report["rows"]]
    assert turns == [
        (number, f"policy={policy}", share)
        for number, policies in ((1, ("round-robin", "kv")), (2, ("kv", "round-robin")))
        for policy in policies
        for share in (0.5, 0.9)
    ]
    for row in report["rows"]:
        assert (row["outcomes"], row["prompt_tokens"], row["short_answers"]) == ({"done": 12}, 64, 0)
        assert row["cached_ratio"] > 0  # the warm-up has sent the beginning
    assert {each["load"] for each in report["ratios"]} == {"concurrency 4, 50% shared", "concurrency 4, 90% shared"}
    assert report["url"] == ""
    assert report["versions"]["headrace"]
    out = capsys.readouterr().out
    assert "ratios are to policy=round-robin in the same round" in out
    assert "concurrency 4, 90% shared, policy=kv, round 2" in out


def test_one_fleet_at_a_time_and_topologies(tmp_path: Path) -> None:
    flags = ("--compare", "topology=aggregated,split", "--rounds", "1", "--one-at-a-time", "--scenarios", "decode")
    status, report = compared(tmp_path, *flags, up=("--simulated", "speed=100", "--kvbm-bytes", "64M"))
    assert status == 0
    assert [row["variant"] for row in report["rows"]] == ["topology=aggregated", "topology=split"]
    for row in report["rows"]:
        assert row["outcomes"] == {"done": 12}
        assert row["cached_ratio"] > 0.5  # the prompts were sent before


def test_the_highest_rate_that_a_fleet_sustains_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--simulated", "fixed_s=0.02", "--simulated", "weights_s=0", "--set", "worker.max_running=1")
    flags = ("--saturate", "--rate", "16", "--requests", "32", "--price", "3.5", "--concurrency", "")
    status, report = compared(tmp_path, *flags, up=(*step, "--workers", "1"))
    assert status == 0
    [found] = report["saturations"]
    # An answer takes four steps of 20 ms at least, one answer at a time; a busy machine only makes it more.
    assert found["rate"] is None or 0 < found["rate"] < 50
    assert found["why"]
    assert not found["at_least"]
    assert all(row["price_per_million_tokens"] > 0 for row in report["rows"])
    assert "SUSTAINED REQ/S" in capsys.readouterr().out


def test_sessions_of_agents_find_what_they_sent_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--agentic", "0.005", "--rate", "5", "--requests", "4", "--speed", "1000", "--concurrency", "", "--tokens")
    status, report = compared(tmp_path, *flags, up=("--simulated", "speed=100", "--simulated", "context_length=16384"))
    assert status == 0
    [row, *_] = report["rows"]
    assert row["complete"]
    assert row["short_answers"] == 0
    assert [turn["first"] for turn in row["turns"][:3]] == [1, 2, 5]
    assert row["turns"][2]["cached_ratio"] > 0.5
    assert "LOAD" in capsys.readouterr().out


def test_a_model_that_sees_no_images_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = compared(tmp_path, "--images", "1", "--concurrency", "1", "--requests", "2")
    assert (status, report) == (1, {})
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "error: concurrency 1: no request of the warm-up was answered: 400: messages[0].content[1].type"
    )
    assert "images are not served by " in line
    assert "ask a model that sees (docs/images.md)" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compare", "worker.no_such=1,2"), "the `up` for worker.no_such=1 did not start"),
        (("--compare", "policy=nonsense,kv"), "the `up` for policy=nonsense did not start"),
    ],
)
def test_a_fleet_that_does_not_start_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert compared(tmp_path, *words) == (1, {})
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: the `up`")]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:1/v1", "--compare", "policy=kv,random"], "give one of the two"),
        (["--driver", "aiperf", "--compare", "policy=kv,random"], "leave out --compare"),
        (["--prefix-ratio", "0.5", "--shared-words", "5"], "say the same"),
        (["--rounds", "0", "--", "--workers", "1"], "--rounds is 1 to 100"),
        (["--compare", "nonsense"], "not NAME=VALUE,VALUE"),
        (["--agentic", "1", "--words", "5", "--spread", "1"], "--spread: agents have prompts of their own"),
        (["--agentic", "1", "--speed", "1,2"], "--speed: with --agentic, one number"),
        (["--saturate", "--rate", "1,2"], "--saturate searches a rate"),
        (["--saturate", "--concurrency", "1"], "--saturate searches a rate"),
        (["--ttft-p90", "-1"], "--ttft-p90 is 0 to"),
        (["--agentic", "-1"], "--agentic is 0 to 10"),
        (["--images", "65"], "--images is 0 to 64"),
        (["--images", "1", "--image-size", "big"], "--image-size big: not WIDTHxHEIGHT"),
        (["--images", "1", "--tokens"], "--images: only the chats of the own driver have images"),
        (["--images", "1", "--driver", "aiperf"], "--images: only the chats of the own driver have images"),
        (["--images", "1", "--agentic", "1"], "--images: agents have prompts of their own"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err

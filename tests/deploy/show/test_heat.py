"""`headrace heat`: what several routers say as one table, and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.cli import main
from deploy.local.show.heat import merged, render
from deploy.local.show.heat_plot import draw
from shared.messages.people import HeatState, PrefixHeat
from tests.deploy.up_state import up_state


def prefix(block: int, asked: int, *, hits: int = 1, blocks: int = 4, age_s: float = 5.0) -> PrefixHeat:
    return PrefixHeat("m", f"{block:016x}", blocks, 16 * blocks, asked, hits, age_s, ["w1", "w2"], 1, 0)


STATES = [
    HeatState("r1", 100, 60.0, 500, 4000, [prefix(1, 10, hits=5), prefix(2, 3)]),
    HeatState("r2", 50, 600.0, 300, 4001, [prefix(1, 30, hits=25, age_s=2.0)]),
]


def test_the_requests_of_all_routers_are_added_and_the_hottest_come_first() -> None:
    found = merged(STATES)
    assert [(one.block, one.asked, one.hits, one.age_s) for one in found] == [
        (f"{1:016x}", 40, 30, 2.0),
        (f"{2:016x}", 3, 1, 5.0),
    ]


def test_the_table_says_what_it_rests_on() -> None:
    text = render(STATES, merged(STATES))
    assert "the latest 150 requests, of 10m, asked for 800 different blocks; 4001 blocks" in text
    assert "75 %" in text
    assert "no two of these requests share a whole block" in render(STATES, [])


def test_a_picture_is_drawn_also_of_nothing(tmp_path: Path) -> None:
    for name, rows in (("some.png", merged(STATES)), ("none.png", [])):
        draw(rows, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top", "0"], "--top is 1 to 100"),
        (["--top", "101"], "--top is 1 to 100"),
        (["--png", "/no/such/place/a.png"], "no such directory: /no/such/place"),
        ([], "no router is registered"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with up_state(tmp_path) as state:
        assert main(["heat", "--state", str(state), *words]) != 0
    refused = capsys.readouterr().err
    assert said in refused
    assert refused.count("\n") == 1

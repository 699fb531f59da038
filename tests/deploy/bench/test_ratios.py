from __future__ import annotations

from deploy.local.bench.plan import Point
from deploy.local.bench.ratios import ratios, render_ratios, unsteady
from deploy.local.bench.rows import BenchRow, Result, RowKey, row_of

POINT = Point("closed", 4, 1)


def measured(variant: str, number: int, first_s: float, seconds: float) -> BenchRow:
    result = Result(
        "done", first_s=first_s, last_s=first_s, ended_s=first_s, events=1, prompt_tokens=10, cached_tokens=5
    )
    return row_of(POINT, [result], seconds, 0.1, key=RowKey(variant, number))


ROWS = [
    measured("a", 1, 0.1, 1.0),
    measured("b", 1, 0.05, 0.5),
    measured("a", 2, 0.3, 1.0),
    measured("b", 2, 0.1, 0.25),
    measured("a", 3, 0.2, 1.0),
    measured("b", 3, 0.1, 0.5),
]


def test_a_ratio_is_of_two_fleets_in_the_same_round() -> None:
    found = {each.figure: each for each in ratios(ROWS, ["a", "b"])}
    first = found["TTFT s p50"]
    assert (first.load, first.variant, first.first, first.value) == ("concurrency 4", "b", 0.2, 0.1)
    assert (first.ratio, round(first.least, 6), first.most) == (0.5, 0.333333, 0.5)
    assert (found["tokens/s"].ratio, found["tokens/s"].most) == (2.0, 4.0)
    assert found["cached share"].ratio == 1.0
    head, *lines, note = render_ratios(list(found.values()), "a").splitlines()
    assert head.split() == ["LOAD", "FIGURE", "a", "FLEET", "ITS", "VALUE", "RATIO", "LEAST", "MOST"]
    assert lines[0].split() == ["concurrency", "4", "tokens/s", "1", "b", "2", "2.00", "2.00", "4.00"]
    times = next(line for line in lines if "TTFT ms p50" in line)
    assert times.split()[5:] == ["200", "b", "100", "0.50", "0.33", "0.50"]
    assert "above 1 is better for rates, worse for times" in note


def test_a_round_that_only_one_fleet_had_makes_no_ratio() -> None:
    assert ratios(ROWS[:1], ["a", "b"]) == []
    assert {each.most for each in ratios(ROWS[:3], ["a", "b"]) if each.figure == "tokens/s"} == {2.0}
    assert ratios(ROWS, ["a"]) == []


def test_rounds_of_one_fleet_that_differ_much_are_noted() -> None:
    [note] = unsteady(ROWS)
    assert note.startswith("note: concurrency 4, b: tokens a second differ by 100% between rounds")
    assert unsteady(ROWS[:3]) == []

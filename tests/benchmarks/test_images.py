"""benchmarks/images.py: four of five pictures were shown before, and figures are held against their goals."""

from __future__ import annotations

from benchmarks.images import CONVERSATIONS, TURNS, goals_of, pictures_shown


def test_of_five_pictures_four_were_shown_before_or_come_at_the_same_time() -> None:
    shown = pictures_shown(TURNS)
    assert [len(chat) for chat in shown] == [TURNS] * CONVERSATIONS
    in_order = [chat[turn] for turn in range(TURNS) for chat in shown]
    assert len(set(in_order)) == -(-TURNS * CONVERSATIONS // 5)
    for number in set(in_order):
        assert in_order.index(number) == 5 * number
    assert shown == pictures_shown(TURNS)


def test_a_figure_that_misses_its_goal_is_said_to_miss_it() -> None:
    cached = {
        "encoded": 6,
        "pictures": 5,
        "first_p50_s": 0.4,
        "encoded_after_kill": 0,
        "frontend_ratio": 1.4,
        "frontend_again_ratio": 0.4,
    }
    assert [goal.met for goal in goals_of({"first_p50_s": 1.0}, cached)] == [False, True, True, False, True]

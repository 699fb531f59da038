"""Arenas: which layout has which, and which one loses its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.pool.arenas import Arenas, NoArena

LAYOUTS = st.text("abcdef", min_size=1, max_size=1)


@given(st.integers(1, 4), st.lists(st.tuples(LAYOUTS, st.sets(LAYOUTS)), max_size=30))
def test_no_arena_has_two_layouts_and_none_is_taken_from_one_in_use(
    count: int, questions: list[tuple[str, set[str]]]
) -> None:
    arenas = Arenas(count)
    for layout, in_use in questions:
        before = {other: arenas.index(other) for other in arenas.layouts}
        try:
            given = arenas.assign(layout, in_use)
        except NoArena:
            assert len(before) == count
            assert set(before) <= in_use
            assert before == {other: arenas.index(other) for other in arenas.layouts}
            continue
        finally:
            arenas.validate()
        assert arenas.index(layout) == given.index
        if layout in before:
            assert given.index == before[layout]
        lost = set(before).difference(arenas.layouts)
        assert lost == ({given.former_layout} if given.former_layout is not None else set())
        assert not lost & in_use
        assert not lost or len(before) == count


def test_the_layout_longest_without_a_new_engine_loses_its_arena_first() -> None:
    arenas = Arenas(2)
    first = arenas.assign("a", ())
    second = arenas.assign("b", ())
    arenas.assign("a", ())
    third = arenas.assign("c", ())
    assert (third.former_layout, third.index) == ("b", second.index)
    assert arenas.index("b") is None
    assert arenas.index("a") == first.index


def test_a_layout_in_use_is_passed_over() -> None:
    arenas = Arenas(2)
    arenas.assign("a", ())
    arenas.assign("b", ())
    assert arenas.assign("c", ["a"]).former_layout == "b"
    with pytest.raises(NoArena, match=r"all 2 arenas of the pool are in use by the layouts a, c; .*: pool\.arenas of"):
        arenas.assign("b", ["a", "c"])


def test_after_a_restart_a_lone_layout_is_where_it_was() -> None:
    for layout in "abcdef":
        assert Arenas(4).assign(layout, ()) == Arenas(4).assign(layout, ())

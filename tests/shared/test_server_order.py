"""shared/server_order.py: every server is tried before one is tried again."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.server_order import ServerOrder


@given(st.integers(1, 5), st.lists(st.sampled_from(["failed", "lost", "answered"]), max_size=40), st.randoms())
def test_each_server_has_its_turn_and_a_pause_comes_after_all_have_failed(
    count: int, story: list[str], draw: Random
) -> None:
    names = [f"server {number}" for number in range(count)]
    order = ServerOrder(names, draw)
    assert order.several == (count > 1)
    tried, failures = [order.current], 0
    for event in story:
        before = order.current
        if event == "failed":
            failures += 1
            assert order.failed() == (failures % count == 0)
        else:
            failures = 0
            getattr(order, event)()
        if event == "answered":
            assert order.current == before
        else:
            tried.append(order.current)
    for at in range(len(tried) - count + 1):
        assert sorted(tried[at : at + count]) == names


def test_clients_spread_over_the_servers() -> None:
    first = {ServerOrder(["a", "b", "c"], Random(seed)).current for seed in range(40)}
    assert first == {"a", "b", "c"}

"""Engines whose models take turns on a GPU load one after the other, each when there is room."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from services.worker.native.cuda.turn_room import turn_room
from shared.errors import ModelError

LIMIT_S = 60.0


def nothing() -> None:
    """Hear nothing of a wait."""


def test_an_engine_waits_until_another_has_loaded_and_has_given_its_memory_back(tmp_path: Path) -> None:
    file, free, waits = tmp_path / "new" / "lock", [100], threading.Event()
    loaded: list[str] = []

    def second() -> None:
        with turn_room(file, 80, lambda: free[0], waits.set):
            loaded.append("second")

    with turn_room(file, 80, lambda: free[0], nothing):
        other = threading.Thread(target=second)
        other.start()
        assert waits.wait(LIMIT_S)
        free[0] = 20
        loaded.append("first")
    other.join(0.3)
    assert loaded == ["first"], "there is no room yet"
    free[0] = 80
    other.join(LIMIT_S)
    assert loaded == ["first", "second"]


def test_an_engine_without_room_says_how_much_it_needs_and_lets_others_load(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"no room for 80 bytes in 0 s.* given 79 back; lower cuda.memory_share"),
        turn_room(tmp_path / "lock", 80, lambda: 79, nothing, limit_s=0.0),
    ):
        pytest.fail("it loads")
    with turn_room(tmp_path / "lock", 80, lambda: 80, lambda: pytest.fail("it waits")):
        pass

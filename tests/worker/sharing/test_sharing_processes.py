"""Blocks between two real processes, in host memory and on GPUs: bytes, deaths, refusals, bounds.

With two GPUs, the reader uses the second one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import missing
from tests.worker.sharing.sharing_rig import PeerProcess, PeerRig
from tests.worker.transfer.devices import need_gpu

LARGE = {"fragments": 1, "fragment_bytes": 1 << 20, "slots": 64}
"""Blocks of which a group takes long enough to be killed in."""


def _reader_device() -> int:
    if missing():
        return 0
    cupy = need_gpu()
    return int(cupy.cuda.runtime.getDeviceCount()) - 1 and 1


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PeerRig]:
    if request.param == "cuda":
        need_gpu()
    with ExitStack() as opened:
        yield PeerRig(tmp_path, opened, kind=request.param)


def on_second(**settings: Any) -> dict[str, Any]:
    return {"device": _reader_device(), **settings}


def await_state(sharer: PeerProcess, **wanted: Any) -> None:
    """Wait until the sharer says so; it looks at the locks each time."""
    while True:
        state = sharer.ask("watch", 1)
        if all(state[name] == value for name, value in wanted.items()):
            return


@pytest.mark.parametrize("fragments", [1, 6])
@pytest.mark.parametrize("layer_major", [False, True])
def test_shared_blocks_are_copied_byte_for_byte_and_no_others(rig: PeerRig, fragments: int, layer_major: bool) -> None:
    shape = {"fragments": fragments, "slots": 40}
    sharer, reader = rig.connected(on_second(**shape, layer_major=layer_major), **shape)
    before = reader.ask("digests")
    assert reader.ask("read", 3, [5, 2, 39]) == [5, 2, 39]
    assert sharer.ask("state") == {"readers": ["reader"], "pinned": [2, 5, 39], "may_free": False}
    assert reader.ask("copy", [(5, 0), (2, 7), (39, 38)]) is True
    sent = sharer.blocks()
    expected = list(before)
    expected[0], expected[7], expected[38] = sent[5], sent[2], sent[39]
    assert reader.ask("digests") == expected
    assert sharer.ask("digests") == sent
    reader.ask("release", 3)
    await_state(sharer, readers=["reader"], pinned=[])


def test_blocks_are_shared_as_soon_as_they_are_there_in_order(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    sharer.ask("compute", 3)
    assert reader.ask("read", 1, [1, 2, 3, 0, 4]) == [1, 2]
    sharer.ask("compute", 4)
    assert reader.ask("answer", 1) == [3, 0]
    assert sharer.ask("state")["pinned"] == [0, 1, 2, 3]
    reader.ask("release", 1)
    await_state(sharer, pinned=[])
    sharer.ask("compute", 5)
    assert reader.ask("read", 2, [4]) == [4], "nothing more came of the first share"


def test_a_reader_sees_what_the_sharer_writes_between_two_shares(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    reader.ask("read", 1, [4])
    reader.ask("release", 1)
    await_state(sharer, pinned=[])
    sharer.ask("fill", 9)
    reader.ask("read", 2, [4])
    assert reader.ask("copy", [(4, 4)]) is True
    assert reader.ask("digests")[4] == sharer.blocks(9)[4]


def test_slots_stay_shared_to_a_reader_that_is_killed_until_its_lock_is_free(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second(**LARGE), **LARGE)
    slots = list(range(64))
    assert reader.ask("read", 1, slots) == slots
    reader.ask("copy_endlessly", [(slot, slot) for slot in slots])
    for _ in range(3):
        assert reader.heard() == "copied"
    assert sharer.ask("watch", 20)["pinned"] == slots
    reader.kill()
    await_state(sharer, readers=[], pinned=[])
    sharer.ask("fill", 5)
    assert sharer.ask("digests") == sharer.blocks(5)


def test_slots_stay_shared_to_a_reader_that_is_frozen_and_are_free_when_it_is_killed(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second(**LARGE), **LARGE)
    reader.ask("read", 1, [1, 2])
    reader.ask("copy_endlessly", [(1, 1), (2, 2)])
    reader.heard()
    reader.process.send_signal(signal.SIGSTOP)
    assert sharer.ask("watch", 300)["pinned"] == [1, 2]
    sharer.ask("close_sharing")
    assert sharer.ask("watch", 300) == {"readers": ["reader"], "pinned": [1, 2], "may_free": False}
    reader.process.kill()
    await_state(sharer, readers=[], pinned=[], may_free=True)


def test_a_frozen_reader_goes_on_where_it_was(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    reader.ask("read", 1, [1, 2])
    reader.process.send_signal(signal.SIGSTOP)
    assert sharer.ask("watch", 100)["pinned"] == [1, 2]
    reader.process.send_signal(signal.SIGCONT)
    assert reader.ask("copy", [(1, 0), (2, 3)]) is True
    reader.ask("release", 1)
    await_state(sharer, pinned=[])
    assert [reader.ask("digests")[slot] for slot in (0, 3)] == sharer.blocks()[1:3]


def test_what_a_frozen_sharer_has_shared_can_be_read(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    reader.ask("read", 1, [1, 2])
    sharer.process.send_signal(signal.SIGSTOP)
    assert reader.ask("copy", [(1, 0), (2, 3)]) is True
    assert [reader.ask("digests")[slot] for slot in (0, 3)] == sharer.blocks()[1:3]
    reader.ask("release", 1)
    sharer.process.send_signal(signal.SIGCONT)
    await_state(sharer, readers=["reader"], pinned=[])


def test_a_reader_discards_what_it_copies_when_the_sharer_is_killed(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second(**LARGE), **LARGE)
    pairs = [(slot, slot) for slot in range(64)]
    reader.ask("read", 1, list(range(64)))
    reader.ask("copy_endlessly", pairs)
    for _ in range(3):
        assert reader.heard() == "copied"
    sharer.kill()
    while (heard := reader.heard()) == "copied":
        pass
    assert heard == "discarded"
    assert reader.ask("state")["ended"] != ""
    assert reader.ask("copy", pairs) is False
    assert reader.ask("digests") == sharer.blocks(), "the memory is there for as long as it is mapped"
    reader.ask("leave")
    other = rig.start("share", "other", **LARGE).ready()
    assert reader.ask("connect", "other") == "", "the reader still works, with another sharer"
    reader.ask("read", 1, [3])
    assert reader.ask("copy", [(3, 3)]) is True
    assert reader.ask("digests")[3] == other.blocks()[3]


def test_a_reader_that_comes_again_has_nothing_of_its_former_shares(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    reader.ask("read", 1, [1, 2])
    assert reader.ask("connect", "sharer") == ""
    await_state(sharer, readers=["reader"], pinned=[])


def test_a_sharer_that_closes_may_free_its_memory_once_every_reader_has_left(rig: PeerRig) -> None:
    sharer, reader = rig.connected(on_second())
    reader.ask("read", 1, [1])
    sharer.ask("close_sharing")
    assert reader.ask("read", 2, [2]) == "closing"
    assert reader.ask("state") == {"ended": "", "closing": True}
    assert reader.ask("copy", [(1, 1)]) is True, "what is shared stays shared"
    assert sharer.ask("state")["may_free"] is False
    reader.ask("leave")
    await_state(sharer, readers=[], pinned=[], may_free=True)
    late = rig.start("read", "late").ready()
    assert "shares nothing more" in late.ask("connect", "sharer")


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"model": "another"}, "model is another"),
        ({"layout": "fedcba9876543210"}, "layout is fedcba9876543210"),
        ({"dtype": "float16"}, "dtype is float16"),
        ({"rank": 1, "ranks": 2}, "rank is 1"),
        ({"ranks": 2}, "one of 2 ranks"),
        ({"generation": 78}, "generation 78 is gone"),
        ({"fragments": 3}, "blocks of 6 x 832 bytes, here 3 x 832"),
        ({"fragment_bytes": 416}, "blocks of 6 x 832 bytes, here 6 x 416"),
    ],
)
def test_other_memory_than_wanted_is_refused_before_it_is_mapped(
    rig: PeerRig, differs: dict[str, Any], why: str
) -> None:
    sharer, reader = rig.pair(on_second(**differs))
    assert why in reader.ask("connect", "sharer")
    reader.ask("leave")
    await_state(sharer, readers=[], pinned=[])


def test_readers_shares_and_blocks_are_bounded(rig: PeerRig) -> None:
    limits = {"readers": 2, "shares": 2, "blocks": 5}
    sharer, reader = rig.connected(on_second(), limits=limits)
    second, third = (rig.start("read", name).ready() for name in ("second", "third"))
    assert second.ask("connect", "sharer") == ""
    assert "there are 2 readers already" in third.ask("connect", "sharer")
    assert reader.ask("read", 1, [1, 2, 3]) == [1, 2, 3]
    assert second.ask("read", 1, [1, 2, 3]) == "limit", "6 blocks of at most 5"
    assert second.ask("read", 2, [3, 4]) == [3, 4]
    reader.ask("release", 1)
    await_state(sharer, pinned=[3, 4])
    assert reader.ask("read", 2, [7]) == [7]
    assert reader.ask("read", 3, [8]) == [8]
    assert reader.ask("read", 4, [9]) == "limit", "a third share"
    second.ask("leave")
    await_state(sharer, readers=["reader"], pinned=[7, 8])
    assert third.ask("connect", "sharer") == ""


def test_a_reader_without_a_held_lock_is_refused(rig: PeerRig, tmp_path: Path) -> None:
    _, reader = rig.pair(on_second())
    (tmp_path / "owners" / "reader").unlink()
    assert "no living process holds the lock" in reader.ask("connect", "sharer")


def test_a_reader_cannot_write_to_what_it_has_mapped(tmp_path: Path) -> None:
    with ExitStack() as opened:
        sharer, reader = PeerRig(tmp_path, opened).connected()
        reader.tell("poke")
        assert reader.process.wait() == -signal.SIGSEGV
        assert sharer.ask("digests") == sharer.blocks()

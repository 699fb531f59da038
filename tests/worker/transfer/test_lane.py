"""Tests of the comparison of loaded blocks with the pool."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.contracts.mover import Copied, Copy
from services.worker.transfer.host_copier import FinishedCopies, HostCopier
from tests.worker.transfer.devices import BLOCK_BYTES, HostDevice
from tests.worker.transfer.mover_rig import MoverRig, rigged


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def verifying(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MoverRig]:
    yield from rigged(request.param, tmp_path, verify=True)


def test_correct_loads_pass_the_comparison(verifying: MoverRig) -> None:
    blocks = [verifying.fill(slot, slot) for slot in range(4)]
    verifying.mover.save(1, [Copy(slot, slot) for slot in range(4)], 1.0)
    verifying.ended()
    verifying.mover.load(2, [Copy(slot, 8 + slot) for slot in range(4)])
    assert verifying.ended() == [Copied(2, [True] * 4, 4 * BLOCK_BYTES, 0.0)]
    assert [verifying.device.read(8 + slot) for slot in range(4)] == blocks


class FaultyCopier(HostCopier):
    """Loads the `faulty` pool slots wrongly.

    The `granted` slots are granted to another engine, which writes to them, between a load and its comparison; the
    `late` slots right after the comparison.
    """

    def __init__(self, device: HostDevice) -> None:
        super().__init__(device.copier.shape, device)
        self.faulty: set[int] = set()
        self.granted: set[int] = set()
        self.late: set[int] = set()
        self.grant: Callable[[int], None] = lambda _slot: None

    def begin(self, copies: Sequence[Copy], *, loads: bool) -> FinishedCopies:
        done = super().begin(copies, loads=loads)
        for copy in copies:
            if loads and copy.pool_slot in self.faulty:
                last = self.shape.regions[-1] + copy.device_slot * self.shape.stride_bytes
                byte = ctypes.c_ubyte.from_address(last + self.shape.fragment_bytes - 1)
                byte.value ^= 1
        return done

    def differs(self, copies: Sequence[Copy]) -> list[bool]:
        self._become_others(copies, self.granted)
        told = super().differs(copies)
        self._become_others(copies, self.late)
        return told

    def _become_others(self, copies: Sequence[Copy], slots: set[int]) -> None:
        for copy in copies:
            if copy.pool_slot in slots:
                self.grant(copy.pool_slot)


SOME = st.sets(st.integers(0, 7))


@given(faulty=SOME, granted=SOME, late=SOME, group=st.integers(1, 8))
@settings(max_examples=60)
def test_a_differing_block_is_a_fault_unless_its_slot_was_reused_meanwhile(
    faulty: set[int], granted: set[int], late: set[int], group: int
) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    with TemporaryDirectory() as directory:
        rig = MoverRig(Path(directory) / "pool", device, verify=True, most_blocks=group)
        blocks = [rig.fill(slot, slot) for slot in range(8)]
        rig.mover.save(1, [Copy(slot, slot) for slot in range(8)], 1.0)
        rig.ended()

        def grant(slot: int) -> None:
            rig.kvbm.grant(slot)
            with rig.kvbm.slot(slot) as memory:
                memory[:8] = b"another\0"

        copier.faulty, copier.granted, copier.late, copier.grant = faulty, granted, late, grant
        rig.mover.load(2, [Copy(slot, 8 + slot, rig.kvbm.generation(slot)) for slot in range(8)])
        [copied] = rig.ended()
        anothers = granted | late
        assert copied.good == [slot not in faulty | anothers for slot in range(8)]
        assert copied.differing == len(faulty - anothers)
        assert all(rig.device.read(8 + slot) == blocks[slot] for slot, good in enumerate(copied.good) if good)
        rig.close()


def test_a_differing_block_is_logged_once_as_critical(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    copier.faulty = {3}
    rig = MoverRig(tmp_path / "pool", device, verify=True)
    for batch in (1, 2):
        rig.mover.load(batch, [Copy(slot, slot) for slot in range(5)])
        assert rig.ended()[0].differing == 1
    rig.close()
    [record] = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.message.startswith(
        "WRONG BYTES: after a load of the pool's slot 3 into the device's slot 3, on one of"
    )


def test_without_verify_nothing_is_compared(tmp_path: Path) -> None:
    device = HostDevice()
    device.copier = copier = FaultyCopier(device)
    copier.faulty = {3}
    rig = MoverRig(tmp_path / "pool", device)
    rig.mover.load(1, [Copy(3, 3)])
    assert rig.ended()[0].good == [True]
    rig.close()

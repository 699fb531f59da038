"""read_blocks: a loan is asked after before each group and after the last, and nothing is under way when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from services.worker.mover import Copy
from services.worker.transfer.errors import DeviceFailed
from services.worker.transfer.peer.reader import DEPTH, read_blocks

GROUP, GROUPS = 4, 5
COPIES = [Copy(slot, slot) for slot in range(GROUP * GROUPS - 1)]


class Flight:
    """A Pending that ends when it is waited for."""

    paths: Mapping[str, int] = {}
    fallbacks: Mapping[str, int] = {}

    def __init__(self, copier: SlowCopier, group: Sequence[Copy]) -> None:
        self._copier = copier
        self._group = group

    def wait(self) -> None:
        self._copier.under_way.remove(self)
        self._copier.copied += self._group


class SlowCopier:
    """A PeerCopier whose copies end late, and which may fail to begin a group."""

    group_blocks = GROUP

    def __init__(self, fails_at: int = -1) -> None:
        self.under_way: list[Flight] = []
        self.most_under_way = self.begun = 0
        self.copied: list[Copy] = []
        self._fails_at = fails_at

    def begin(self, copies: Sequence[Copy]) -> Flight:
        if self.begun == self._fails_at:
            raise DeviceFailed("cudaErrorUnknown: of a test")
        self.begun += 1
        self.under_way.append(Flight(self, copies))
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return self.under_way[-1]

    def close(self) -> None: ...


def test_all_blocks_are_copied_in_groups_of_which_few_are_under_way() -> None:
    copier = SlowCopier()
    assert read_blocks(copier, COPIES, lambda: True) is True
    assert copier.copied == COPIES
    assert (copier.begun, copier.most_under_way, copier.under_way) == (GROUPS, DEPTH, [])


@pytest.mark.parametrize("asked", range(GROUPS + 1))
def test_when_the_loan_ends_no_further_group_begins_and_nothing_counts(asked: int) -> None:
    copier = SlowCopier()
    answers = iter([True] * asked + [False])
    assert read_blocks(copier, COPIES, lambda: next(answers)) is False
    assert (copier.begun, copier.under_way) == (asked, [])


def test_when_a_group_cannot_begin_those_before_it_have_ended() -> None:
    copier = SlowCopier(fails_at=3)
    with pytest.raises(DeviceFailed):
        read_blocks(copier, COPIES, lambda: True)
    assert copier.copied == COPIES[: 3 * GROUP]
    assert copier.under_way == []

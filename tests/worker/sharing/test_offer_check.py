"""What a reader believes of an offer: everything that it names is checked before a byte is mapped."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.worker.sharing.messages import PROTOCOL, Import, Offer, SharingIdentity, SlotShape
from services.worker.sharing.offer_check import check_offer
from services.worker.sharing.shares import SharingRefused
from tests.worker.transfer.layer_major import layer_major

IDENTITY = SharingIdentity("a-model", "0123456789abcdef", "bfloat16")
OWN = layer_major(4096, 2, 64, 10)
SHAPE = SlotShape((0, 1280), 64, 64, 20)
OFFER = Offer(PROTOCOL, "sharer", IDENTITY, 7, "00ff", 2560, SHAPE)


def check(asked_generation: int = 0, descriptors: int = 1, **differs: Any) -> None:
    asked = Import(PROTOCOL, "reader", IDENTITY, asked_generation)
    check_offer(msgspec.structs.replace(OFFER, **differs), asked, OWN, descriptors, "sharer")


@pytest.mark.parametrize("generation", [0, 7])
def test_the_offer_that_was_asked_for_is_believed(generation: int) -> None:
    check(generation)


@pytest.mark.parametrize(
    ("code", "differs"),
    [
        ("protocol", {"protocol": 2}),
        ("unproven", {"owner": "another"}),
        ("generation", {"asked_generation": 8}),
        ("memory", {"descriptors": 0}),
        ("memory", {"descriptors": 5}),
        ("memory", {"size_bytes": 2559}),
        ("memory", {"shape": SlotShape((0, 1281), 64, 64, 20)}),
        ("memory", {"shape": SlotShape((0, 1280), 64, 65, 20)}),
        ("memory", {"shape": SlotShape((0, 1280), 64, 64, 21)}),
        ("memory", {"shape": SlotShape((0, 1280), 64, 64, 0)}),
        ("layout", {"shape": SlotShape((0,), 64, 64, 20)}),
        ("layout", {"shape": SlotShape((0, 1280), 32, 64, 20)}),
        ("layout", {"shape": SlotShape((0, 1280), 64, 63, 20)}),
        ("model", {"identity": msgspec.structs.replace(IDENTITY, model="b")}),
        ("kind", {"identity": msgspec.structs.replace(IDENTITY, kind="host")}),
        ("layout", {"identity": msgspec.structs.replace(IDENTITY, layout="b")}),
        ("dtype", {"identity": msgspec.structs.replace(IDENTITY, dtype="float16")}),
        ("rank", {"identity": msgspec.structs.replace(IDENTITY, rank=1)}),
        ("rank", {"identity": msgspec.structs.replace(IDENTITY, ranks=2)}),
    ],
)
def test_any_other_offer_is_refused(code: str, differs: dict[str, Any]) -> None:
    with pytest.raises(SharingRefused) as refused:
        check(**differs)
    assert refused.value.code == code

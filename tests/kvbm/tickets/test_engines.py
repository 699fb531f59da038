from __future__ import annotations

from contextlib import nullcontext
from itertools import permutations

import msgspec
import pytest

from services.kvbm.tickets.engines import FORM_BYTES_MOST, FORM_CHARACTERS_MOST, NAME_CHARS, AttachedEngines
from services.kvbm.tickets.errors import BadRequest, UnknownOwner, WrongLayout
from shared.messages.cards import KvLayout
from shared.messages.kvbm import Attach, StoreLayout

LAYOUT = StoreLayout("m", "w", KvLayout("bfloat16", 2, 3, 4, 16))
OTHER = msgspec.structs.replace(LAYOUT, rank=1)


def test_an_engine_is_of_one_worker_and_one_layout_until_it_is_dead() -> None:
    engines = AttachedEngines()
    with pytest.raises(UnknownOwner):
        engines.layout_of("a", 1)
    engines.add(Attach("w1", "a", LAYOUT), 1)
    engines.add(Attach("w1", "b", OTHER), 1)
    engines.add(Attach("w2", "c", LAYOUT), 1)
    assert engines.layout_of("a", 1) == LAYOUT.digest
    assert engines.of_worker("w1") == [("a", LAYOUT.digest), ("b", OTHER.digest)]
    assert engines.layouts() == {LAYOUT.digest, OTHER.digest}
    engines.check(Attach("w1", "a", LAYOUT), 1)
    with pytest.raises(WrongLayout, match=LAYOUT.digest):
        engines.check(Attach("w1", "a", OTHER), 1)
    assert engines.remove("a")
    assert not engines.remove("a")
    engines.check(Attach("w1", "a", OTHER), 1)


OLD, NEW = 1, 2
"""Two connections, the second of which was made after the first was closed."""


@pytest.mark.parametrize("order", sorted(set(permutations((OLD,) * 3 + (NEW,) * 3))), ids=str)
def test_an_attach_ends_what_came_and_comes_through_older_connections_in_any_order(order: tuple[int, ...]) -> None:
    engines = AttachedEngines()
    engines.add(Attach("w1", "a", LAYOUT), OLD)
    left = {OLD: ["ask", "attach", "ask"], NEW: ["attach", "ask", "attach"]}
    newest = OLD
    for connection in order:
        if left[connection].pop(0) == "ask":
            with nullcontext() if connection == newest else pytest.raises(UnknownOwner, match="another connection"):
                assert engines.layout_of("a", connection) == LAYOUT.digest
        elif connection >= newest:
            engines.check(Attach("w1", "a", LAYOUT), connection)
            engines.add(Attach("w1", "a", LAYOUT), connection)
            newest = connection
        else:
            with pytest.raises(UnknownOwner, match="newer connection"):
                engines.check(Attach("w1", "a", LAYOUT), connection)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [-1, 0, (1 << 20) + 1, 1 << 62])
def test_a_layout_of_impossible_size_is_refused(field: str, value: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, kv=msgspec.structs.replace(LAYOUT.kv, **{field: value}))
    with pytest.raises(BadRequest, match=f"{field} of the layout is {value}"):
        AttachedEngines().check(Attach("w1", "a", layout), 1)


@pytest.mark.parametrize("reply_s", [-1.0, float("nan"), float("inf")])
def test_a_bound_for_replies_that_is_no_number_of_seconds_is_refused(reply_s: float) -> None:
    with pytest.raises(BadRequest, match="reply_s"):
        AttachedEngines().check(Attach("w1", "a", LAYOUT, reply_s), 1)


def test_kv_of_an_unknown_type_and_a_worker_that_is_none_are_refused() -> None:
    strange = msgspec.structs.replace(LAYOUT, kv=msgspec.structs.replace(LAYOUT.kv, dtype="x" * 1000))
    with pytest.raises(BadRequest, match="bfloat16"):
        AttachedEngines().check(Attach("w1", "a", strange), 1)
    with pytest.raises(BadRequest, match="worker"):
        AttachedEngines().check(Attach("w 1", "a", LAYOUT), 1)


@pytest.mark.parametrize("field", ["model", "weights"])
def test_names_are_bounded_since_all_accounts_have_them(field: str) -> None:
    AttachedEngines().check(Attach("w1", "a", msgspec.structs.replace(LAYOUT, **{field: "x" * NAME_CHARS})), 1)
    with pytest.raises(BadRequest, match="1024 characters"):
        AttachedEngines().check(
            Attach("w1", "a", msgspec.structs.replace(LAYOUT, **{field: "x" * (NAME_CHARS + 1)})), 1
        )


FORM = msgspec.structs.replace(LAYOUT.kv, dtype="fp8_e4m3", form="0123456789abcdef", form_bytes=4096)


def attach_of(kv: KvLayout) -> Attach:
    return Attach("w1", "a", msgspec.structs.replace(LAYOUT, kv=kv))


def test_a_form_of_another_engine_may_have_any_dtype_and_its_size_is_its_own() -> None:
    AttachedEngines().check(attach_of(FORM), 1)
    assert FORM.block_bytes == 4096


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"form": "x" * (FORM_CHARACTERS_MOST + 1)}, f"over {FORM_CHARACTERS_MOST} characters"),
        ({"dtype": "x" * (FORM_CHARACTERS_MOST + 1)}, f"over {FORM_CHARACTERS_MOST} characters"),
        ({"form_bytes": 0}, "form_bytes of the layout is 0"),
        ({"form_bytes": -1}, "form_bytes of the layout is -1"),
        ({"form_bytes": FORM_BYTES_MOST + 1}, f"form_bytes of the layout is {FORM_BYTES_MOST + 1}"),
        ({"layers": 0}, "layers of the layout is 0"),
        ({"form": "", "dtype": "bfloat16"}, "form_bytes of the layout is 4096, but it has no form"),
    ],
)
def test_a_bad_form_is_refused_with_the_reason(changes: dict[str, object], reason: str) -> None:
    engines = AttachedEngines()
    with pytest.raises(BadRequest, match=reason):
        engines.check(attach_of(msgspec.structs.replace(FORM, **changes)), 1)
    assert engines.layouts() == set()


def test_a_form_at_its_bounds_is_taken() -> None:
    largest = msgspec.structs.replace(FORM, form="x" * FORM_CHARACTERS_MOST, form_bytes=FORM_BYTES_MOST)
    AttachedEngines().check(attach_of(largest), 1)

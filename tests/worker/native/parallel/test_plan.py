"""What ranks hear of a step."""

from __future__ import annotations

from array import array

import numpy as np

from services.worker.contracts.messages import Operate
from services.worker.contracts.runner import Work
from services.worker.native.parallel.plan import PlannedWork, decode_plan, encode_operation, encode_plan
from services.worker.native.step import lay_out
from shared.messages.generate import Sampling
from tests.worker.native.works import work

WORKS = [
    work(array("I", range(40)), [9, 8, 7, 6, 5], start=16),
    work([1, 2, 3], [0, 3], start=2),
    work([4] * 33, [1, 2, 4], start=32, draws=False),
    work([5] * 20, [10, 11], sampling=Sampling(max_tokens=1, pooling="mean")),
]


def heard(works: list[Work]) -> list[PlannedWork]:
    plan = decode_plan(encode_plan(works, 16))
    assert isinstance(plan, list)
    return plan


def test_an_operation_arrives_as_it_was_given() -> None:
    order = Operate(0, "load_lora", "poet", "/srv/poet")
    assert decode_plan(bytearray(encode_operation(order))) == order


def test_a_plan_has_the_lora_of_each_work() -> None:
    works = [work([1, 2, 3], [0]), work([4, 5], [1])]
    works[1].lora = "poet"
    assert [planned.lora for planned in heard(works)] == ["", "poet"]


def test_a_plan_is_laid_out_as_the_works_are() -> None:
    planned = lay_out(heard(WORKS), 16, 1 << 10)
    laid = lay_out(WORKS, 16, 1 << 10)
    for field in ("tokens", "positions", "slots", "offsets", "drawing_rows"):
        np.testing.assert_array_equal(getattr(planned, field), getattr(laid, field))
    for one, other in zip(planned.spans, laid.spans, strict=True):
        assert (one.first, one.count, one.start) == (other.first, other.count, other.start)
        np.testing.assert_array_equal(one.table, other.table)
    for one_group, other_group in zip(planned.groups, laid.groups, strict=True):
        np.testing.assert_array_equal(one_group.table, other_group.table)
        np.testing.assert_array_equal(one_group.lengths, other_group.lengths)


def test_a_plan_has_only_what_the_step_computes() -> None:
    long: Work = work(list(range(1000)), list(range(200)), start=999)
    assert len(encode_plan([long], 16)) < 400
    assert heard([long])[0].tokens == [999]

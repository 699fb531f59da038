"""Orders to the ranks on GPUs arrive as they were given."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.contracts.messages import Operate
from services.worker.native.cuda.layout import CudaStep, StepLayout
from services.worker.native.cuda.orders import LogitsOrder, StepOrder, decode_order, encode_order
from tests.worker.native.cuda.planners import llama_8b
from tests.worker.native.works import work


@pytest.mark.parametrize("padded_rows", [0, 8])
def test_a_step_arrives_with_its_integers_and_counts(padded_rows: int) -> None:
    works = [
        work(list(range(70)), list(range(5)), start=0 if padded_rows == 0 else 69, sequence=1),
        work(list(range(20)), [7, 9], start=19, sequence=2),
    ]
    step: CudaStep = StepLayout(16, 128, llama_8b()).lay_out(works, padded_rows=padded_rows)
    loras = {"poet": [(0, 70), (71, 72)], "clérk": [(70, 71)]} if padded_rows else {}
    heard = decode_order(bytearray(encode_order(StepOrder(step, padded_rows, loras))))
    assert isinstance(heard, StepOrder)
    assert (heard.step.counts, heard.padded_rows, heard.loras) == (step.counts, padded_rows, loras)
    assert heard.step.ints.dtype == np.int32
    np.testing.assert_array_equal(heard.step.ints, step.ints)


def test_an_order_for_logits_arrives() -> None:
    assert decode_order(encode_order(LogitsOrder(17, 64))) == LogitsOrder(17, 64)


def test_an_operation_arrives() -> None:
    order = Operate(0, "load_lora", "poet", "/srv/poet", 1)
    assert decode_order(bytearray(encode_order(order))) == order

"""services/worker/vllm/engine.py: which of vLLM's exceptions end a request, and which the engine."""

from __future__ import annotations

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm

CODE = """
import json
from services.worker.vllm.engine import is_refusal
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

given = VLLMValidationError("grammar"), GenerationError(), RetryableRequestError("paused"), EngineDeadError(), OSError()
print(json.dumps([is_refusal(each) for each in given]))
"""


def test_a_request_that_vllm_refuses_late_ends_alone() -> None:
    assert run_there(CODE) == [True, True, True, False, False]

"""services/worker/vllm/cpu_generator.py: draws that vLLM takes back, with torch itself."""

from __future__ import annotations

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm
DRAWS = """
import json
import torch
from services.worker.vllm import cpu_generator

cpu_generator.install()
made = torch.Generator(device=torch.device("cpu"))
made.manual_seed(7)
draw = lambda: torch.empty(8).exponential_(generator=made).tolist()
first = draw()
made.set_offset(made.get_offset() - 4)  # as vLLM's model runner does after a part of a prompt
print(json.dumps([first == draw(), first == draw(), type(torch.Generator()).__name__]))
"""


def test_a_draw_that_is_taken_back_is_made_again_and_others_go_on() -> None:
    assert run_there(DRAWS) == [True, False, "RewindableGenerator"]

"""vLLM computes prompts at one worker and decodes at others, through the machine's kvbm, with the tokens of one alone:
the cases of `test_roles`, as far as they are not about memory that native engines lend."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.integration.roles_rig import GREEDY, RolesRig, ask, prompt_of, roles
from tests.integration.test_roles import (
    DECODERS,
    busy,
    client,
    test_decode_workers_load_blocks_before_the_prompt_is_handed_over,
    test_decode_workers_load_what_the_prefill_worker_has_stored,
    test_explain_shows_both_halves_of_a_choice,
    test_whatever_is_lost_on_the_way_the_tokens_stay,
)
from tests.worker.vllm.environment import ON_DEVICE_WORDS, PYTHON, needs_vllm

__all__ = (
    "busy",
    "client",
    "test_decode_workers_load_blocks_before_the_prompt_is_handed_over",
    "test_decode_workers_load_what_the_prefill_worker_has_stored",
    "test_explain_shows_both_halves_of_a_choice",
    "test_whatever_is_lost_on_the_way_the_tokens_stay",
)
pytestmark = needs_vllm
START_S = 600.0
"""Seconds that four vLLMs may take to start on a busy machine."""
ENGINE = ("--engine", "vllm", "--vllm-python", str(PYTHON), "--threads", "1", "--stall-s", "120")
ARGUMENTS = {"enforce_eager": "true", "dtype": "float32", "num_gpu_blocks_override": "1024", "max_model_len": "8192"}
ARGUMENTS |= ON_DEVICE_WORDS


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[RolesRig]:
    workers, folder = dict.fromkeys(("prefill", *DECODERS), "kvbm"), tmp_path_factory.mktemp("vllm-roles")
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--vllm.{name}", value)]
    with roles(
        folder,
        nats_url,
        "vllm-roles",
        workers=workers,
        kvbms={"kvbm": ()},
        engine=(*ENGINE, *arguments),
        limit_s=START_S,
        hidden=128,
        heads=2,
        tied=False,
        seed=3,
    ) as one:
        yield one


@pytest.mark.usefixtures("busy")
def test_an_answer_that_is_handed_over_has_the_tokens_of_one_worker(rig: RolesRig, client: openai.OpenAI) -> None:
    for number, length in enumerate((1, 40, 300, 700, 800, 900)):
        before, prompt = rig.hand_overs, prompt_of(length, f"w{number}x")
        answers = [ask(client, model, prompt, GREEDY) for model in ("tiny", "alone")]
        assert answers[0] == answers[1]
        print(length, rig.hand_overs - before)
    assert rig.hand_overs

"""Prompts are computed on one machine and decoded on another: each has a pool and a kvbm, which read from each other.

prefill ⇄ kvbm near ◀── blocks over TCP ── kvbm far ⇄ decode            alone: the same weights under another name
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.integration.fleet import Service, explained
from tests.integration.roles_rig import GREEDY, LIMIT_S, RolesRig, ask, client_of, prompt_of, roles, streams
from tests.integration.stack import eventually

NAMESPACE = "roles-apart"
MACHINES = {"prefill": "near", "decode": "far"}
PEERS = ("--peers-listen", "127.0.0.1:0", "--peers-wait-s", "2", "--peers-read-s", "60")
_prompts = itertools.count()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[RolesRig]:
    folder = tmp_path_factory.mktemp(NAMESPACE)
    kvbms = dict.fromkeys(MACHINES.values(), PEERS)
    with roles(folder, nats_url, NAMESPACE, workers=MACHINES, kvbms=kvbms) as one:
        yield one


@pytest.fixture
def client(rig: RolesRig) -> Iterator[openai.OpenAI]:
    with client_of(rig) as one:
        yield one


def both(client: openai.OpenAI, words: int) -> None:
    """Ask something new of the fleet and of the worker that is alone, and compare."""
    prompt = prompt_of(words, f"apart{next(_prompts)}x")
    assert ask(client, "tiny", prompt, GREEDY) == ask(client, "alone", prompt, GREEDY)


@pytest.fixture
def busy(rig: RolesRig, client: openai.OpenAI) -> Iterator[None]:
    """Streams at the decode worker, so that prompts are handed over rather than delay them."""
    decode = rig.services.services["decode"]
    with streams(client, 3):
        eventually(
            lambda: decode.metric("headrace_inflight_requests") >= 2, limit_s=LIMIT_S, what="streams are decoded"
        )
        yield


@pytest.mark.usefixtures("busy")
def test_a_prompt_of_another_machine_is_loaded_and_its_answer_has_the_tokens_of_one_worker(
    rig: RolesRig, client: openai.OpenAI
) -> None:
    def handed_over() -> bool:
        both(client, 500)
        return rig.hand_overs > 0 and rig.services.services["far"].metric("headrace_kvbm_peer_read_blocks_total") > 0

    eventually(handed_over, limit_s=LIMIT_S, what="blocks of a hand-over came from the other machine")


@pytest.mark.usefixtures("busy")
def test_explain_shows_what_is_read_from_the_other_machine(rig: RolesRig, nats_url: str, client: openai.OpenAI) -> None:
    def shown() -> list[int]:
        prompt = prompt_of(400, f"apart{next(_prompts)}x")
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, extra_body={"deadline_s": 600})
        decision = explained(nats_url, NAMESPACE, answer.id)
        return [row["overlap"][3] for row in decision["candidates"] if row["overlap"][3]]

    (remote,) = eventually(shown, limit_s=LIMIT_S, what="a prompt is handed over")
    assert remote >= 8


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("lost", ["near", "prefill"])
@pytest.mark.usefixtures("busy")
def test_a_machine_that_is_lost_costs_no_token(
    rig: RolesRig, client: openai.OpenAI, lost: str, how: signal.Signals
) -> None:
    gone = rig.services.services[lost].process
    gone.send_signal(how)
    try:
        both(client, 500)
    finally:
        gone.send_signal(signal.SIGCONT)
        if how is signal.SIGKILL:
            gone.wait()
            rig.start(lost)
        rig.wait_linked()
    both(client, 500)


def test_nothing_is_held_once_all_have_answered(rig: RolesRig) -> None:
    for name in MACHINES.values():
        kvbm = rig.services.services[name]

        def at_rest(kvbm: Service = kvbm) -> bool:
            loans, tickets = kvbm.metric("headrace_kvbm_peer_loans"), kvbm.metric("headrace_kvbm_tickets")
            return loans == 0 and tickets == 0

        eventually(at_rest, limit_s=LIMIT_S, what=f"{name} holds nothing")

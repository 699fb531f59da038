"""Prompts are computed by one worker and decoded by another, through the machine's kvbm, with the tokens of one alone.

prefill ──▶ kvbm's pool ──▶ decode 1 or decode 2        alone: the same weights under another name

Decode workers stream answers meanwhile, so that routers hand prompts over rather than delay these.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.roles_rig import GREEDY, LIMIT_S, RolesRig, ask, client_of, prompt_of, roles, streams
from tests.integration.stack import eventually

DECODERS = ("decode 1", "decode 2")
STREAMS = 6
"""With three at each decode worker, or two and four, a pair costs little more than half of one worker: measured speeds
differ by less."""
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "presence_penalty": 0.6}

IN_ALL = {("decode", "killed"), ("prefill", "frozen")}
HOW = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
FAULTS = [
    pytest.param(lost, HOW[how], id=f"{how}-{lost}", marks=() if (lost, how) in IN_ALL else pytest.mark.tier("long"))
    for how in HOW
    for lost in ("prefill", "decode", "kvbm")
]
"""Each process is killed and frozen; two of these take half a minute in CI, all take two minutes."""


APART = {"float32": 1e-3, "bfloat16": 0.05}
"""How far log-probabilities may be from those of one worker, by the type of keys and values. These are rounded to
bfloat16, so the last bit of a float32, which the order of sums decides, may become the last bit of a bfloat16."""


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.tier("long"))])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rig(kv_dtype: str, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[RolesRig]:
    namespace = f"roles-{kv_dtype}"
    workers, kvbms = dict.fromkeys(("prefill", *DECODERS), "kvbm"), {"kvbm": ()}
    folder = tmp_path_factory.mktemp(namespace)
    engine = ("--threads", "1", "--kv-dtype", kv_dtype)
    with roles(folder, nats_url, namespace, workers=workers, kvbms=kvbms, engine=engine) as one:
        yield one


@pytest.fixture
def client(rig: RolesRig) -> Iterator[openai.OpenAI]:
    with client_of(rig) as one:
        yield one


@pytest.fixture
def busy(request: pytest.FixtureRequest, rig: RolesRig, client: openai.OpenAI) -> Iterator[None]:
    """Streams at all decode workers, until the end of the test."""
    with streams(client, STREAMS):
        workers = [rig.services.services[name] for name in DECODERS]

        def decoded() -> bool:
            running = [worker.metric("headrace_inflight_requests") for worker in workers]
            # A worker that was slow when it started gets few of them for a minute. After a fault, one that was just
            # started again may get none of them for a while.
            return min(running) >= 2 or ("lost" in request.fixturenames and sum(running) >= len(workers))

        eventually(decoded, limit_s=LIMIT_S, what="the streams are decoded")
        yield


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.usefixtures("busy")
def test_an_answer_that_is_handed_over_has_the_tokens_of_one_worker(
    rig: RolesRig, client: openai.OpenAI, sampling: dict[str, Any]
) -> None:
    before, number = rig.hand_overs, 0
    lengths = (1, 40, 300, 700)

    def handed_over() -> bool:
        nonlocal number
        prompt = prompt_of(lengths[number % len(lengths)], f"w{len(sampling)}n{number}x")
        number += 1
        assert ask(client, "tiny", prompt, sampling) == ask(client, "alone", prompt, sampling)
        return number >= len(lengths) and rig.hand_overs > before

    eventually(handed_over, limit_s=LIMIT_S, what="a prompt is handed over")


@pytest.mark.usefixtures("busy")
def test_decode_workers_load_what_the_prefill_worker_has_stored(rig: RolesRig, client: openai.OpenAI) -> None:
    number = 0

    def loaded() -> bool:
        nonlocal number
        number += 1
        ask(client, "tiny", prompt_of(600, f"n{number}x"), GREEDY)
        workers = (rig.services.services[name] for name in DECODERS)
        return sum(worker.metric("headrace_kvbm_copied_blocks_total", outcome="loaded") for worker in workers) > 0

    eventually(loaded, limit_s=LIMIT_S, what="a decode worker has loaded blocks")


@pytest.mark.usefixtures("busy")
def test_decode_workers_load_blocks_before_the_prompt_is_handed_over(rig: RolesRig, client: openai.OpenAI) -> None:
    number = 0

    def loaded() -> bool:
        nonlocal number
        number += 1
        prompt = prompt_of(700, f"early{number}x")
        assert ask(client, "tiny", prompt, GREEDY) == ask(client, "alone", prompt, GREEDY)
        workers = (rig.services.services[name] for name in DECODERS)
        return sum(worker.metric("headrace_prefetched_blocks_total") for worker in workers) > 0

    eventually(loaded, limit_s=LIMIT_S, what="blocks are loaded while the rest of the prompt is computed")


@pytest.mark.usefixtures("busy")
def test_decode_workers_copy_blocks_from_the_prefill_workers_memory(rig: RolesRig, client: openai.OpenAI) -> None:
    number = 0

    def shared() -> bool:
        nonlocal number
        number += 1
        prompt = prompt_of(700, f"shared{number}x")
        assert ask(client, "tiny", prompt, GREEDY) == ask(client, "alone", prompt, GREEDY)
        workers = (rig.services.services[name] for name in DECODERS)
        copied = {"direction": "load", "path": "peer_memmove"}
        return sum(worker.metric("headrace_kvbm_path_blocks_total", **copied) for worker in workers) > 0

    eventually(shared, limit_s=LIMIT_S, what="blocks go from one engine to the other, and not through the kvbm")


@pytest.mark.usefixtures("busy")
def test_a_prompt_whose_blocks_are_stored_has_all_of_its_log_probabilities(
    rig: RolesRig, client: openai.OpenAI, kv_dtype: str
) -> None:
    prompt = prompt_of(300, "scored")
    ask(client, "tiny", prompt, GREEDY)
    extra = {"ignore_eos": True, "deadline_s": 600}
    for _ in range(3):
        ours, theirs = (
            client.completions.create(
                model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=4, temperature=0, extra_body=extra
            )
            .choices[0]
            .logprobs
            for model in ("tiny", "alone")
        )
        assert ours is not None
        assert theirs is not None
        assert ours.tokens == theirs.tokens
        assert ours.token_logprobs is not None
        assert theirs.token_logprobs is not None
        assert ours.token_logprobs[0] is theirs.token_logprobs[0] is None
        assert ours.token_logprobs[1:] == pytest.approx(theirs.token_logprobs[1:], abs=APART[kv_dtype])


@pytest.mark.usefixtures("busy")
def test_explain_shows_both_halves_of_a_choice(rig: RolesRig, client: openai.OpenAI) -> None:
    number = 0

    def shown() -> list[str]:
        nonlocal number
        number += 1
        prompt = prompt_of(300, f"explained{number}x")
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, extra_body={"deadline_s": 600})
        reasons = [decision["reason"] for decision in rig.decisions(answer.id)]
        if len(reasons) == 2 and "hands over" in reasons[1]:
            return reasons
        print(reasons)  # which a failure shows
        return []

    computes, decodes = eventually(shown, limit_s=LIMIT_S, what="a prompt is handed over")
    assert "computes the prompt" in computes
    assert "a pair costs" in computes
    assert "hands over" in decodes


@pytest.mark.parametrize(("lost", "how"), FAULTS)
@pytest.mark.usefixtures("busy")
def test_whatever_is_lost_on_the_way_the_tokens_stay(
    rig: RolesRig, client: openai.OpenAI, lost: str, how: signal.Signals
) -> None:
    prompt = prompt_of(600, f"{lost[0]}{how}x")
    expected = ask(client, "alone", prompt, GREEDY)
    services, gone = rig.services, list[str]()

    def lose(name: str) -> None:
        services.services[name].process.send_signal(how)
        gone.append(name)

    try:
        if lost == "decode":  # after the first token, whichever decodes
            assert ask(client, "tiny", prompt, GREEDY, lambda: lose(DECODERS[0])) == expected
        else:
            lose(lost)
            assert ask(client, "tiny", prompt, GREEDY) == expected
    finally:
        for name in gone:
            services.services[name].process.send_signal(signal.SIGCONT)
            if how is signal.SIGKILL:
                services.services[name].process.wait()
                rig.start(name)
        rig.wait_linked()

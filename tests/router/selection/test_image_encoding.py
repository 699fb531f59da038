"""Which images of a prompt are encoded by another worker: only new ones, and only if that is sooner."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from services.router.config import LoadConfig, RouterConfig
from services.router.selection import image_encoding
from services.router.selection.image_encoding import HAND_OVER_S, SEEN_S, WAIT_LEAST_S, WAIT_MOST_S
from services.router.selection.model_router import ModelRouter
from services.router.selection.policies.kv import KvPolicy
from shared.hashing import pack_hashes
from shared.messages.cards import ImageInput, KvLayout, ModelCard, Role
from shared.messages.load import EncoderState, LoadReport
from shared.messages.select import Select, Selected, SelectRefused

TAKES = ImageInput(319, 16, 28, 28, 28, "BICUBIC")


def card(instance: str, role: Role, **more: Any) -> ModelCard:
    fields: dict[str, Any] = {"kvbm": "k", "kvbm_layout": "l", "images": TAKES, "embeddings_layout": "e", **more}
    layout = KvLayout("float32", 1, 1, 4, 4)
    return ModelCard("m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, layout, role=role, **fields)


def report(instance: str, running: int = 0, *, image_s: float = 0.2, waiting: int = 0) -> LoadReport:
    encoder = EncoderState(1, 1, 1, 1, image_s=image_s, waiting=waiting)
    return LoadReport(instance, 1, 1, 0, running, 0, 1000, 0, 0, 10_000.0, 0.01, encoder=encoder)


@pytest.fixture
def router() -> ModelRouter:
    """One worker that does all, with four requests, and one that encodes; an image takes each 0.2 s."""
    config = RouterConfig(load=LoadConfig(grace_s=1.0, unknown_s=1.0, ramp_s=0))
    made = ModelRouter("m", "r1", config, KvPolicy(), Random(1))
    for each, busy in ((card("a", "aggregated"), 4), (card("e", "encode"), 0)):
        made.add_card(each)
        made.apply_load_report(report(each.instance, busy), 0.0)
    return made


def select(request: str, *images: int, attempt: int = 1, **more: Any) -> Select:
    """Ask for a prompt of 41 tokens, with an image of 16 after each of the first ones."""
    ends = tuple(20 * (number + 1) for number in range(len(images)))
    fields: dict[str, Any] = {"image_hashes": pack_hashes(images), "image_ends": ends, **more}
    return Select(request, attempt, "f", "m", fields.pop("hashes", b""), 41, 8, **fields)


def chosen(router: ModelRouter, ask: Select, now_s: float = 0.0) -> Selected:
    reply = router.select(ask, now_s).reply
    router.validate()
    assert isinstance(reply, Selected), reply
    return reply


def test_a_new_image_for_a_busy_worker_is_encoded_by_another_one_and_the_reason_has_both_costs(
    router: ModelRouter,
) -> None:
    selection = router.select(select("r", 7), 0.0)
    reply, reserved = selection.reply, selection.reserved
    assert isinstance(reply, Selected)
    assert (reply.instance, reply.encode, reply.encode_images) == ("a", "e", (0,))
    assert reply.reason.endswith("e encodes 1 image: 0.22 s, in place 1.00 s")
    assert reserved is not None
    assert reserved.delay_s == reply.encode_wait_s == WAIT_LEAST_S, "the worker hears of it later"


def test_an_idle_worker_encodes_its_own_images(router: ModelRouter) -> None:
    router.apply_load_report(report("a", 0), 0.0)
    assert chosen(router, select("r", 7)).encode == ""


def test_a_prompt_without_images_or_whose_images_are_cached_needs_no_other_worker(router: ModelRouter) -> None:
    assert chosen(router, select("r")).encode == ""
    cached = pack_hashes(range(1, 7))
    chosen(router, select("s", hashes=cached))
    assert chosen(router, select("t", 7, 8, hashes=cached)).encode_images == (1,), "24 tokens of 41 are there"


def test_images_that_wait_there_count_also_those_sent_since_its_last_report(router: ModelRouter) -> None:
    assert chosen(router, select("r", 1, 2)).encode == "e"
    assert chosen(router, select("s", 3)).reason.endswith(f"{3 * 0.2 + HAND_OVER_S:.2f} s, in place 1.20 s")
    router.apply_load_report(report("e", waiting=9), 0.0)
    assert chosen(router, select("t", 4)).encode == ""
    router.apply_load_report(report("e", waiting=0), 0.0)
    assert chosen(router, select("u", 5)).encode == "e"


def test_an_image_that_was_asked_for_lately_is_in_a_cache_and_for_its_own_request_still_new(
    router: ModelRouter,
) -> None:
    assert chosen(router, select("r", 7)).encode == "e"
    assert chosen(router, select("s", 7)).encode == ""
    assert chosen(router, select("r", 7, attempt=2)).encode == "e", "the answer, or the worker, was lost"
    assert chosen(router, select("t", 7, 8)).encode_images == (1,)
    assert chosen(router, select("u", 7), SEEN_S + 1).encode == "e", "it may be evicted by now"
    assert chosen(router, select("v", 9, 9)).encode_images == (0,), "the same image twice"


def test_no_more_images_are_remembered_than_the_limit(router: ModelRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_encoding, "MOST_SEEN", 2)
    for number in (1, 2, 3):
        chosen(router, select(f"r{number}", number))
        router.apply_load_report(report("e"), 0.0)
    assert chosen(router, select("s", 1)).encode == "e", "the oldest is forgotten"
    assert chosen(router, select("t", 3)).encode == ""


@pytest.mark.parametrize(
    "other",
    [
        card("e", "encode", kvbm="another machine's"),
        card("e", "encode", embeddings_layout="other weights, or another type"),
        card("e", "encode", images=replace(TAKES, filter="NEAREST")),
        card("e", "aggregated"),
    ],
)
def test_only_workers_with_the_role_that_reach_the_kvbm_and_have_the_same_weights_are_asked(
    router: ModelRouter, other: ModelCard
) -> None:
    router.remove_instance("e")
    router.add_card(other)
    router.apply_load_report(report("e", 20), 0.0)
    reply = chosen(router, select("r", 7))
    assert (reply.instance, reply.encode) == ("a", "")


def test_a_worker_that_shares_no_embeddings_or_a_frozen_encode_worker_is_left_out(router: ModelRouter) -> None:
    router.eligibility.frozen = frozenset(("e",))
    assert chosen(router, select("r", 7)).encode == ""
    router.eligibility.frozen = frozenset()
    router.remove_instance("a")
    router.add_card(card("a", "aggregated", embeddings_layout=""))
    router.apply_load_report(report("a", 4), 0.0)
    assert chosen(router, select("s", 8)).encode == ""


def test_encode_workers_alone_serve_no_model(router: ModelRouter) -> None:
    router.remove_instance("a")
    reply = router.select(select("r", 7), 0.0).reply
    assert isinstance(reply, SelectRefused)
    assert reply.code == "no_instances"


def test_the_prompt_of_a_pair_has_its_images_encoded_apart_too(router: ModelRouter) -> None:
    router.remove_instance("a")
    for instance, role, busy in (("p", "prefill", 3), ("d", "decode", 400)):
        router.add_card(card(instance, role))  # type: ignore[arg-type]
        router.apply_load_report(report(instance, busy), 0.0)
    reply = chosen(router, select("r", 7))
    assert (reply.instance, reply.decode, reply.encode) == ("p", "d", "e")


def test_a_frontend_waits_for_twice_the_time_within_bounds(router: ModelRouter) -> None:
    router.apply_load_report(report("e", image_s=1.5), 0.0)
    router.apply_load_report(report("a", 60), 0.0)
    assert chosen(router, select("r", 7)).encode_wait_s == pytest.approx(2 * (1.5 + HAND_OVER_S))
    router.apply_load_report(report("e", image_s=9.0), 0.0)
    assert chosen(router, select("s", 8)).encode_wait_s == WAIT_MOST_S


def test_times_that_make_no_sense_count_as_unknown(router: ModelRouter) -> None:
    for image_s in (float("nan"), float("inf"), -1.0):
        router.apply_load_report(report("e", image_s=image_s, waiting=-5), 0.0)
        assert chosen(router, select(f"r{image_s}", hash(image_s) & 0xFFFF)).encode == "e"


@pytest.mark.parametrize(
    "fields",
    [
        {"image_ends": (20,), "image_hashes": b""},
        {"image_ends": (), "image_hashes": b"12345678"},
        {"image_ends": (42,), "image_hashes": b"12345678"},
        {"image_ends": (0,), "image_hashes": b"12345678"},
        {"image_ends": (20,) * 1025, "image_hashes": b"12345678" * 1025},
    ],
)
def test_images_that_contradict_themselves_are_refused(router: ModelRouter, fields: dict[str, Any]) -> None:
    reply = router.select(replace(select("r"), **fields), 0.0).reply
    assert isinstance(reply, SelectRefused)
    assert (reply.code, reply.reason.startswith("image_ends")) == ("bad_request", True)

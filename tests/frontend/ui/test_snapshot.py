"""From what is known of the fleet to what the page shows."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from services.frontend.ui.snapshot import (
    DECISIONS_SHOWN,
    NAME_LIMIT,
    NOTES_SHOWN,
    OTHERS_SHOWN,
    REQUESTS_SHOWN,
    SILENT_S,
    TEXT_SHOWN,
    WORKERS_SHOWN,
    Facts,
    SeenLoad,
    merged_decisions,
    snapshot,
)
from shared.messages.cards import Instance, KvLayout, ModelCard, Role, ServiceName
from shared.messages.frontends import RecentRequests, RequestWay
from shared.messages.kvbm import KvbmState, LayoutState, TierState
from shared.messages.load import LoadReport
from shared.messages.people import Explanation, Explanations, ModelState, RouterState, SourceState

KV = KvLayout("float32", 2, 2, 16, 16)


def instance(
    service: ServiceName, name: str, started: float = 0.0, state: str = "", role: Role = "aggregated"
) -> Instance:
    return Instance("n", service, name, 1, "here", 1, started, "1.0", state=state, role=role)


def card(worker: str, model: str = "m", lora: tuple[str, ...] = (), role: Role = "aggregated") -> ModelCard:
    known = ModelCard(model, worker, "/m", "", "", 2048, 320, 16, 100, KV, role=role, kvbm="k1", lora=lora)
    return msgspec.structs.replace(known, device="cuda:0")


def report(worker: str, running: int = 2) -> LoadReport:
    return LoadReport(worker, 1, 9, 1, running, 30, 100, held_blocks=20, cached_blocks=50, step_s=0.01)


def way(name: str, age_s: float, **more: Any) -> RequestWay:
    return RequestWay(name, "m", age_s, 100, **more)


def facts(*instances: Instance, **more: Any) -> Facts:
    known = {
        "namespace": "n",
        "frontend": "f1",
        "version": "1.0",
        "wall_s": 1000.0,
        "connected": True,
        "instances": {each.instance: each for each in instances},
        "cards": {},
        "refused": {},
    }
    return Facts(**{**known, **more})


def test_a_worker_shows_its_load_its_model_and_its_speed() -> None:
    seen = snapshot(
        facts(
            instance("worker", "w1", 990.0),
            cards={("m", "w1"): card("w1")},
            loads={"w1": SeenLoad(report("w1"), 0.2, 41.26)},
        )
    )
    (worker,) = seen.workers
    assert (worker.state, worker.device, worker.model, worker.kvbm) == ("ready", "cuda:0", "m", "k1")
    assert (worker.running, worker.waiting, worker.held, worker.cached, worker.blocks) == (2, 1, 20, 50, 100)
    assert (worker.tokens_per_s, worker.process.age_s) == (41.3, 10.0)
    assert (seen.totals.running, seen.totals.tokens_per_s, seen.totals.blocks) == (2, 41.3, 100)


def test_a_worker_without_a_report_or_with_an_old_one_is_silent_and_counts_nothing() -> None:
    old = {"w2": SeenLoad(report("w2"), SILENT_S, 10.0)}
    seen = snapshot(facts(instance("worker", "w1"), instance("worker", "w2"), loads=old))
    assert [(each.state, each.tokens_per_s) for each in seen.workers] == [("silent", None), ("silent", None)]
    assert (seen.totals.workers, seen.totals.running, seen.totals.tokens_per_s) == (2, 0, 0.0)


def test_a_worker_shows_its_role_unless_it_does_all_of_a_request() -> None:
    roles: dict[str, Role] = {"w1": "aggregated", "w2": "prefill", "w3": "decode"}
    loads = {"w2": SeenLoad(report("w2"), 0.0, None)}
    cards = {("m", name): card(name, role=role) for name, role in roles.items()}
    drained = instance("worker", "w5", state="drained", role="decode")
    workers = (*(instance("worker", name) for name in (*roles, "w4")), drained)
    seen = snapshot(facts(*workers, cards=cards, loads=loads))
    assert [each.role for each in seen.workers] == ["", "prefill", "decode", "", "decode"]


def test_what_an_operator_asked_for_is_the_state_and_a_worker_without_a_card_starts() -> None:
    loads = {name: SeenLoad(report(name), 0.0, None) for name in ("w1", "w2")}
    drains = msgspec.structs.replace(instance("worker", "w1", 1.0, "draining"), model="m")
    seen = snapshot(facts(drains, instance("worker", "w2", 2.0), loads=loads))
    assert [(each.state, each.model) for each in seen.workers] == [("draining", "m"), ("starting", "")]


def test_processes_that_do_not_answer_are_there_without_numbers() -> None:
    seen = snapshot(facts(instance("frontend", "f1"), instance("router", "r1"), instance("kvbm", "k1")))
    assert seen.frontends[0].running is None
    assert not seen.routers[0].answered
    assert not seen.stores[0].answered


def test_routers_stores_and_frontends_show_what_they_say() -> None:
    host = TierState("on", "", 200, 50, 0.41)
    disk = TierState("off", "the disk is full", 900, 0, None)
    layout = LayoutState("00", "m", KV, host, disk, 2, {"store": 1, "fetch": 2})
    sources = [SourceState("w1", "live"), SourceState("w2", "live"), SourceState("w3", "syncing")]
    seen = snapshot(
        facts(
            *(instance("frontend", "f1"), instance("router", "r1"), instance("kvbm", "k1")),
            routers=[RouterState("r1", "kv", [ModelState("m", 3, 4, 500, 6000)], sources)],
            stores=[KvbmState("k1", "/dev/shm/x", 1 << 20, 1.0, 300.0, [layout])],
            recent=[RecentRequests("f1", 1, 2, 33, [])],
        )
    )
    assert (seen.frontends[0].arriving, seen.frontends[0].running, seen.totals.begun) == (1, 2, 33)
    (router,) = seen.routers
    assert (router.policy, router.reserved, router.index_blocks) == ("kv", 4, 500)
    assert router.sources == {"live": 2, "syncing": 1}
    (shown,) = seen.stores[0].layouts
    assert (shown.tickets, shown.engines, shown.block_bytes) == (3, 2, KV.block_bytes)
    assert [(tier.name, tier.blocks, tier.hit_rate) for tier in shown.tiers] == [("host", 50, 0.41), ("disk", 0, None)]


def test_requests_of_all_frontends_come_in_the_order_of_their_arrival() -> None:
    recent = [
        RecentRequests("f1", 0, 1, 2, [way("a", 9.0, ended_s=1.0, outcome="stop"), way("c", 1.0)]),
        RecentRequests("f2", 0, 1, 1, [way("b", 5.0, cached_tokens=90, cached_host_tokens=20, cached_disk_tokens=10)]),
    ]
    seen = snapshot(facts(recent=recent))
    assert [(each.id, each.frontend, each.began_ms) for each in seen.requests] == [
        ("a", "f1", 991_000),
        ("b", "f2", 995_000),
        ("c", "f1", 999_000),
    ]
    assert seen.requests[1].cached == (60, 20, 10)
    assert seen.requests[0].times == (0.0, None, None, None, 1.0)


def test_models_are_those_that_routers_choose_workers_for_with_their_loras() -> None:
    cards = {
        ("m", "w1"): card("w1", lora=("sql@0123",)),
        ("m", "w2"): card("w2"),
        ("x", "w3"): msgspec.structs.replace(card("w3", "x"), role="prefill"),
        ("y" * (NAME_LIMIT + 1), "w4"): card("w4", "y" * (NAME_LIMIT + 1)),
    }
    seen = snapshot(facts(cards=cards))
    assert [(model.name, model.workers) for model in seen.models] == [("m", 2), ("sql", 1)]
    assert seen.left_out.models == 1


def test_each_list_is_bounded_and_says_how_much_is_left_out() -> None:
    many = 5
    instances = [
        *(instance("worker", f"w{number}", float(number)) for number in range(WORKERS_SHOWN + many)),
        *(instance("router", f"r{number}") for number in range(OTHERS_SHOWN + many)),
        *(instance("frontend", f"f{number}") for number in range(OTHERS_SHOWN + many)),
        *(instance("kvbm", f"k{number}") for number in range(OTHERS_SHOWN + many)),
    ]
    loads = {each.instance: SeenLoad(report(each.instance), 0.0, 1.0) for each in instances if each.service == "worker"}
    recent = [RecentRequests("f1", 0, 0, 99, [way(f"{number:03d}", 1.0) for number in range(REQUESTS_SHOWN + many)])]
    refused = {("m", f"w{number}"): "x" * 10 * TEXT_SHOWN for number in range(NOTES_SHOWN + many)}
    seen = snapshot(facts(*instances, loads=loads, recent=recent, refused=refused))
    assert (len(seen.workers), len(seen.routers), len(seen.requests)) == (WORKERS_SHOWN, OTHERS_SHOWN, REQUESTS_SHOWN)
    left = seen.left_out
    assert (left.workers, left.routers, left.frontends, left.stores, left.requests, left.notes) == (many,) * 6
    assert seen.requests[-1].id == f"{REQUESTS_SHOWN + many - 1:03d}"
    assert max(map(len, seen.notes)) == TEXT_SHOWN
    assert seen.totals.workers == WORKERS_SHOWN + many
    assert seen.totals.running == 2 * (WORKERS_SHOWN + many)


def test_hostile_names_are_json_and_cut() -> None:
    name = "</script><img src=x onerror=alert(1)>\x00\u202e" * 50
    entry = msgspec.structs.replace(instance("worker", "w1"), machine=name, state=name)
    seen = snapshot(facts(entry, loads={"w1": SeenLoad(report("w1"), 0.0, 1.0)}))
    shown = json.loads(msgspec.json.encode(seen))["workers"][0]
    assert len(shown["process"]["machine"]) == TEXT_SHOWN
    assert len(shown["state"]) == TEXT_SHOWN


OWN = "0123456789abcdef" * 2


def explanation(age_s: float, request: str = OWN) -> Explanation:
    return Explanation("m", "r1", request, 1, age_s, "w1", 0, "least", (), 10, 0)


def test_decisions_of_all_routers_come_oldest_first() -> None:
    found = merged_decisions([Explanations("r1", [explanation(1.0)]), Explanations("r2", [explanation(3.0)])], 3)
    assert [one.age_s for one in found.decisions] == [3.0, 1.0]
    assert (found.routers, found.silent, found.left_out) == (2, 1, 0)


def test_no_whole_id_leaves_since_it_opens_a_stored_response() -> None:
    (one,) = merged_decisions([Explanations("r1", [explanation(1.0, f"mine-{OWN}/3")])], 1).decisions
    assert one.request == OWN[:12]


def test_beyond_the_limit_the_oldest_are_left_out() -> None:
    many = Explanations("r1", [explanation(float(age)) for age in range(DECISIONS_SHOWN + 5)])
    found = merged_decisions([many], 1)
    assert len(found.decisions) == DECISIONS_SHOWN
    assert found.left_out == 5
    assert found.decisions[-1].age_s == 0.0

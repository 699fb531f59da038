"""deploy/local/show/overview.py: discovery's entries and load reports as people and programs read them."""

from __future__ import annotations

import msgspec
import pytest

from deploy.local.show.overview import MACHINES_OWN, Overview, block_stores, overview, render
from shared import subjects
from shared.hashing import self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard, Role, ServiceName, TurnTaker
from shared.messages.codec import JSON_HEADER
from shared.messages.kvbm import KvbmState, LayoutState, TierState
from shared.messages.load import EncoderState, EngineLosses, LoadReport, RankLoad, StandbyState
from shared.messages.people import ModelState, RouterState, SourceState
from shared.messages.turns import ModelTurn, TurnsState

NOW = 1_000_100.0
READERS_OWN = 4026531111
KV = KvLayout("float32", 2, 1, 8, 16)
HOST = TierState("on", "", 1386, 340, 0.414)
NO_TICKETS = {"store": 0, "fetch": 0, "expired": 0}


def instance(
    service: ServiceName,
    name: str,
    started: float = NOW - 65,
    *,
    pid_namespace: int = 0,
    state: str = "",
    role: Role = "aggregated",
    peers: str = "",
) -> tuple[str, bytes]:
    value = Instance(
        "default",
        service,
        name,
        1,
        "machine",
        4242,
        started,
        "0.1.0",
        http="http://127.0.0.1:9100",
        pid_namespace=pid_namespace,
        state=state,
        peers=peers,
        role=role,
    )
    return subjects.instance_key("default", service, name), INSTANCE.encode(value, JSON_HEADER)


def card(
    name: str,
    *,
    block_size: int = 16,
    digest: str = "d",
    device: str = "",
    role: Role = "aggregated",
    kvbm: str = "",
    kvbm_layout: str = "l",
) -> tuple[str, bytes]:
    value = ModelCard(
        "m.x",
        name,
        "/models/m",
        digest,
        self_test(block_size),
        context_length=2048,
        vocab_size=100,
        block_size=block_size,
        capacity_blocks=500,
        kv_layout=KvLayout("float32", 1, 1, 8, block_size),
        device=device,
        role=role,
        kvbm=kvbm,
        kvbm_layout=kvbm and kvbm_layout,
    )
    return subjects.model_key("default", "m.x", name), MODEL_CARD.encode(value, JSON_HEADER)


def report(name: str) -> LoadReport:
    return LoadReport(name, 1, 10, 3, 2, 700, 500, held_blocks=40, cached_blocks=60)


def look(
    *entries: tuple[str, bytes],
    reports: tuple[LoadReport, ...] = (),
    states: tuple[RouterState, ...] = (),
    stores: tuple[KvbmState, ...] = (),
    notes: tuple[str, ...] = (),
) -> Overview:
    return overview(
        "default",
        "nats://127.0.0.1:4222",
        "etcd 127.0.0.1:2379",
        dict(entries),
        {each.instance: each for each in reports},
        states,
        stores,
        notes,
        NOW,
        READERS_OWN,
    )


def test_instances_stand_with_their_load_and_models_with_the_sum() -> None:
    view = look(
        instance("frontend", "f1"),
        instance("worker", "w1"),
        instance("worker", "w2", NOW - 7300),
        card("w1", device="cuda:0"),
        card("w2", device="cpu"),
        reports=(report("w1"), report("w2")),
    )
    assert [(row.service, row.instance, row.age_s) for row in view.instances] == [
        ("frontend", "f1", 65.0),
        ("worker", "w2", 7300.0),
        ("worker", "w1", 65.0),
    ]
    (model,) = view.models
    assert (model.model, model.instances) == ("m.x", ("w1", "w2"))
    assert (model.total_blocks, model.held_blocks, model.cached_blocks) == (1000, 80, 120)
    assert render(view).splitlines() == [
        "namespace default, NATS nats://127.0.0.1:4222, etcd 127.0.0.1:2379",
        "",
        "SERVICE   INSTANCE  EPOCH  PID   MACHINE  DEVICE  MODEL  AGE  RUNNING  WAITING  HELD  CACHED  BLOCKS",
        "frontend  f1        1      4242  machine                 1m",
        "worker    w2        1      4242  machine  cpu     m.x    2h   2        3        40    60      500",
        "worker    w1        1      4242  machine  cuda:0  m.x    1m   2        3        40    60      500",
        "",
        "MODEL  INSTANCES  CONTEXT  BLOCK  HELD  CACHED  BLOCKS",
        "m.x    2          2048     16     80    120     1000",
    ]


def test_models_that_sleep_until_their_turn_are_shown_with_their_workers() -> None:
    (_, awake), (_, asleep) = card("w1", device="cpu"), card("w2", device="cpu")
    sleeper = msgspec.structs.replace(
        INSTANCE.decode(instance("worker", "w2")[1], JSON_HEADER),
        state="asleep",
        turns=TurnTaker("cpu", msgspec.structs.replace(MODEL_CARD.decode(asleep, JSON_HEADER), model="n")),
    )
    entry = (subjects.instance_key("default", "worker", "w2"), INSTANCE.encode(sleeper, JSON_HEADER))
    taker = msgspec.structs.replace(
        INSTANCE.decode(instance("worker", "w1")[1], JSON_HEADER),
        turns=TurnTaker("cpu", MODEL_CARD.decode(awake, JSON_HEADER)),
    )
    other = (subjects.instance_key("default", "worker", "w1"), INSTANCE.encode(taker, JSON_HEADER))
    view = look(other, card("w1", device="cpu"), entry, reports=(report("w1"), report("w2")))
    assert [(row.instance, row.model, row.device) for row in view.instances] == [
        ("w1", "m.x", "cpu"),
        ("w2", "n", "cpu"),
    ]
    assert render(view).splitlines()[-4:] == [
        "MODEL  INSTANCES    CONTEXT  BLOCK  HELD  CACHED  BLOCKS",
        "m.x    1            2048     16     40    60      500",
        "n      0, 1 asleep  2048     16     0     0       0",
        "worker w2 is asleep",
    ]


def test_workers_that_were_put_to_sleep_are_shown_with_their_models() -> None:
    def asleep(name: str, model: str) -> tuple[str, bytes]:
        key, value = instance("worker", name, state="asleep")
        entry = msgspec.structs.replace(INSTANCE.decode(value, JSON_HEADER), model=model, device="cpu")
        return key, INSTANCE.encode(entry, JSON_HEADER)

    awake = card("w1", device="cuda:0")
    view = look(instance("worker", "w1"), awake, asleep("w2", "m.x"), asleep("w3", "n"), asleep("w4", ""))
    assert [(row.instance, row.model, row.device) for row in view.instances] == [
        *(("w1", "m.x", "cuda:0"), ("w2", "m.x", "cpu"), ("w3", "n", "cpu"), ("w4", "", "cpu")),
    ]
    assert view.notes == ("no worker serves n: 1 asleep (`headrace wake ID`)",)
    shown = render(view).splitlines()
    at = shown.index("MODEL  INSTANCES    CONTEXT  BLOCK  HELD  CACHED  BLOCKS")
    assert shown[at + 1 : at + 3] == [
        "m.x    1, 1 asleep  2048     16     0     0       500",
        "n      0, 1 asleep  -        -      0     0       0",
    ]


def test_a_narrow_terminal_shows_the_load_and_the_addresses() -> None:
    view = look(instance("worker", "w1"), card("w1", device="cuda:0"), reports=(report("w1"),))
    shown = render(view, 84).splitlines()
    assert shown[:4] == [
        "namespace default, NATS nats://127.0.0.1:4222, etcd 127.0.0.1:2379",
        "",
        "SERVICE  INSTANCE  PID   DEVICE  MODEL  AGE  RUNNING  WAITING  HELD  CACHED  BLOCKS",
        "worker   w1        4242  cuda:0  m.x    1m   2        3        40    60      500",
    ]
    shown = render(view, 60).splitlines()
    assert shown[:6] == [
        "namespace default,",
        "NATS nats://127.0.0.1:4222,",
        "etcd 127.0.0.1:2379",
        "",
        "SERVICE  INSTANCE  PID   RUNNING  WAITING  HELD  CACHED  BLOCKS",
        "worker   w1        4242  2        3        40    60      500",
    ]


def test_no_pid_is_shown_of_a_process_in_a_container_of_its_own() -> None:
    view = look(
        instance("frontend", "f1", pid_namespace=READERS_OWN),
        instance("router", "r1", pid_namespace=MACHINES_OWN),
        instance("worker", "w1", pid_namespace=4026539999),
        reports=(report("w1"),),
    )
    assert [(row.service, row.pid_usable) for row in view.instances] == [
        ("frontend", True),
        ("router", True),
        ("worker", False),
    ]
    lines = render(view).splitlines()
    assert [line.split()[3] for line in lines[3:6]] == ["4242", "4242", "-"]
    assert "PID -: the process runs in a container; MACHINE is the name of that container" in lines


def test_a_worker_that_was_not_heard_has_question_marks() -> None:
    text = render(look(instance("worker", "w1"), card("w1")))
    assert "?        ?        ?     ?       ?" in text
    assert "\n?: no load report arrived; a process that died is listed until its lease ends, about 10 s\n" in text


def test_the_card_of_the_later_instance_is_the_refused_one() -> None:
    view = look(instance("worker", "a", NOW - 1), instance("worker", "b", NOW - 9), card("a", digest="x"), card("b"))
    assert [(row.model, row.instance) for row in view.refused] == [("m.x", "a")]
    assert "refused: m.x at a: tokenizer_digest: " in render(view)


def test_the_encoder_cache_of_a_worker_that_has_seen_images_is_shown() -> None:
    seeing = msgspec.structs.replace(report("w1"), encoder=EncoderState(3, 9_437_184, hits=7, encoded=4, fetched=2))
    text = render(look(instance("worker", "w1"), instance("worker", "w2"), reports=(seeing, report("w2"))))
    [said] = [line for line in text.splitlines() if line.startswith("encoder cache")]
    assert said == "encoder cache of worker w1: 3 images, 9.44 MB; 7 found there, 2 in kvbm, 4 encoded"


def test_what_cannot_be_read_is_named_and_harms_nothing_else() -> None:
    key = subjects.instance_key("default", "worker", "bad")
    view = look((key, b"not json"), instance("router", "r1"), notes=("no NATS",))
    assert [row.instance for row in view.instances] == ["r1"]
    text = render(view)
    assert f"unreadable: {key}: " in text
    assert "note: no NATS" in text


def test_a_second_service_with_the_id_of_another_is_named_and_harms_nothing_else() -> None:
    view = look(instance("router", "same"), instance("worker", "same"), instance("worker", "w1"))
    assert [row.instance for row in view.instances] == ["same", "w1"]
    [said] = view.unreadable
    assert "the id same belongs to a " in said


def test_routers_stand_with_what_they_know_and_whose_events_they_refuse() -> None:
    state = RouterState(
        *("r1", "kv"),
        models=[ModelState("m", 2, 3, 1000, 50_000), ModelState("n", 1, 1, 200, 50_000)],
        sources=[
            SourceState("w1", "live", silent=True),
            SourceState("w2", "refused", "blocks of 8 tokens"),
            SourceState("w3", "live", partial=True, exact=False),
        ],
    )
    assert render(look(instance("router", "r1"), states=(state,))).splitlines()[-3:] == [
        "ROUTER  POLICY  RESERVED  INDEX BLOCKS  INDEX SIZE  EVENT SOURCES",
        "r1      kv      4         1200          100 kB      2 live, 1 refused, 1 partial, 1 not exact, 1 silent",
        "events of w2 at router r1: refused: blocks of 8 tokens",
    ]


def test_workers_that_get_no_requests_are_named_once_however_many_routers_say_so() -> None:
    states = tuple(RouterState(name, "kv", [], [], left_out={"w1": "it is refused"}) for name in ("r1", "r2"))
    said = render(look(instance("router", "r1"), states=states))
    assert said.count("worker w1 gets no requests: it is refused") == 1


def test_models_that_take_turns_stand_with_who_waits_and_why() -> None:
    turns = TurnsState(
        *("t1", "cpu", 1),
        models=[
            ModelTurn("a", "awake", for_s=12.0),
            ModelTurn("b", "asleep", for_s=180.0, waiting=2, oldest_s=4.0, why="a has its turn"),
            ModelTurn("c", "asleep", for_s=1.0, failed="no memory"),
        ],
    )
    view = msgspec.structs.replace(look(), turns=(turns,))
    assert render(view).split("\n\n")[-1] == (
        """\
TURNS ON cpu, 1 AT ONCE  STATE   FOR  WAITING  LONGEST
a                        awake   12s  0
b                        asleep  3m   2        4s
c                        asleep  1s   0
b is waited for: a has its turn
c could not wake: no memory"""
    )


def test_a_router_without_events_says_so() -> None:
    state = RouterState("r1", "kv", [], [], events="off")
    assert render(look(instance("router", "r1"), states=(state,))).splitlines()[-1].split() == [
        *("r1", "kv", "0", "0", "0", "B", "off")
    ]


def test_a_policy_that_does_not_choose_is_not_shown_as_if_it_did() -> None:
    state = RouterState("r1", "mine:Sleeps", [], [], policy_trouble="off: kv chooses")
    assert "r1      mine:Sleeps (off: kv chooses)  0" in render(look(instance("router", "r1"), states=(state,)))


def test_block_stores_are_shown_after_the_routers_and_in_the_json() -> None:
    store = KvbmState("k1", "/pool", 1 << 30, 1.0, 300.0, [])
    view = look(instance("kvbm", "k1"), stores=(store,))
    lines = render(view).splitlines()
    assert lines[-2:] == ["KVBM  POOL   MEMORY   RESERVED  HITS OVER", "k1    /pool  1.07 GB  100 %     5m"]
    assert msgspec.json.decode(msgspec.json.encode(view), type=Overview).stores == (store,)


def test_a_model_for_which_no_worker_decodes_is_in_the_notes() -> None:
    prefill = (instance("worker", "w2"), card("w2", role="prefill", kvbm="k1"))
    whole = look(instance("worker", "w1"), card("w1", role="decode", kvbm="k1"), *prefill)
    assert whole.notes == ()
    assert [row.role for row in whole.instances] == ["decode", "prefill"]
    assert render(whole).splitlines()[3].startswith("worker (decode)   w1")
    view = look(*prefill, notes=("no NATS",))
    assert view.notes == ("no NATS", "worker w2 has the role prefill for m.x, but no worker decodes for it")
    assert render(view).splitlines()[-1] == f"note: {view.notes[-1]}"


def test_a_drained_worker_has_no_card_and_its_role_all_the_same() -> None:
    view = look(instance("worker", "w1", state="drained", role="prefill"), instance("kvbm", "k1"))
    assert [(row.instance, row.role) for row in view.instances] == [("k1", ""), ("w1", "prefill")]
    assert any(line.startswith("worker (prefill)  w1") for line in render(view).splitlines())


@pytest.mark.parametrize(
    ("state", "own_bytes", "shown"),
    [
        ("ready", 61_400_000, "an engine stands by, with 61 MB of its own"),
        ("ready", 0, "an engine stands by"),
        ("starting", 0, "an engine that will stand by is starting"),
        ("none", 0, "no engine stands by"),
    ],
)
def test_an_engine_that_stands_by_is_shown_with_its_memory(state: StandbyState, own_bytes: int, shown: str) -> None:
    one = msgspec.structs.replace(report("w1"), standby=state, standby_bytes=own_bytes)
    assert f"worker w1: {shown}" in render(look(instance("worker", "w1"), reports=(one,))).splitlines()
    assert "stand" not in render(look(instance("worker", "w1"), reports=(report("w1"),)))


def test_engines_that_were_lost_and_the_ranks_of_the_one_that_serves_are_shown() -> None:
    lost = EngineLosses(3, 65.0, "RankLost: tensor_parallel: rank 1 was killed by signal 9 (SIGKILL)")
    one = msgspec.structs.replace(report("w1"), losses=lost, tensor_ranks=2)
    took = EngineLosses(2, 4.0, "killed", take_overs=1)
    two = msgspec.structs.replace(report("w2"), losses=took, ranks=[RankLoad(0, 1, 2, 30, 4), RankLoad(1, 0, 3, 0, 5)])
    lines = render(look(instance("worker", "w1"), instance("worker", "w2"), reports=(one, two))).splitlines()
    last = "the last time 1m ago: RankLost: tensor_parallel: rank 1 was killed by signal 9 (SIGKILL)"
    assert f"worker w1 has lost its engine 3 times; {last}" in lines
    assert "worker w1: 2 processes compute each layer" in lines
    standby = "and a standby took over once"
    assert f"worker w2 has lost its engine 2 times, {standby}; the last time 4s ago: killed" in lines
    assert "rank 0 of worker w2: 2 running, 1 waiting, 4 held" in lines
    assert "rank 1 of worker w2: 3 running, 0 waiting, 5 held" in lines
    assert "lost" not in render(look(instance("worker", "w1"), reports=(report("w1"),)))


def test_a_worker_with_a_role_that_found_no_kvbm_is_in_the_notes() -> None:
    one, other = (instance("worker", name) for name in ("w1", "w2"))
    view = look(one, card("w1", role="decode", kvbm="k1"), other, card("w2", role="prefill"))
    assert view.notes == (
        "worker w2 has the role prefill, but no kvbm, so it takes part in no hand-over; its log says why",
    )
    assert look(one, card("w1")).notes == (), "a worker that does all needs none"


def test_a_prefill_worker_whose_blocks_reach_no_worker_that_decodes_is_in_the_notes() -> None:
    workers = (instance("worker", "w1"), instance("worker", "w2"), card("w2", role="prefill", kvbm="k2"))
    decode = card("w1", role="decode", kvbm="k1")
    silent = tuple(instance("kvbm", name) for name in ("k1", "k2"))
    listening = tuple(instance("kvbm", name, peers=f"{name}:7") for name in ("k1", "k2"))
    (note,) = look(*workers, decode, *silent).notes
    assert note.startswith(
        "worker w2 has the role prefill, but no worker that decodes m.x can get its blocks: they need"
    )
    assert look(*workers, decode, listening[0], silent[1]).notes == (note,)
    assert look(*workers, decode, *listening).notes == ()
    assert look(*workers, card("w1", role="decode", kvbm="k2"), *silent).notes == ()


def test_a_prefill_worker_whose_blocks_have_another_layout_is_in_the_notes_with_what_must_be_equal() -> None:
    workers = (instance("worker", "w1"), instance("worker", "w2"), card("w2", role="prefill", kvbm="k1"))
    other, alone = card("w1", role="decode", kvbm="k1", kvbm_layout="other"), card("w1")
    (note,) = look(*workers, other, instance("kvbm", "k1")).notes
    assert "they need one layout of blocks, not l here and other there: the same engine, version of vLLM" in note
    assert "\n" not in note
    (note,) = look(*workers, alone, instance("kvbm", "k1")).notes
    assert note.endswith("they need one kvbm, or kvbms that read each other (peers.listen)")


def test_nothing_alive_is_said_in_words() -> None:
    assert "no process is alive in this namespace" in render(look())


def test_the_json_form_reads_back() -> None:
    view = look(instance("worker", "w1"), card("w1"), reports=(report("w1"),))
    assert msgspec.json.decode(msgspec.json.encode(view), type=Overview) == view


def state(name: str, *layouts: LayoutState, reserved: float = 1.0) -> KvbmState:
    return KvbmState(name, f"/pools/{name}", 1 << 30, reserved, 300.0, list(layouts))


def test_each_layout_has_a_row_for_each_of_its_tiers() -> None:
    disk = TierState("on", "", 9000, 12, None)
    first = LayoutState("0011223344556677", "m", KV, HOST, disk, 2, {"store": 1, "fetch": 2, "expired": 0})
    second = LayoutState("8899aabbccddeeff", "n", KV, HOST, None, 0, NO_TICKETS)
    assert block_stores([state("k1", first, second), state("k2", reserved=0.999)]) == [
        "KVBM  POOL       MEMORY   RESERVED  HITS OVER\n"
        "k1    /pools/k1  1.07 GB  100 %     5m\n"
        "k2    /pools/k2  1.07 GB  99 %      5m",
        "",
        "KVBM  LAYOUT            MODEL  DTYPE    ENGINES  TICKETS          TIER  STATE  BLOCKS  OF    HITS\n"
        "k1    0011223344556677  m      float32  2        1 store 2 fetch  host  on     340     1386  41 %\n"
        "                                                                  disk  on     12      9000  -\n"
        "k1    8899aabbccddeeff  n      float32  0        0                host  on     340     1386  41 %",
    ]


def test_a_tier_that_is_off_or_does_not_grow_says_why() -> None:
    off = TierState("off", "/blocks: No space left on device", 0, 0, None)
    told = block_stores([state("k1", LayoutState("0011223344556677", "m", KV, HOST, off, 1, NO_TICKETS))])
    assert told[-1] == "disk tier of 0011223344556677 at kvbm k1: off: /blocks: No space left on device"


def test_without_layouts_there_is_the_pool_alone() -> None:
    (pools,) = block_stores([state("k1")])
    assert pools.count("\n") == 1

"""The simulation itself: it runs the same each time, and what it looks for it would find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from services.frontend.requests.actions import Action, DispatchAttempt
from services.frontend.requests.events import TimeExpired
from services.frontend.requests.frames import Frames
from services.frontend.requests.retry import RetryBudget
from services.frontend.requests.session import Session
from services.kvbm.layout.event_log import EventLog
from services.kvbm.layout.layout import LayoutStore
from services.router.index.index import CandidateId
from services.router.selection.load import LoadTracker
from services.router.selection.speculation import Speculation
from services.router.sync.follower import DirectoryFollower
from services.router.sync.source import SourceSync
from services.worker.scheduler.hand_over import HandOvers
from services.worker.scheduler.sequence import Sequence
from services.worker.service import Worker
from shared.bus.contract import Message
from shared.messages.cards import Role
from shared.messages.frames import NOT_BEGUN, Part
from shared.messages.kvbm import Settled
from shared.messages.select import Selected
from tests.fakes.memory_sockets import MemorySockets, MemoryStream
from tests.simulation.events import MutableBus
from tests.simulation.plan import Aim, Fault, Half, Moment, Plan, Plane, plan, role_of_replacement
from tests.simulation.seeds import REGRESSIONS, drawn, failures
from tests.simulation.world import run

SEED = 7
TRIED = 60
"""Seeds until a fault of the program must have been found."""


def stormy() -> Iterator[Plan]:
    return (each for each in map(plan, range(TRIED)) if not each.clear)


def clear() -> Iterator[Plan]:
    return (each for each in map(plan, range(20 * TRIED)) if each.clear)


def apart() -> Iterator[Plan]:
    """Worlds with roles in which every prompt that may be handed over is, under a clear sky."""
    return (each for each in map(plan, range(20 * TRIED)) if each.clear and each.apart and each.sizes.hands_over)


def finds(pattern: str, plans: Iterator[Plan]) -> bool:
    """Whether it is among what is found in one of them: which seed fails first, and by what, is chance."""
    return any(re.search(pattern, wrong) for each in plans for wrong in run(each))


def told(seed: int, hash_seed: str) -> list[str]:
    """Every message, fault and answer of a seed, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", str(seed)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return [line for line in done.stdout.splitlines() if re.match(r" *\d+\.\d{6} ", line)]


def test_a_seed_runs_the_same_in_every_process() -> None:
    once = told(SEED, "1")
    assert len(once) > 100
    assert told(SEED, "2") == once


def test_each_tier_has_seeds_of_its_own_in_one_row() -> None:
    assert drawn(["check"], 7, None) == [(7, 200, "check")]
    assert drawn(["all"], 7, None) == [(7, 300, "all")]
    assert drawn(["check", "all", "long"], 7, None) == [(7, 200, "check"), (207, 300, "all"), (507, 4500, "long")]


def test_a_number_of_seeds_stands_in_for_that_of_all_tiers() -> None:
    assert drawn(["check", "all"], 7, 50) == [(7, 50, "check")]


def test_a_seed_that_fails_tells_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.seeds.run", lambda _: ["r1 has no end"])
    assert failures(3, 2) == [f".venv/bin/python -m tests.simulation {seed}\n  r1 has no end" for seed in (3, 4)]


def test_a_seed_that_breaks_the_simulation_itself_tells_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_plan: Plan) -> list[str]:
        raise KeyError

    monkeypatch.setattr("tests.simulation.seeds.run", broken)
    with pytest.raises(KeyError) as raised:
        failures(3, 2)
    assert raised.value.__notes__ == [".venv/bin/python -m tests.simulation 3"]


def test_under_a_clear_sky_nothing_goes_wrong() -> None:
    skies = clear()
    assert [wrong for _ in range(5) for wrong in run(next(skies))] == []


def test_every_plane_of_kv_events_has_seeds_and_those_that_once_found_a_fault_have_zmq() -> None:
    assert Counter(plan(seed).sizes.plane for seed in range(18)) == dict.fromkeys(get_args(Plane), 6)
    assert {plan(seed).sizes.plane for seed in REGRESSIONS} == {"zmq"}


@pytest.mark.parametrize("plane", ["nats", "jetstream"])
def test_batches_of_kv_events_that_are_lost_over_nats_are_found(monkeypatch: pytest.MonkeyPatch, plane: Plane) -> None:
    publish, numbers = MutableBus.publish_now, count()

    def lossy(bus: MutableBus, subject: str, payload: bytes) -> None:
        if next(numbers) % 5:
            publish(bus, subject, payload)

    monkeypatch.setattr(MutableBus, "publish_now", lossy)
    assert finds(r"had \d+ gaps", (each for each in clear() if each.sizes.plane == plane))


def test_requests_that_wait_at_workers_in_vain_are_among_what_happens() -> None:
    lines: list[str] = []
    short = (each for each in stormy() if each.sizes.wait_s < 1)
    assert any(run(each, lines.append) == [] and any(NOT_BEGUN in line for line in lines) for each in short)


@pytest.mark.parametrize("half", get_args(Half))
@pytest.mark.parametrize("moment", get_args(Moment))
def test_faults_befall_each_moment_of_a_hand_over(moment: Moment, half: Half) -> None:
    lines: list[str] = []
    fault = Fault(0.0, "kill", 0, 0.5, Aim(moment, half))
    for each in apart():
        assert run(msgspec.structs.replace(each, faults=(fault,)), lines.append) == []
        if any(f"aimed at {half} when {moment}" in line for line in lines):
            return
    pytest.fail("no request was at that moment")


def test_a_worker_that_takes_the_place_of_another_may_have_another_role() -> None:
    roles: list[Role] = ["aggregated", "decode", "prefill"]
    drawn = {(ended, role_of_replacement(seed, 4, ended, decodes=False)) for seed in range(99) for ended in roles}
    assert drawn == set(product(roles, roles))
    first = {role_of_replacement(seed, 4, ended, decodes=True) for seed in range(99) for ended in roles[:2]}
    assert first == {"aggregated", "decode"}


def test_a_decode_worker_whose_load_stays_reserved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(session: Session) -> list[Action]:
        session._decoder = None
        return []

    monkeypatch.setattr(Session, "_drop_decoder", kept)
    assert finds("reservations that nobody ended|keeps the reservations", apart())


def test_a_hand_over_of_which_no_frontend_hears_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(hand_overs: HandOvers, _now_s: float) -> list[Sequence]:
        hand_overs._storing.clear()
        return []

    monkeypatch.setattr(HandOvers, "take_ended", forget)
    assert finds("lost [1-9][0-9]* attempts|has the attempts", apart())


def test_a_prefill_worker_that_decodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Session._on_selected

    def whole(session: Session, choice: Selected) -> list[Action]:
        actions = sound(session, choice)
        return [
            msgspec.structs.replace(each, prefill_only=False) if isinstance(each, DispatchAttempt) else each
            for each in actions
        ]

    monkeypatch.setattr(Session, "_on_selected", whole)
    assert finds("decodes, but its role is prefill", apart())


def test_a_gap_that_is_not_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceSync, "_close_gap", lambda _: [])
    monkeypatch.setattr(SourceSync, "validate", lambda _: None)
    assert finds(r"has \d+ blocks of w\d too many", stormy())


def test_a_kvbm_of_whose_return_engines_do_not_hear_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_sockets: MemorySockets, path: Path, **_: object) -> MemoryStream:
        raise ConnectionRefusedError(path)

    monkeypatch.setattr(MemorySockets, "connect", refuse)
    assert finds("is attached to '', not to 'k", stormy())


def test_what_kvbm_holds_for_no_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayoutStore, "expire", lambda _: [])
    monkeypatch.setattr(LayoutStore, "release", lambda *_: Settled())  # that one is lost on its way is too rare
    assert finds("fetches=[1-9]", stormy())


def test_blocks_that_a_kvbm_does_not_tell_of_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLog, "add", lambda *_: None)
    monkeypatch.setattr(EventLog, "validate", lambda _: None)
    assert finds("has other blocks of k", clear())


def test_reservations_that_are_not_ended_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadTracker, "mark_finished", lambda _self, _attempt: None)
    assert finds("reservations that nobody ended", clear())


def test_reservations_of_workers_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(_self: LoadTracker, _instance: str) -> list[CandidateId]:
        return []

    monkeypatch.setattr(LoadTracker, "remove_instance", kept)
    monkeypatch.setattr(LoadTracker, "apply_report", lambda *_, **__: None)
    assert finds("keeps the reservations", stormy())


def test_a_token_that_comes_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Session._on_part

    def blind(session: Session, instance: str, part: Part) -> list[Action]:
        return sound(session, instance, msgspec.structs.replace(part, first=len(session.tokens)))

    monkeypatch.setattr(Session, "_on_part", blind)
    monkeypatch.setattr(Frames, "frame_received", lambda *_: "due")
    assert finds("instead of|was due", stormy())


def test_step_frames_that_are_not_asked_for_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "next_actions", lambda *_: [])
    assert finds("waited for its deadline", stormy())


def test_a_request_that_is_not_rescued_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "pause_ended", lambda *_: False)
    survived = (each for each in map(plan, range(20 * TRIED)) if each.survived)
    assert finds("failed for what should cost a pause", survived)


def test_expectations_that_do_not_expire_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "expire", lambda *_, **__: None)
    assert finds("still expects", clear())


def test_blocks_of_workers_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectoryFollower, "_clear_later", lambda *_: None)
    assert finds("of the living", stormy())


def test_an_exception_out_of_a_callback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Worker._cancel

    async def wild(worker: Worker, message: Message) -> None:
        await sound(worker, message)
        raise ValueError

    monkeypatch.setattr(Worker, "_cancel", wild)
    assert finds(r"a subscription of w\d failed", clear())


def test_a_request_that_outlives_its_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Session.on
    monkeypatch.setattr(
        Session, "on", lambda session, event: [] if isinstance(event, TimeExpired) else sound(session, event)
    )
    assert finds("after its deadline|has no end|called invalid", stormy())

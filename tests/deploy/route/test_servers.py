"""deploy/local/route/servers.py: which servers have a worker, and what is said of each."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deploy.local.route.answers import Found, ListedModel, ServerModels
from deploy.local.route.servers import (
    GIVEN_UP_DELAY_S,
    LAST_DELAY_S,
    REMIND_S,
    Action,
    Ask,
    Event,
    Gone,
    Join,
    LeaveServer,
    Say,
    Seen,
    ServerAnswered,
    Servers,
    TimePassed,
    Wanted,
)
from deploy.local.route.targets import Target, parse_targets

ONE, TWO, THREE = parse_targets(["http://one", "http://two", "http://three"])
FITS = Found(ServerModels((ListedModel("tiny"),)), "0.32.0", 16, 64, 1)
OTHER = Found(ServerModels((ListedModel("other"),)), "0.32.0", 16, 64, 1)
LARGER = Found(ServerModels((ListedModel("tiny"),)), "0.32.0", 32, 64, 1)
DESCRIBED = "vLLM 0.32.0, model tiny, 64 blocks of 16 tokens, routed by what was sent"


def joined(*targets: Target) -> Servers:
    """Return servers that serve: by default the first one."""
    servers = Servers({"tiny"})
    wanted = [target for target in (ONE, TWO, THREE) if target in (targets or (ONE,))]
    servers.on(Wanted(wanted), 0.0)
    for target in wanted:
        servers.on(ServerAnswered(target.url, FITS), 0.0)
        servers.on(Seen(target.url, ready=True), 0.0)
    return servers


def on(servers: Servers, event: Event, now_s: float) -> list[Action]:
    actions = servers.on(event, now_s)
    servers.validate()
    return actions


def test_a_server_that_fits_gets_a_worker_and_is_said_to_serve_once_that_is_ready() -> None:
    servers = Servers({"tiny"})
    assert on(servers, Wanted([ONE, TWO]), 0.0) == [Ask(ONE), Ask(TWO)]
    assert on(servers, ServerAnswered(ONE.url, FITS), 0.1) == [
        Say(f"{ONE.url}: {DESCRIBED}"),
        Join(ONE, FITS, "tiny"),
    ]
    assert on(servers, Seen(ONE.url, ready=False), 1.0) == []
    assert on(servers, Seen(ONE.url, ready=True), 2.0) == [Say(f"{ONE.url}: serves")]
    assert on(servers, Seen(ONE.url, ready=True), 3.0) == []
    assert servers.joined == [ONE]


def test_a_server_that_is_down_is_said_once_and_asked_again_after_a_back_off_with_a_bound() -> None:
    servers, now_s, waits_s = joined(), 0.0, []
    assert on(servers, Wanted([ONE, TWO]), 0.0) == [Ask(TWO)]
    assert on(servers, ServerAnswered(TWO.url, None, "down"), 0.0) == [Say(f"{TWO.url}: left out: down")]
    for _ in range(6):
        begun_s = now_s
        while on(servers, TimePassed(), now_s) != [Ask(TWO)]:
            now_s += 0.5
        waits_s.append(now_s - begun_s)
        assert on(servers, ServerAnswered(TWO.url, None, "down"), now_s) == []
    assert waits_s == [1.0, 2.0, 4.0, 8.0, LAST_DELAY_S, LAST_DELAY_S]
    assert on(servers, TimePassed(), now_s + 10.0) == [Ask(TWO)]
    assert on(servers, ServerAnswered(TWO.url, FITS), now_s + 10.0)[-1:] == [Join(TWO, FITS, "tiny")]


def test_another_model_or_block_size_is_left_out_and_named() -> None:
    servers = joined()
    on(servers, Wanted([ONE, TWO, THREE]), 0.0)
    assert on(servers, ServerAnswered(TWO.url, OTHER), 1.0) == [
        Say(f"{TWO.url}: left out: has no model tiny; it has other")
    ]
    assert on(servers, ServerAnswered(THREE.url, LARGER), 1.0) == [
        Say(f"{THREE.url}: left out: has blocks of 32 tokens, the others have 16: start it with --block-size")
    ]


def test_servers_that_take_text_and_those_of_token_ids_are_not_mixed() -> None:
    servers = Servers({"tiny"}, text=False)
    servers.on(Wanted([ONE]), 0.0)
    found = Found(ServerModels((ListedModel("tiny"),)), text=True)
    said, *_ = [action for action in on(servers, ServerAnswered(ONE.url, found), 0.0) if isinstance(action, Say)]
    assert said.line.startswith(f"{ONE.url}: left out: takes text alone, and the others do not")


def test_without_a_name_any_model_will_do() -> None:
    servers = Servers(None)
    on(servers, Wanted([ONE]), 0.0)
    assert on(servers, ServerAnswered(ONE.url, OTHER), 0.0)[-1:] == [Join(ONE, OTHER, "other")]


def test_what_was_said_before_the_model_was_known_is_not_said_again() -> None:
    former = Servers(None)
    on(former, Wanted([ONE, TWO]), 0.0)
    on(former, ServerAnswered(TWO.url, None, "down"), 0.0)
    on(former, ServerAnswered(ONE.url, FITS), 0.0)
    servers = Servers({"tiny"}, former)
    assert on(servers, Wanted([ONE, TWO]), 1.0)[:2] == [Ask(ONE), Ask(TWO)]
    assert on(servers, ServerAnswered(TWO.url, None, "down"), 1.0) == []
    assert on(servers, ServerAnswered(ONE.url, FITS), 1.0) == [Join(ONE, FITS, "tiny")]


def test_a_server_that_goes_away_is_said_and_asked_what_it_is_when_it_serves_again() -> None:
    servers = joined(ONE, TWO)
    away = Seen(ONE.url, ready=False, reason="does not answer")
    assert on(servers, away, 1.0) == [Say(f"{ONE.url}: left out: does not answer")]
    assert on(servers, away, 2.0) == []
    assert on(servers, Seen(ONE.url, ready=True), 3.0) == [Say(f"{ONE.url}: serves"), Ask(ONE)]
    assert on(servers, ServerAnswered(ONE.url, FITS), 3.0) == []
    assert servers.joined == [ONE, TWO]


def test_a_server_that_came_back_otherwise_gets_another_worker() -> None:
    servers = joined()
    on(servers, Seen(ONE.url, ready=False, reason="does not answer"), 1.0)
    on(servers, Seen(ONE.url, ready=True), 2.0)
    assert on(servers, ServerAnswered(ONE.url, LARGER), 2.0) == [LeaveServer(ONE)]
    assert servers.leaving == [ONE]
    assert on(servers, TimePassed(), 100.0) == []
    assert on(servers, Gone(ONE.url), 101.0) == [Ask(ONE)]
    assert on(servers, ServerAnswered(ONE.url, LARGER), 101.0)[-1:] == [Join(ONE, LARGER, "tiny")]


def test_a_worker_that_has_given_up_is_drained_and_its_server_asked_again_later() -> None:
    servers = joined(ONE, TWO)
    given_up = Seen(ONE.url, ready=False, reason="serves another model", given_up=True)
    assert on(servers, given_up, 1.0) == [Say(f"{ONE.url}: left out: serves another model"), LeaveServer(ONE)]
    assert on(servers, given_up, 2.0) == []
    assert on(servers, Gone(ONE.url), 3.0) == []
    assert on(servers, TimePassed(), 0.9 + GIVEN_UP_DELAY_S) == []
    assert on(servers, TimePassed(), 1.0 + GIVEN_UP_DELAY_S) == [Ask(ONE)]


def test_a_server_that_is_not_wanted_any_more_is_drained_and_may_come_again_meanwhile() -> None:
    servers = joined(ONE, TWO)
    assert on(servers, Wanted([TWO]), 1.0) == [Say(f"{ONE.url}: not wanted any more"), LeaveServer(ONE)]
    assert on(servers, Wanted([TWO]), 2.0) == []
    assert on(servers, Wanted([ONE, TWO]), 3.0) == []
    assert on(servers, Gone(ONE.url), 4.0) == [Ask(ONE)]
    assert on(servers, Wanted([TWO]), 5.0) == [Say(f"{ONE.url}: not wanted any more")]
    assert on(servers, ServerAnswered(ONE.url, FITS), 6.0) == []
    assert servers.joined == [TWO]


def test_that_none_serves_is_said_once_each_has_been_asked_and_again_after_a_while() -> None:
    servers = Servers({"tiny"})
    line = Say("waiting: none of the servers (2) serves; they are asked again and again")
    on(servers, Wanted([ONE, TWO]), 0.0)
    assert line not in on(servers, ServerAnswered(ONE.url, None, "down"), 0.0)
    assert line in on(servers, ServerAnswered(TWO.url, None, "down"), 0.0)
    assert line not in on(servers, TimePassed(), REMIND_S - 0.1)
    assert line in on(servers, TimePassed(), REMIND_S)


class Route(RuleBasedStateMachine):
    """Any order of events, also of answers that come late. Each server has at most one worker, and each that is wanted
    and fits has one in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.servers = Servers({"tiny"})
        self.wanted: list[Target] = []
        self.asked: list[str] = []
        self.workers: dict[str, str] = {}
        """URL → joined or leaving."""
        self.lines = 0

    def do(self, event: Event) -> None:
        before = self.lines
        for action in self.servers.on(event, self.now_s):
            match action:
                case Ask(target):
                    self.asked.append(target.url)
                case Join(target):
                    assert target.url not in self.workers
                    self.workers[target.url] = "joined"
                case LeaveServer(target):
                    assert self.workers[target.url] == "joined"
                    self.workers[target.url] = "leaving"
                case Say():
                    self.lines += 1
        assert self.lines - before <= 4, "few lines for an event"
        self.servers.validate()

    @rule(these=st.lists(st.sampled_from((ONE, TWO, THREE)), unique=True))
    def others_are_wanted(self, these: list[Target]) -> None:
        self.wanted = these
        self.do(Wanted(these))

    @precondition(lambda self: self.asked)
    @rule(found=st.sampled_from((FITS, FITS, OTHER, LARGER, None)), choice=st.data())
    def a_server_answers(self, found: Found | None, choice: st.DataObject) -> None:
        url = choice.draw(st.sampled_from(self.asked))
        self.asked.remove(url)
        self.do(ServerAnswered(url, found, "" if found else "down"))

    @precondition(lambda self: "joined" in self.workers.values())
    @rule(kind=st.sampled_from(("ready", "away", "starting", "given up")), choice=st.data())
    def a_worker_is_seen(self, kind: str, choice: st.DataObject) -> None:
        url = choice.draw(st.sampled_from([url for url, state in self.workers.items() if state == "joined"]))
        reason = "away" if kind in ("away", "given up") else ""
        self.do(Seen(url, ready=kind == "ready", reason=reason, given_up=kind == "given up"))

    @precondition(lambda self: "leaving" in self.workers.values())
    @rule(choice=st.data())
    def a_worker_is_gone(self, choice: st.DataObject) -> None:
        url = choice.draw(st.sampled_from([url for url, state in self.workers.items() if state == "leaving"]))
        del self.workers[url]
        self.do(Gone(url))

    @rule(passed_s=st.sampled_from((0.5, 10.0, 60.0)))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.do(TimePassed())

    @invariant()
    def the_workers_are_those_that_it_knows(self) -> None:
        assert {one.url for one in self.servers.joined} == {u for u, state in self.workers.items() if state == "joined"}
        assert {one.url for one in self.servers.leaving} == {
            url for url, state in self.workers.items() if state == "leaving"
        }

    def teardown(self) -> None:
        for _ in range(8):
            for url in [url for url, state in self.workers.items() if state == "leaving"]:
                del self.workers[url]
                self.do(Gone(url))
            self.now_s += GIVEN_UP_DELAY_S
            self.do(TimePassed())
            for url in list(self.asked):
                self.asked.remove(url)
                self.do(ServerAnswered(url, FITS))
        sizes = {one.url for one in self.servers.joined}
        assert sizes <= {target.url for target in self.wanted}
        assert bool(sizes) == bool(self.wanted), "not all may fit: the first to join may have larger blocks"


TestRoute = Route.TestCase
TestRoute.settings = settings(max_examples=60, stateful_step_count=40)

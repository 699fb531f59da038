"""deploy/local/route/names.py: which servers the names of hosts stand for."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deploy.local.route.names import LOOKUP_S, MISSED, Names
from deploy.local.route.targets import MOST_TARGETS, parse_targets

TARGETS = parse_targets(["http://vllm.svc:8000", "https://other.svc", "http://10.9.9.9:8000", "http://localhost:8001"])
VLLM, OTHER, ADDRESS, LOCAL = TARGETS


def names_of(*addresses: str) -> Names:
    """Return names of which vllm.svc has these addresses."""
    names = Names()
    assert names.due([VLLM], 0.0) == ["vllm.svc"]
    names.looked_up("vllm.svc", addresses)
    return names


def found(names: Names) -> list[str]:
    names.validate()
    return [server.address for server in names.servers([VLLM])[0]]


def test_each_address_of_a_name_is_a_server_and_an_address_or_localhost_is_not_looked_up() -> None:
    names = Names()
    assert names.due(TARGETS, 0.0) == ["vllm.svc", "other.svc"]
    names.looked_up("vllm.svc", ["10.0.0.1", "10.0.0.2"])
    names.looked_up("other.svc", ["fd00::1"])
    servers, said = names.servers(TARGETS)
    assert said == []
    assert [server.name for server in servers] == [
        "http://vllm.svc:8000 at 10.0.0.1",
        "http://vllm.svc:8000 at 10.0.0.2",
        "https://other.svc:443 at fd00::1",
        "http://10.9.9.9:8000",
        "http://localhost:8001",
    ]
    assert servers[0].worker == "worker-http-vllm.svc:8000-10.0.0.1"
    assert servers[0].url == VLLM.url


def test_a_name_is_looked_up_again_and_again_and_a_new_one_at_once() -> None:
    names = names_of("10.0.0.1")
    assert names.due([VLLM], LOOKUP_S - 0.1) == []
    assert names.due([VLLM, OTHER], LOOKUP_S - 0.1) == ["other.svc"]
    assert names.due([VLLM, OTHER], LOOKUP_S) == ["vllm.svc"]


def test_an_address_that_comes_is_a_server_and_one_that_goes_is_let_go_after_some_lookups() -> None:
    names = names_of("10.0.0.1", "10.0.0.2")
    names.looked_up("vllm.svc", ["10.0.0.2", "10.0.0.3"])
    assert set(found(names)) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
    for _ in range(MISSED - 2):
        names.looked_up("vllm.svc", ["10.0.0.3"])
    names.looked_up("vllm.svc", ["10.0.0.1", "10.0.0.3"])
    assert "10.0.0.1" in found(names), "it came back in time"
    for _ in range(MISSED):
        names.looked_up("vllm.svc", ["10.0.0.3"])
    assert found(names) == ["10.0.0.3"]


def test_a_lookup_that_fails_changes_nothing_and_is_said_once() -> None:
    names = names_of("10.0.0.1")
    for said in (["the host vllm.svc has no address: timed out; its servers (1) stay as they are"], [], []):
        names.looked_up("vllm.svc", [], "timed out")
        assert names.servers([VLLM])[1] == said
    assert found(names) == ["10.0.0.1"]
    names.looked_up("vllm.svc", ["10.0.0.1"])
    assert names.servers([VLLM])[1] == []
    names.looked_up("vllm.svc", [])
    assert names.servers([VLLM])[1] == [
        "the host vllm.svc has no address: no address; its servers (1) stay as they are"
    ]


def test_a_name_without_an_address_is_no_server_yet() -> None:
    names = Names()
    names.due([VLLM], 0.0)
    assert names.servers([VLLM]) == ((), [])
    names.looked_up("vllm.svc", [], "not known")
    assert names.servers([VLLM]) == ((), ["the host vllm.svc has no address: not known"])


def test_the_same_server_under_two_names_is_one_and_named() -> None:
    same = parse_targets(["http://vllm.svc:8000", "http://vllm-0.svc:8000"])
    names = Names()
    for host in names.due(same, 0.0):
        names.looked_up(host, ["10.0.0.1"])
    servers, said = names.servers(same)
    assert [server.name for server in servers] == ["http://vllm.svc:8000 at 10.0.0.1"]
    assert said == ["http://vllm-0.svc:8000 at 10.0.0.1: left out: the same server as http://vllm.svc:8000 at 10.0.0.1"]
    assert names.servers(same)[1] == []


def test_more_servers_than_the_limit_are_said_and_those_that_were_there_stay() -> None:
    names = Names()
    names.due([VLLM, OTHER], 0.0)
    names.looked_up("other.svc", ["10.1.0.1"])
    assert len(names.servers([VLLM, OTHER])[0]) == 1
    names.looked_up("vllm.svc", [f"10.0.0.{number}" for number in range(MOST_TARGETS + 1)])
    servers, said = names.servers([VLLM, OTHER])
    assert len(servers) == MOST_TARGETS
    assert "10.1.0.1" in {server.address for server in servers}
    assert said == ["66 servers: the last 2 are left out, 64 stay"]


class Lookups(RuleBasedStateMachine):
    """Any answers, in any order: a server is there as long as one of its last lookups that found any had it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.names = names_of("10.0.0.0")
        self.answers = [{"10.0.0.0"}]

    @rule(numbers=st.sets(st.integers(0, 4)))
    def it_is_looked_up(self, numbers: set[int]) -> None:
        addresses = {f"10.0.0.{number}" for number in numbers}
        self.names.looked_up("vllm.svc", sorted(addresses), "" if addresses else "down")
        if addresses:
            self.answers.append(addresses)

    @rule(passed_s=st.sampled_from((1.0, LOOKUP_S)))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.names.due([VLLM], self.now_s)

    @rule()
    def it_is_forgotten_once_no_target_has_it(self) -> None:
        self.names.due([OTHER], self.now_s)
        assert found(self.names) == []
        self.names.due([VLLM], self.now_s)
        self.answers = []

    @invariant()
    def the_servers_are_those_of_the_last_answers(self) -> None:
        assert set(found(self.names)) == set().union(*self.answers[-MISSED:])


TestLookups = Lookups.TestCase
TestLookups.settings = settings(max_examples=60, stateful_step_count=30)

from __future__ import annotations

import pytest

from deploy.local import policy
from services.router.policy import BUILT_IN
from shared.errors import ConfigError


def test_every_built_in_policy_is_known_without_asking() -> None:
    assert tuple(BUILT_IN) == policy.BUILT_IN


def test_a_module_is_loaded_as_routers_do() -> None:
    policy.check("services.router.policies.kv:KvPolicy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "policy fastest: not one of kv, round-robin, random, least-loaded, power-of-two and not module"),
        ("no.such:Policy", "policy no.such:Policy: ModuleNotFoundError: No module named 'no'"),
        ("json:loads", "policy json:loads: it is no class with filter, score, pick"),
    ],
)
def test_one_that_routers_would_not_start_with_is_told_with_their_words(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        policy.check(name)

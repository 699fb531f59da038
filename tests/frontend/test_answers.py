from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.answers import CachedTokensByTier, usage_of

COUNTS = st.integers(min_value=-3, max_value=40)


@given(COUNTS, COUNTS, COUNTS)
def test_the_tiers_make_up_what_was_cached_whatever_a_worker_says(cached: int, host: int, disk: int) -> None:
    tiers = CachedTokensByTier.of(cached, host, disk)
    assert min(tiers.device, tiers.host, tiers.disk) >= 0
    assert tiers.device + tiers.host + tiers.disk == max(0, cached)
    if min(cached, host, disk) >= 0 and host + disk <= cached:
        assert tiers == CachedTokensByTier(cached - host - disk, host, disk)


def test_no_more_of_a_prompt_is_cached_than_there_is() -> None:
    usage = usage_of(10, 3, 16, 12, 1)
    assert usage.prompt_tokens_details.cached_tokens == 10
    assert usage.prompt_tokens_details.cached_tokens_by_tier == CachedTokensByTier(device=0, host=9, disk=1)
    assert usage.total_tokens == 13

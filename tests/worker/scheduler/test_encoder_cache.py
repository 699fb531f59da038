"""Tests of the encoder cache: least recently used by bytes, the newest stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.scheduler.encoder_cache import EncoderCache


def test_the_least_recently_used_go_until_the_rest_fits() -> None:
    cache: EncoderCache[str] = EncoderCache(10)
    for key in (b"a", b"b", b"c"):
        cache.add(key, key.decode(), 3)
    assert cache.find(b"a") == "a"
    cache.add(b"d", "d", 4)
    assert [key in cache for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    cache.add(b"e", "larger than all", 11)
    assert (len(cache), cache.size_bytes, cache.find(b"e")) == (1, 11, "larger than all")
    cache.add(b"f", "f", 1)
    cache.remove(b"f")
    cache.remove(b"never there")
    assert (len(cache), cache.size_bytes) == (0, 0)
    cache.clear()
    assert (len(cache), cache.size_bytes, cache.find(b"e")) == (0, 0, None)


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8))))
def test_it_holds_the_newest_and_never_more_than_its_limit_next_to_it(limit: int, uses: list[tuple[int, int]]) -> None:
    cache: EncoderCache[int] = EncoderCache(limit)
    sizes: dict[bytes, int] = {}
    for number, size in uses:
        key = bytes([number])
        if cache.find(key) is None:
            cache.add(key, number, size)
            sizes[key] = size
        assert key in cache
        assert cache.size_bytes == sum(size for key, size in sizes.items() if key in cache)
        assert cache.size_bytes <= limit or len(cache) == 1

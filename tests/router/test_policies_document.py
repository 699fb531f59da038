"""The policy in docs/policies.md is short, and works as the document says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.router.selection.policy import BUILT_IN
from shared.messages.select import Reserved
from tests.router.fleet import MODEL, NO_SPECULATION, fleet, tokens_of, until

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import the document's policy as a module, and return its name in the config."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    (code,) = blocks
    assert len(code.splitlines()) <= 30
    (tmp_path / "most_cached.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "most_cached:MostCachedPolicy"
    sys.modules.pop("most_cached", None)


async def test_the_example_follows_the_cache_until_the_worker_is_crowded(example: str) -> None:
    config = msgspec.structs.replace(NO_SPECULATION, policy=example)
    async with fleet(config) as world:
        workers = [await world.worker(name) for name in ("a", "b")]
        prompt = tokens_of("x", 20)
        await workers[1].stores(prompt)
        await world.finds("b", prompt, 20)
        chosen = [await world.chosen([*prompt, 1], f"r{number}") for number in range(5)]
        assert [each.instance for each in chosen] == ["b"] * 5
        assert chosen[0].reason == "20 blocks cached, 0 requests there"
        crowd = Reserved("one more", 1, "f", "b", 0, 10, 10, router="another")
        await world.tell(crowd)
        await until(lambda: world.router.models[MODEL].load.load_of(("b", 0)).requests == 6)
        assert (await world.chosen([*prompt, 1], "last")).instance == "a"
        assert world.metric("headrace_policy_troubles_total", kind="failed") == 0


def test_the_document_names_every_built_in_policy() -> None:
    built_in, _, _ = DOCUMENT.read_text(encoding="utf-8").partition("## A policy of your own")
    named = set(re.findall(r"^\| `([a-z-]+)`", built_in, re.M))
    assert named == set(BUILT_IN)

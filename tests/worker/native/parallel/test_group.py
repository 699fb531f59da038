"""Ranks as processes: steps of the whole runner, and ranks that die, freeze or fail at each time."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from services.worker.native.config import read_config
from services.worker.native.parallel.group import GroupTerms, RankGroup, check_processors
from services.worker.native.parallel.peers import RankLost
from services.worker.native.parallel.rank import RankSizes
from services.worker.native.runner import NativeRunner
from services.worker.native.weights import load_weights
from shared.errors import ModelError
from shared.messages.cards import KvLayout
from shared.messages.generate import Sampling
from shared.processors import usable_processors
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import work

LIMIT_S = 60.0
FROZEN_S = 5.0
"""Seconds until a rank that stands still is lost. A busy machine keeps one that lives from its turn for less."""
SLOTS = [3, 1, 4, 0, 5]
PROMPT = [token * 7 % 320 for token in range(40)]


def terms(
    ranks: int = 2, limit_s: float = LIMIT_S, start_limit_s: float = LIMIT_S, weights_file: Path | None = None
) -> GroupTerms:
    return GroupTerms(ranks, limit_s, start_limit_s, weights_file)


def answer(runner: NativeRunner, length: int) -> list[int]:
    """Return the tokens that a runner draws after PROMPT."""
    history, start = list(PROMPT), 0
    for _ in range(length):
        [drawn] = runner.step([work(history, SLOTS, start=start, prompt_tokens=len(PROMPT))])
        assert drawn is not None
        start = len(history)
        history.append(drawn.token)
    return history[len(PROMPT) :]


def answer_until_lost(runner: NativeRunner) -> str:
    """Compute steps until a rank is lost; return what is said of it."""
    try:
        while True:
            answer(runner, 30)
    except RankLost as lost:
        return str(lost)


def children() -> set[int]:
    """Return the processes that this one has started and that have not been waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ends now
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


@pytest.fixture(autouse=True)
def _no_orphans() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before, "no process of a group outlives it"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def two(tiny: Path) -> Iterator[NativeRunner]:
    with closing(NativeRunner(tiny, capacity_blocks=32, group=terms())) as runner:
        yield runner


def group_of(runner: NativeRunner) -> RankGroup:
    assert runner._group is not None
    return runner._group


def started(directory: Path, of: GroupTerms) -> RankGroup:
    """Return a group whose ranks have just been started."""
    config = read_config(directory)
    layout = KvLayout("float32", config.layers, config.kv_heads, config.head_dim, 16)
    sizes = RankSizes(capacity_blocks=8, context_length=64, lora_rank=8, lora_bytes=0)
    return RankGroup(directory, config, layout, sizes, of)


def ready(directory: Path, group: RankGroup) -> None:
    group.decoder(load_weights(directory, read_config(directory)))
    group.await_ranks()


def test_two_ranks_draw_the_tokens_of_one(tiny: Path, two: NativeRunner) -> None:
    with closing(NativeRunner(tiny, capacity_blocks=32)) as one:
        assert answer(two, 12) == answer(one, 12)
        assert two.facts.kv_layout == one.facts.kv_layout
        assert two.facts.weights == one.facts.weights, "the store takes blocks of both for the same"


def test_four_ranks_which_have_each_key_value_head_twice_draw_the_tokens_of_one(tiny: Path) -> None:
    four = NativeRunner(tiny, capacity_blocks=32, group=terms(ranks=4))
    with closing(four), closing(NativeRunner(tiny, capacity_blocks=32)) as one:
        assert answer(four, 6) == answer(one, 6)


def test_embeddings_and_log_probabilities_of_prompts_are_those_of_one_rank(tiny: Path, two: NativeRunner) -> None:
    embed = work(PROMPT, SLOTS, sampling=Sampling(max_tokens=1, pooling="mean"))
    scored = work(PROMPT, SLOTS, sampling=Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=2))
    with closing(NativeRunner(tiny, capacity_blocks=32)) as one:
        for each in (embed, scored):
            [expected], [found] = one.step([each]), two.step([each])
            assert expected is not None
            assert found is not None
            assert floats(found.embedding) == pytest.approx(floats(expected.embedding), abs=1e-5)
            if expected.prompt_logprobs is not None:
                assert found.prompt_logprobs is not None
                said = found.prompt_logprobs.logprobs
                assert floats(said) == pytest.approx(floats(expected.prompt_logprobs.logprobs), abs=1e-4)


def floats(data: bytes) -> list[float]:
    return list(memoryview(data).cast("f"))


def test_a_step_without_a_token_to_draw_is_one_of_all_ranks_too(two: NativeRunner) -> None:
    assert two.step([work(PROMPT[:16], SLOTS, draws=False)]) == [None]
    assert answer(two, 2)


def test_a_group_that_sleeps_gives_its_pages_back_and_computes_again(two: NativeRunner) -> None:
    said = answer(two, 4)
    assert two.operate("sleep", "", "", 1) == ""
    assert not any(group_of(two).cache.memory)
    assert two.operate("wake", "", "", 1) == ""
    assert answer(two, 4) == said


def test_a_rank_that_is_killed_while_the_group_is_idle_ends_the_next_step_by_its_name(two: NativeRunner) -> None:
    answer(two, 1)
    os.kill(group_of(two).pids[0], signal.SIGKILL)
    assert answer_until_lost(two) == "tensor_parallel: rank 1 was killed by signal 9 (SIGKILL)"


def test_a_rank_that_is_killed_in_mid_step_ends_the_step(two: NativeRunner) -> None:
    killing = threading.Timer(0.1, os.kill, (group_of(two).pids[0], signal.SIGKILL))
    killing.start()
    assert "rank 1 was killed by signal 9" in answer_until_lost(two)
    killing.join()


def test_a_rank_that_is_frozen_in_mid_step_ends_the_step_within_the_limit(tiny: Path) -> None:
    with closing(NativeRunner(tiny, capacity_blocks=32, group=terms(limit_s=FROZEN_S))) as runner:
        freezing = threading.Timer(0.1, os.kill, (group_of(runner).pids[0], signal.SIGSTOP))
        freezing.start()
        assert answer_until_lost(runner) == f"tensor_parallel: rank 1 did not answer in {FROZEN_S:g} s: it stands still"
        freezing.join()


def test_of_three_peers_the_frozen_one_is_named(tiny: Path) -> None:
    with closing(NativeRunner(tiny, capacity_blocks=32, group=terms(ranks=4, limit_s=FROZEN_S))) as runner:
        answer(runner, 1)
        os.kill(group_of(runner).pids[1], signal.SIGSTOP)
        assert answer_until_lost(runner) == f"tensor_parallel: rank 2 did not answer in {FROZEN_S:g} s: it stands still"


def test_a_rank_without_memory_says_so(tiny: Path, two: NativeRunner) -> None:
    pid = group_of(two).pids[0]
    used_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used_bytes, used_bytes))
    long = [token * 3 % 320 for token in range(500)]
    ended = r"failed: \w*MemoryError: .*\.py:\d+\)|ended with status 1; the log may have its last words"
    with pytest.raises(RankLost, match=rf"^tensor_parallel: rank 1 ({ended})$"):  # OpenBLAS ends the process itself
        two.step([work(long, list(range(32)))])


def test_an_idle_group_waits_for_longer_than_a_step_may_take(tiny: Path) -> None:
    with closing(NativeRunner(tiny, capacity_blocks=32, group=terms(limit_s=2.0))) as runner:
        threading.Event().wait(3.0)
        assert answer(runner, 1)


def test_a_rank_that_is_killed_while_it_starts_is_named(tiny: Path) -> None:
    with closing(started(tiny, terms())) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was killed by signal 9"):
            ready(tiny, group)
    group.cache.close()


def test_of_a_rank_that_ends_without_a_word_the_status_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/bin/false")
        group = started(tiny, terms())
    with closing(group), pytest.raises(RankLost, match="rank 1 ended with status 1; the log may have its last words"):
        ready(tiny, group)
    group.cache.close()


def test_a_rank_that_is_frozen_while_it_starts_is_named_at_the_deadline(tiny: Path) -> None:
    with closing(started(tiny, terms(start_limit_s=0.5))) as group:
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"rank 1 did not answer in 0\.5 s"):
            ready(tiny, group)
    group.cache.close()


def test_a_rank_that_cannot_read_the_weights_says_which(tiny: Path) -> None:
    group = started(tiny, terms(weights_file=tiny / "none.safetensors"))
    with closing(group), pytest.raises(RankLost, match=r"rank 1 failed: ModelError: .*none\.safetensors"):
        ready(tiny, group)
    group.cache.close()


def test_ranks_end_when_rank_zero_is_killed_in_mid_step(tiny: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.worker.native.parallel.test_group import answer, terms, NativeRunner\n"
        "runner = NativeRunner(Path(sys.argv[1]), capacity_blocks=32, group=terms())\n"
        "print(*runner._group.pids, flush=True)\n"
        "while True:\n"
        "    answer(runner, 30)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tiny)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        handle = os.pidfd_open(int(first.stdout.readline()))
        first.kill()
        ended, _, _ = select.select([handle], [], [], LIMIT_S)
        os.close(handle)
        assert ended


def test_more_ranks_than_processors_are_refused() -> None:
    check_processors(1)
    more = usable_processors() + 1
    said = rf"^tensor_parallel is {more}, more than the processors that can be used \({more - 1}\)$"
    with pytest.raises(ModelError, match=said):
        check_processors(more)

"""Operations of all ranks: LoRAs and sleep, in processes, and a rank that fails or is lost in one."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from services.worker.config import WeightsConfig, WorkerConfig
from services.worker.contracts.runner import Work
from services.worker.native.parallel.operations import OPERATION_LIMIT_S, RankLimits, do_together
from services.worker.native.parallel.peers import Peers, RankLost
from services.worker.native.runner import NativeRunner, load_native
from services.worker.operations.operator import ENGINE_LIMIT_S
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model
from tests.worker.memory.test_service import serving, shown
from tests.worker.native.parallel.test_group import PROMPT, SLOTS, _no_orphans, answer, group_of, terms
from tests.worker.native.parallel.threaded import LIMIT_S, at_once, closing_all, connected
from tests.worker.native.test_shared_weights import LIMITS, quiet
from tests.worker.native.works import work

__all__ = ["_no_orphans"]
BLOCKS = 32
LEFT_BYTES = 2 << 20
"""What a rank without memory has left: to hear an order and to answer it."""
PATIENCE_S = 300.0
"""How long a rank may take to start, and for a step, on a machine that does other things too."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", tied=False)


@pytest.fixture
def two(tiny: Path) -> Iterator[NativeRunner]:
    with closing(runner_of(tiny, 2)) as runner:
        yield runner


def write_large_model(directory: Path) -> Path:
    """Write a model whose columns, and LoRA of rank 64, take several times LEFT_BYTES in each of two ranks."""
    return write_tiny_model(directory, hidden=512, heads=8, intermediate=2048, layers=4, tied=False)


def runner_of(directory: Path, ranks: int) -> NativeRunner:
    group = terms(ranks, PATIENCE_S, PATIENCE_S) if ranks > 1 else None
    return NativeRunner(directory, capacity_blocks=BLOCKS, lora_bytes=1 << 24, group=group)


def load(runner: NativeRunner, name: str, lora: Path) -> str:
    return runner.operate("load_lora", name, str(lora), 1)


def answers(runner: NativeRunner, loras: list[str], length: int) -> list[list[int]]:
    """Return what a runner draws after PROMPT with each of these LoRAs, all in the same steps."""
    histories, start = [list(PROMPT) for _ in loras], 0
    for _ in range(length):
        works: list[Work] = []
        for number, (lora, history) in enumerate(zip(loras, histories, strict=True)):
            slots = range(len(SLOTS) * number, len(SLOTS) * (number + 1))
            works.append(work(history, slots, start=start, prompt_tokens=len(PROMPT), sequence=number))
            works[-1].lora = lora
        start = len(histories[0])
        for history, drawn in zip(histories, runner.step(works), strict=True):
            assert drawn is not None
            history.append(drawn.token)
    return [history[len(PROMPT) :] for history in histories]


def no_more_files(pid: int) -> tuple[int, int]:
    """Have a process open no further file; return the limits that it had."""
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    return limits


def no_more_memory(pid: int, left_bytes: int = LEFT_BYTES) -> tuple[int, int]:
    """Leave a process this much address space; return the limits that it had."""
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_AS)
    used_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used_bytes + left_bytes, most))
    return limits


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (2, {}),
        (2, {"heads": 9, "kv_heads": 3, "hidden": 144, "intermediate": 200}),
        (4, {"heads": 4, "kv_heads": 2}),
        (2, {"architecture": "Qwen2ForCausalLM"}),
    ],
    ids=["even", "uneven heads", "heads of two ranks", "biases"],
)
def test_ranks_draw_the_tokens_of_one_with_different_loras_in_one_step(
    ranks: int, shape: dict[str, object], tmp_path: Path
) -> None:
    directory = write_tiny_model(tmp_path / "model", tied=False, **shape)  # type: ignore[arg-type]
    mixed = ["poet", "", "clerk", "poet", "clerk"]
    found = []
    for number in (1, ranks):
        with closing(runner_of(directory, number)) as runner:
            for seed, name in enumerate(("poet", "clerk")):
                assert load(runner, name, write_lora(tmp_path / name, directory, seed=seed, rank=5 + seed)) == ""
            assert runner.facts.operations == ("clear", "sleep", "wake", "load_lora", "unload_lora")
            found.append(answers(runner, mixed, 8))
    assert found[1] == found[0]
    assert found[0][0] == found[0][3]
    assert found[0][1] not in (found[0][0], found[0][2])


def test_a_lora_that_was_unloaded_can_be_loaded_again_and_another_in_its_place(
    tiny: Path, two: NativeRunner, tmp_path: Path
) -> None:
    plain = answer(two, 4)
    poet, clerk = (write_lora(tmp_path / name, tiny, seed=seed) for seed, name in enumerate(("poet", "clerk")))
    assert load(two, "lora", poet) == ""
    [first] = answers(two, ["lora"], 6)
    assert two.operate("unload_lora", "lora", "", 1) == ""
    assert two._loras.size_bytes == 0
    assert load(two, "lora", clerk) == ""
    [second] = answers(two, ["lora"], 6)
    assert first != second
    assert two.operate("unload_lora", "lora", "", 1) == ""
    assert load(two, "lora", poet) == ""
    assert answers(two, ["lora"], 6) == [first]
    assert answer(two, 4) == plain


def test_what_is_wrong_with_a_lora_is_the_line_of_one_rank(tiny: Path, two: NativeRunner, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", hidden=96, heads=6)
    wrong = write_lora(tmp_path / "wrong", other)
    with closing(runner_of(tiny, 1)) as one:
        for attempt in (
            lambda runner: load(runner, "lora", wrong),
            lambda runner: load(runner, "lora", tmp_path / "nothing"),
            lambda runner: runner.operate("unload_lora", "lora", "", 1),
        ):
            assert attempt(two) == attempt(one) != ""
    assert "of model.layers.0.self_attn.q_proj has shape" in load(two, "lora", wrong)
    assert load(two, "lora", write_lora(tmp_path / "lora", tiny)) == ""
    assert answers(two, ["lora"], 2)


def test_each_rank_keeps_its_part_of_a_lora_alone(tiny: Path, two: NativeRunner, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", tiny, rank=8)
    with closing(runner_of(tiny, 1)) as one:
        assert load(one, "lora", lora) == load(two, "lora", lora) == ""
        assert two._loras.size_bytes < 0.8 * one._loras.size_bytes
        [own] = two._loras.of({"lora": [(0, 1)]})
        for layer in own.layers:
            for pair in layer.values():
                assert (pair.a.base is None) or pair.a.base.size == pair.a.size, "nothing keeps the rest in memory"
                assert (pair.b.base is None) or pair.b.base.size == pair.b.size


def test_a_rank_that_cannot_load_a_lora_is_named_and_no_rank_has_it(
    tiny: Path, two: NativeRunner, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora", tiny)
    pid = group_of(two).pids[0]
    limits = no_more_files(pid)
    refused = load(two, "poet", lora)
    assert refused.startswith("load_lora: ")
    assert refused.endswith("Too many open files (rank 1)")
    assert two._loras.size_bytes == 0
    assert answer(two, 2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert load(two, "poet", lora) == ""
    assert answers(two, ["poet", ""], 3)


def test_a_rank_without_memory_for_a_lora_refuses_it(tmp_path: Path) -> None:
    directory = write_large_model(tmp_path / "model")
    lora = write_lora(tmp_path / "lora", directory, rank=64)
    with closing(runner_of(directory, 2)) as runner:
        pid = group_of(runner).pids[0]
        limits = no_more_memory(pid)
        for _ in range(2):
            assert load(runner, "poet", lora) == f"load_lora: {lora}: Cannot allocate memory (rank 1)"
            assert runner._loras.size_bytes == 0
        resource.prlimit(pid, resource.RLIMIT_AS, limits)
        assert load(runner, "poet", lora) == ""
        assert answers(runner, ["poet", ""], 3)


def test_a_rank_that_is_killed_while_loras_are_loaded_is_named(tiny: Path, two: NativeRunner, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", tiny)
    killing = threading.Timer(0.05, os.kill, (group_of(two).pids[0], signal.SIGKILL))
    killing.start()
    with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 was killed by signal 9 \(SIGKILL\)$"):
        operate_forever(two, lora)
    killing.join()


def operate_forever(runner: NativeRunner, lora: Path) -> None:
    while True:
        assert load(runner, "lora", lora) == ""
        assert runner.operate("unload_lora", "lora", "", 1) == ""


def test_a_rank_that_stands_still_when_a_lora_is_loaded_is_named(tiny: Path, two: NativeRunner, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", tiny)
    group_of(two)._limits = RankLimits(step_s=PATIENCE_S, operation_s=0.5)
    [(_, connection)] = group_of(two)._peers.connections
    assert connection.recv(1, socket.MSG_PEEK), "rank 1 waits for an order"
    os.kill(group_of(two).pids[0], signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 did not answer in 0\.5 s: it stands still$"):
        load(two, "lora", lora)


def test_a_rank_that_stands_still_is_named_before_the_worker_kills_the_engine(two: NativeRunner) -> None:
    assert group_of(two)._limits.operation_s == OPERATION_LIMIT_S < ENGINE_LIMIT_S


def test_a_group_that_slept_at_level_2_has_given_its_weights_back_and_reads_them_again(
    tiny: Path, two: NativeRunner, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora", tiny)
    assert load(two, "poet", lora) == ""
    expected = answers(two, ["poet", ""], 4)
    pids = [os.getpid(), *group_of(two).pids]
    weights = str(tiny / "model.safetensors")
    assert all(weights in mapped(pid) for pid in pids)
    for _ in range(2):
        assert two.operate("sleep", "", "", 2) == ""
        assert not any(group_of(two).cache.memory)
        assert not any(weights in mapped(pid) for pid in pids)
        assert two.operate("wake", "", "", 1) == ""
        assert all(weights in mapped(pid) for pid in pids)
        assert answers(two, ["poet", ""], 4) == expected


def test_ranks_that_sleep_at_level_2_give_their_copies_back(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", layers=40, intermediate=896)
    copied = 40 * 64 * (32 + 448) * 4  # columns of o and down, in each of the two
    with closing(runner_of(directory, 2)) as runner:
        assert load(runner, "poet", write_lora(tmp_path / "lora", directory)) == ""
        pids = [os.getpid(), *group_of(runner).pids]
        awake = [own_bytes(pid) for pid in pids]
        assert runner.operate("sleep", "", "", 2) == ""
        assert all(before - own_bytes(pid) > copied / 2 for before, pid in zip(awake, pids, strict=True))


def own_bytes(pid: int) -> int:
    """Return how much memory without a file a process has."""
    [line] = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) << 10


def mapped(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_group_loads_and_unloads_loras_while_it_sleeps(tiny: Path, two: NativeRunner, tmp_path: Path) -> None:
    poet, clerk = (write_lora(tmp_path / name, tiny, seed=seed) for seed, name in enumerate(("poet", "clerk")))
    assert load(two, "clerk", clerk) == ""
    expected = answers(two, ["clerk"], 4)
    assert load(two, "poet", poet) == ""
    assert two.operate("sleep", "", "", 2) == ""
    assert two.operate("unload_lora", "poet", "", 1) == ""
    assert two.operate("unload_lora", "clerk", "", 1) == ""
    assert load(two, "clerk", clerk) == ""
    assert two.operate("wake", "", "", 1) == ""
    assert answers(two, ["clerk"], 4) == expected


def test_a_group_does_not_wake_with_other_weights(two: NativeRunner) -> None:
    said = answer(two, 4)
    weights = Path(two.facts.path) / "model.safetensors"
    stored = weights.read_bytes()
    assert two.operate("sleep", "", "", 2) == ""
    weights.write_bytes(stored[:-400] + bytes(400))
    for _ in range(2):
        assert "the weights have changed since the worker started" in two.operate("wake", "", "", 1)
    weights.write_bytes(stored)
    assert two.operate("wake", "", "", 1) == ""
    assert answer(two, 4) == said


def test_a_rank_that_cannot_read_the_weights_again_is_named_and_all_stay_asleep(tiny: Path, two: NativeRunner) -> None:
    said = answer(two, 4)
    assert two.operate("sleep", "", "", 2) == ""
    pids = [os.getpid(), *group_of(two).pids]
    limits = no_more_files(pids[1])
    refused = two.operate("wake", "", "", 1)
    assert refused.startswith("wake: ")
    assert refused.endswith("Too many open files (rank 1)")
    assert not any(str(tiny / "model.safetensors") in mapped(pid) for pid in pids)
    resource.prlimit(pids[1], resource.RLIMIT_NOFILE, limits)
    assert two.operate("wake", "", "", 1) == ""
    assert answer(two, 4) == said


@pytest.mark.parametrize(
    ("room", "said"),
    [(0, "Cannot allocate memory"), (1, "no memory is left for the weights")],
    ids=["to map the file", "to copy columns"],
)
def test_a_rank_without_memory_to_wake_gives_back_what_it_has_and_all_stay_asleep(
    room: int, said: str, tmp_path: Path
) -> None:
    directory = write_large_model(tmp_path / "model")
    weights = directory / "model.safetensors"
    with closing(runner_of(directory, 2)) as runner:
        before = answer(runner, 3)
        assert runner.operate("sleep", "", "", 2) == ""
        pids = [os.getpid(), *group_of(runner).pids]
        limits = no_more_memory(pids[1], room * weights.stat().st_size + LEFT_BYTES)
        for _ in range(2):
            assert runner.operate("wake", "", "", 1) == f"wake: {directory}: {said} (rank 1)"
            assert not any(str(weights) in mapped(pid) for pid in pids)
        resource.prlimit(pids[1], resource.RLIMIT_AS, limits)
        assert runner.operate("wake", "", "", 1) == ""
        assert answer(runner, 3) == before


def test_ranks_give_weights_back_to_the_memory_service_and_map_them_again(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", dtype="bfloat16")
    settings = WorkerConfig(
        model=str(directory),
        cache=str(tmp_path / "cache"),
        weights=WeightsConfig(memory=str(tmp_path / "memory"), timeout_s=20.0),
        capacity_blocks=BLOCKS,
        tensor_parallel=2,
    )
    with serving(tmp_path / "memory", LIMITS), closing(load_native(settings, quiet)) as runner:
        pids = [os.getpid(), *group_of(runner).pids]
        said = answer(runner, 4)
        assert all("memfd:headrace-weights" in mapped(pid) for pid in pids)
        assert runner.operate("sleep", "", "", 2) == ""
        assert not any("memfd:headrace-weights" in mapped(pid) for pid in pids)
        assert not any("headrace-weights" in opened for opened in files_of(pids[1]))
        assert [row.readers for row in shown(tmp_path / "memory").rows] == [()]
        assert runner.operate("wake", "", "", 1) == ""
        assert all("memfd:headrace-weights" in mapped(pid) for pid in pids)
        assert answer(runner, 4) == said
    assert runner._shared is not None
    runner._shared.release()


def files_of(pid: int) -> list[str]:
    return [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]


# --- the decider, in threads


def undone(words: list[str]) -> tuple[list[str], list[int]]:
    """Have each rank say these words of an operation; return what each returns, and which undo it."""
    undoing: list[int] = []
    limits = RankLimits(LIMIT_S, LIMIT_S)

    def rank(number: int, peers: Peers) -> str:
        return do_together(peers, limits, lambda: words[number], lambda: undoing.append(number))

    with closing_all(connected(len(words))) as group:
        said = at_once([partial(rank, number, peers) for number, peers in enumerate(group)])
    return said, sorted(undoing)


@pytest.mark.parametrize(
    ("words", "said", "undoing"),
    [
        (["", "", ""], "", []),
        (["no", "no", "no"], "no", []),
        (["", "", "no room"], "no room (rank 2)", [0, 1]),
        (["own", "", "other"], "own", [1]),
        (["", "é" * 5000, ""], f"{'é' * 1024} (rank 1)", [0, 2]),
    ],
)
def test_all_ranks_have_done_an_operation_or_none(words: list[str], said: str, undoing: list[int]) -> None:
    assert undone(words) == ([said] * 3, undoing)


def test_a_rank_that_fails_otherwise_in_an_operation_is_lost() -> None:
    limits = RankLimits(LIMIT_S, LIMIT_S)

    def fail() -> str:
        raise OSError("broken")

    def further(peers: Peers) -> str:
        try:
            return do_together(peers, limits, fail, lambda: None)
        except OSError as wrong:
            peers.say_failed(RankLost(1, f"failed: {wrong}"))
            return str(wrong)

    undoing: list[int] = []
    with closing_all(connected(2)) as group:
        calls = [
            partial(do_together, group[0], limits, lambda: "", partial(undoing.append, 0)),
            partial(further, group[1]),
        ]
        with pytest.raises(RankLost, match=r"^tensor_parallel: rank 1 failed: broken$"):
            at_once(calls)
    assert not undoing

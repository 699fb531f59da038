from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.config import SimulatedConfig, WorkerConfig
from services.worker.contracts.mover import Copy
from services.worker.contracts.runner import Work
from services.worker.simulated.timing import Table, Timing
from shared.config import load
from shared.errors import ConfigError
from shared.messages.generate import Sampling
from tests.worker.empty_pool import EmptyPool

CONFIG = SimulatedConfig()
TABLE = b"""
prefill = [[100, 0, 1.0], [200, 0, 2.0], [100, 1000, 2.0], [200, 1000, 4.0]]
decode = [[1, 0, 0.1], [11, 0, 0.2], [1, 100, 0.3], [11, 100, 0.6]]
"""


def work(tokens: int, start: int = 0) -> Work:
    return Work(
        sequence=0,
        history=range(start + tokens),
        start=start,
        end=start + tokens,
        blocks=[],
        sampling=Sampling(max_tokens=1),
        prompt_tokens=1,
    )


def formula(*works: Work, config: SimulatedConfig = CONFIG) -> float:
    return Timing(config).step_s(works)


def table(*works: Work, text: bytes = TABLE) -> float:
    return Timing(CONFIG, Table.parse(text, "times.toml")).step_s(works)


def test_a_step_without_work_takes_no_time() -> None:
    assert formula() == table() == 0.0


@pytest.mark.parametrize(("batch", "matmuls_s"), [(1, 3.92e-3), (32, 4.08e-3), (64, 4.18e-3), (128, 4.57e-3)])
def test_the_matmuls_of_a_decode_step_take_what_they_took_on_the_gpu(batch: int, matmuls_s: float) -> None:
    config = msgspec.structs.replace(CONFIG, fixed_s=0.0, kv_token_s=0.0)
    assert formula(*[work(1, 7)] * batch, config=config) == pytest.approx(matmuls_s, rel=0.02)


def test_a_prefill_is_quadratic_in_its_tokens() -> None:
    config = msgspec.structs.replace(CONFIG, fixed_s=0.0, weights_s=0.0, row_s=0.0, token_s=0.0)
    assert formula(work(2000), config=config) == pytest.approx(4 * formula(work(1000), config=config), rel=0.001)


def test_a_prefill_costs_the_same_attention_in_one_piece_or_in_chunks() -> None:
    config = msgspec.structs.replace(CONFIG, fixed_s=0.0, weights_s=0.0, row_s=0.0)
    chunks = formula(work(300), config=config) + formula(work(700, 300), config=config)
    assert chunks == pytest.approx(formula(work(1000), config=config))


def test_decodes_are_slower_with_more_tokens_to_attend_to() -> None:
    grown_s = formula(work(1, 100_000)) - formula(work(1, 0))
    assert grown_s == pytest.approx(100_000 * CONFIG.kv_token_s)


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 100_000)), min_size=1, max_size=8))
def test_more_work_never_takes_less_time(sizes: list[tuple[int, int]]) -> None:
    works = [work(tokens, start) for tokens, start in sizes]
    assert 0 < formula(*works[1:], works[0]) <= formula(*works, work(1)) <= formula(*works, work(2))


def test_speed_divides_all_times() -> None:
    works = [work(500), work(1, 90)]
    fast = msgspec.structs.replace(CONFIG, speed=10.0)
    assert formula(*works, config=fast) == pytest.approx(formula(*works) / 10)


@pytest.mark.parametrize(
    ("works", "seconds"),
    [
        ([work(100)], 1.0),
        ([work(150)], 1.5),
        ([work(150, 500)], 2.25),
        ([work(200, 1000)], 4.0),
        ([work(50, 0)], 0.55),
        ([work(300, 0)], 3.0),
        ([work(200, 2000)], 6.0),
        ([work(100), work(100)], 1.9),
        ([work(100), work(100, 1000)], 2.9),
        ([work(1, 49)] * 6, 0.3),
        ([work(100), work(1, 99)], 1.2),
    ],
    ids=[
        "on a point",
        "between tokens",
        "between both",
        "at the corner",
        "below: its part of what goes beyond a decode step",
        "above: the slope goes on",
        "above in context",
        "two prefills are one of both that attends to less",
        "by the pairs of both",
        "decodes by batch and mean context",
        "a mixed step reads the weights once",
    ],
)
def test_a_table_is_interpolated(works: list[Work], seconds: float) -> None:
    assert table(*works) == pytest.approx(seconds)


def test_a_profile_is_a_table_whatever_else_it_has() -> None:
    profile = b'{"format": 1, "complete": true, "prefill": [[100, 0, 2.0]], "decode": [[1, 0, 0.1], [3, 0, 0.3]]}'
    assert table(work(100), text=profile) == 2.0
    assert table(work(1, 50), work(1, 50), text=profile) == pytest.approx(0.2)


def test_a_profile_of_several_workers_has_a_table_of_busy_ones_too() -> None:
    busy = b'{"prefill": [[100, 0, 3.0]], "decode": [[1, 0, 0.4]]}'
    profile = b'{"prefill": [[100, 0, 2.0]], "decode": [[1, 0, 0.1]], "busy": %s}'
    found = {
        both: Timing(CONFIG, Table.parse(profile % text, "t", busy=both)).step_s([work(100)])
        for both, text in ((False, busy), (True, busy))
    }
    assert found == {False: 2.0, True: 3.0}
    assert Timing(CONFIG, Table.parse(profile % b"null", "t", busy=True)).step_s([work(100)]) == 2.0


def test_beyond_a_table_that_falls_the_time_stays_above_zero() -> None:
    falling = b"prefill = [[100, 0, 2.0], [200, 0, 1.0]]\ndecode = [[1, 0, 0.1]]"
    assert table(work(100_000), text=falling) == 1.0
    assert table(work(1, 50), text=falling) == 0.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"prefill = [[1, 0, 1.0]]", "decode"),
        (b"prefill = []\ndecode = [[1, 0, 1.0]]", "prefill: no times"),
        (b"prefill = [[1, 0, 1.0], [2, 1, 1.0]]\ndecode = [[1, 0, 1.0]]", "prefill: no time for 1, 1"),
        (b"prefill = [[1, 0, 1.0], [1, 0, 2.0]]\ndecode = [[1, 0, 1.0]]", "prefill: two times"),
        (b"prefill = [[1, 0, 1.0]]\ndecode = [[1, 0, 0.0]]", "decode: [1, 0, 0] is out of range"),
        (b"prefill = [[1, 0, 1.0]]\ndecode = [[1, 0, inf]]", "decode: [1, 0, inf] is out of range"),
        (b"prefill = [[nan, 0, 1.0]]\ndecode = [[1, 0, 1.0]]", "prefill: "),
        (b"prefill = [[1, 0]]\ndecode = [[1, 0, 1.0]]", "length 3"),
        (b'prefill = [["a", 0, 1.0]]\ndecode = [[1, 0, 1.0]]', "Expected `float`"),
        (b"more = 1\nprefill = [[1, 0, 1.0]]\ndecode = [[1, 0, 1.0]]", "more"),
        (b"prefill = [", "times.toml"),
        (b"\xff", "times.toml"),
        (b'{"prefill": [[1, 0, 1.0]]}', "decode"),
    ],
)
def test_a_bad_table_is_refused_and_says_why(text: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=r"^times\.toml: ") as refused:
        Table.parse(text, "times.toml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["speed = 0", "speed = inf", "speed = nan", "token_s = -1.0", "pair_s = nan", "x = 1"]
)
def test_impossible_settings_are_refused(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'model = "m"\n[simulated]\n{setting}\n', encoding="utf-8")
    with pytest.raises(ConfigError):
        load(WorkerConfig, file=file, environ={})


def test_the_settings_and_the_table_in_the_documentation_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "simulated.md").read_text(encoding="utf-8")
    settings, times = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "worker.toml"
    file.write_text(settings, encoding="utf-8")
    config = load(WorkerConfig, file=file, environ={})
    assert (config.engine, config.simulated) == ("simulated", SimulatedConfig())
    for works in ([work(512)], [work(8192)], [work(8192, 32768)], [work(1, 1)] * 64, [work(1, 32767)] * 64):
        assert table(*works, text=times.encode()) == pytest.approx(formula(*works), rel=0.1)


def test_blocks_are_copied_at_the_rate_that_is_set() -> None:
    config = msgspec.structs.replace(CONFIG, copy_bytes_per_s=1e9, kv_token_bytes=1000, speed=2.0)
    mover = Timing(config).mover(16, lambda: 1.0)
    mover.attach(EmptyPool())
    mover.load(1, [Copy(0, 0)] * 1000)
    assert mover.ends_s == pytest.approx(1 + 8e-3)

"""The sampler on the device against the NumPy sampler: any mixture of rows has the same tokens and ratings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from services.worker.config import CudaConfig
from services.worker.contracts.runner import Drawn, Work
from services.worker.native.config import read_config
from services.worker.native.logprobs import score
from services.worker.native.masks import NO_MASKS, Masks
from services.worker.native.sampler import sample
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling
from tests.gpu.device import cupy_on_a_device
from tests.tiny_model import write_tiny_model
from tests.worker.native.works import GREEDY, work

pytestmark = pytest.mark.gpu
cp = cupy_on_a_device()

from services.worker.native.cuda.kernels import Kernels, compile_kernels  # noqa: E402
from services.worker.native.cuda.sampler import CudaSampler  # noqa: E402

ROWS = 64
Floats = NDArray[np.float32]
Make = Callable[..., CudaSampler]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return compile_kernels(read_config(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")), "bfloat16", 16)


@pytest.fixture
def make(kernels: Kernels) -> Make:
    def made(vocab: int, settings: CudaConfig | None = None) -> CudaSampler:
        room, counts = cp.full((ROWS, vocab), cp.nan, cp.float32), cp.full((ROWS, vocab), -1, cp.int32)
        return CudaSampler(kernels, cp.cuda.get_current_stream(), room, counts, settings or CudaConfig())

    return made


def draw(sampler: CudaSampler, logits: Floats, works: Sequence[Work], masks: Masks = NO_MASKS) -> list[Drawn]:
    sampler.begin(cp.asarray(logits), works)
    return sampler.end(masks)


def works_of(settings: Sequence[Sampling], history: Sequence[int] = (1, 2, 3, 1)) -> list[Work]:
    return [work(list(history), [0], sampling=one, prompt_tokens=2, sequence=n) for n, one in enumerate(settings)]


def check(drawn: Sequence[Drawn], expected: Sequence[Drawn]) -> None:
    """Compare tokens exactly, and ratings within float32."""
    assert [one.token for one in drawn] == [one.token for one in expected]
    assert [(one.error, one.suspect) for one in drawn] == [(one.error, one.suspect) for one in expected]
    for ours, theirs in zip(drawn, expected, strict=True):
        assert (ours.logprob is None) == (theirs.logprob is None)
        if ours.logprob is not None and theirs.logprob is not None:
            assert ours.logprob.top_tokens == theirs.logprob.top_tokens
            values = [ours.logprob.logprob, *ours.logprob.top_logprobs]
            assert np.allclose(values, [theirs.logprob.logprob, *theirs.logprob.top_logprobs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("waits", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("vocab", [5, 1000, 49152, 128256, 262144])
def test_drawn_tokens_are_those_of_the_numpy_sampler(make: Make, vocab: int, waits: tuple[bool, bool]) -> None:
    busy_wait, copy_stream = waits
    sampler = make(vocab, CudaConfig(busy_wait_events=busy_wait, output_copy_stream=copy_stream))
    random = np.random.default_rng(vocab)
    logits = random.normal(0, 4, (ROWS, vocab)).astype(np.float32)
    logits[3, :] = 1.0  # all equal: the lowest id
    settings = [
        Sampling(max_tokens=1, temperature=[0.0, 0.7, 1.0, 1.5][n % 4], seed=int(random.integers(0, 1 << 63)))
        for n in range(56)
    ] + [
        Sampling(max_tokens=1, temperature=0.9, top_k=4, seed=5),
        Sampling(max_tokens=1, temperature=0.9, top_p=0.6, seed=6),
        Sampling(max_tokens=1, temperature=0.9, min_p=0.1, seed=6),
        Sampling(max_tokens=1, temperature=0.9, top_k=vocab, top_p=0.99, min_p=0.001, seed=7),
        Sampling(max_tokens=1, temperature=0.0, repetition_penalty=1.3),
        Sampling(max_tokens=1, temperature=0.0, logit_bias=((0, 100.0), (4, -100.0), (2, 1.5))),
        Sampling(max_tokens=1, temperature=1.0, logprobs=3, seed=8),
        Sampling(max_tokens=1, temperature=1.0, top_p=0.5, logprobs=20, seed=9),
    ]
    works = works_of(settings)
    check(draw(sampler, logits, works), sample(logits, works))


def mixture(random: np.random.Generator, vocab: int, most: int) -> Sampling:
    """Return settings of which each is off in half of the rows, and at its bounds in some."""

    def some(values: Sequence[Any], off: Any) -> Any:
        return off if random.integers(2) else values[int(random.integers(len(values)))]

    biased = random.permutation(vocab)[: int(random.integers(min(vocab, 9)))].tolist() if random.integers(2) else ()
    allowed = random.permutation(vocab)[: int(random.integers(1, vocab + 1))]
    return Sampling(
        max_tokens=100,
        temperature=some([0.0, 0.05, 0.7, 2.0], 1.0),
        top_p=some([1e-300, 1e-9, 0.1, 0.9, 0.999], 1.0),
        top_k=some([1, 2, 40, vocab - 1, vocab, vocab + 1], 0),
        min_p=some([1e-6, 0.05, 1.0], 0.0),
        seed=int(random.integers(0, 1 << 64, dtype=np.uint64)),
        presence_penalty=some([-2.0, 0.5, 2.0], 0.0),
        frequency_penalty=some([-2.0, 0.3, 2.0], 0.0),
        repetition_penalty=some([1e-300, 0.8, 1.2, 1e300], 1.0),
        logprobs=some([0, 1, min(most, vocab)], -1),
        logit_bias=tuple((token, float(random.uniform(-100, 100))) for token in biased),
        allowed_tokens=pack_tokens(allowed.tolist()) if random.integers(6) == 0 else b"",
        grammar="g" if random.integers(6) == 0 else "",
        min_tokens=int(random.integers(8)),
    )


@pytest.mark.parametrize("vocab", [5, 320, 5003, 32_000])
def test_ten_thousand_mixtures_draw_the_tokens_of_the_numpy_sampler(make: Make, vocab: int) -> None:
    """Sequences go on for some steps; after each, some leave and others come."""
    sampler, random = make(vocab), np.random.default_rng(vocab)
    works: list[Work] = []
    for step in range(42 if vocab < 10_000 else 32):
        works = [one for one in works if random.integers(5)]
        while len(works) < ROWS:
            prompt = random.integers(0, vocab, int(random.integers(1, 300))).tolist()
            sampling = mixture(random, vocab, 20)
            works.append(work(prompt, [0], sampling=sampling, sequence=1000 * step + len(works)))
            works[-1].barred = random.permutation(vocab)[: int(random.integers(min(4, vocab)))].tolist()
        works = [works[n] for n in random.permutation(ROWS)]
        logits = random.normal(0, float(random.choice([0.1, 3, 30])), (ROWS, vocab)).astype(np.float32)
        logits[random.integers(0, ROWS, 4)] = random.integers(-2, 2, (4, vocab))  # many are equal
        held = {one.sequence: random.random(vocab) < 0.3 for one in works if one.sampling.grammar}
        for mask in held.values():
            mask[random.integers(0, vocab)] = True
        failed = dict.fromkeys(list(held)[:1], "too much")
        masks = Masks({sequence: mask for sequence, mask in held.items() if sequence not in failed}, failed)
        drawn = draw(sampler, logits, works, masks)
        check(drawn, sample(logits, works, masks))
        for one, each in zip(works, drawn, strict=True):
            one.history = [*one.history, each.token]
            one.start, one.end = one.end, one.end + 1


def test_draws_follow_the_filtered_distribution(make: Make) -> None:
    vocab, seeds = 50, 400
    sampler, logits = make(vocab), np.random.default_rng(1).normal(0, 2, vocab).astype(np.float32)
    sampling = Sampling(max_tokens=9, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)
    weights = np.exp((logits - logits.max()) / 0.8, dtype=np.float64)
    order = np.argsort(-weights)
    kept = order[:20]
    mass = np.cumsum(weights[kept]) / weights[kept].sum()
    kept = kept[: int(np.searchsorted(mass, 0.95)) + 1]
    kept = kept[weights[kept] >= 0.01]
    counts = np.zeros(vocab)
    for turn in range(seeds // ROWS * 16):
        works = works_of([replace(sampling, seed=turn * ROWS + n) for n in range(ROWS)])
        for one in draw(sampler, np.tile(logits, (ROWS, 1)), works):
            counts[one.token] += 1
    assert counts.sum() == counts[kept].sum()
    expected = weights[kept] / weights[kept].sum() * counts.sum()
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi_square < len(kept) + 6 * np.sqrt(2 * len(kept))


def test_a_history_longer_than_a_launch_counts_is_counted_in_turns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.native.cuda.sampler._NEW_TOKENS", 100)
    sampler, random = make(320), np.random.default_rng(3)
    logits = random.normal(0, 1, (3, 320)).astype(np.float32)
    settings = Sampling(max_tokens=9, temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1)
    works = [
        work(random.integers(0, 320, 130 * (n + 1)).tolist(), [0], sampling=settings, prompt_tokens=90, sequence=n)
        for n in range(3)
    ]
    check(draw(sampler, logits, works), sample(logits, works))


def test_slots_of_counts_are_used_again(make: Make) -> None:
    sampler, logits = make(40), np.linspace(0, 1, 40, dtype=np.float32)[None].repeat(ROWS, 0)
    settings = Sampling(max_tokens=9, temperature=0.0, presence_penalty=2.0)
    for turn in range(5):
        works = [
            work([n % 40, 39 - turn, 39], [0], sampling=settings, prompt_tokens=1, sequence=turn * ROWS + n)
            for n in range(ROWS)
        ]
        check(draw(sampler, logits, works), sample(logits, works))
        plain = works_of([GREEDY] * ROWS)
        check(draw(sampler, logits, plain), sample(logits, plain))


def test_barred_tokens_are_not_drawn_before_the_least_tokens(make: Make) -> None:
    logits = np.random.default_rng(7).normal(0, 4, (6, 320)).astype(np.float32)
    works = works_of([Sampling(max_tokens=9, temperature=t, seed=5, min_tokens=3) for t in (0.0, 0.7) * 3])
    for one in works[:4]:
        one.barred = [int(logits[0].argmax()), int(logits[2].argmax())]
    works[2].prompt_tokens = works[3].prompt_tokens = 1  # their outputs have three tokens
    drawn = draw(make(320), logits, works)
    check(drawn, sample(logits, works))
    assert drawn[0].token != logits[0].argmax()
    assert drawn[2].token == logits[2].argmax()


def test_a_row_with_all_tokens_barred_but_one_draws_it(make: Make) -> None:
    logits = np.zeros((3, 320), np.float32)
    works = works_of([Sampling(max_tokens=9, temperature=t, seed=5, min_tokens=9, top_p=0.5) for t in (0.0, 0.7, 2.0)])
    for one in works:
        one.barred = [token for token in range(320) if token != 77]
    assert [one.token for one in draw(make(320), logits, works)] == [77] * 3


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_an_error_of_its_row_and_the_others_draw_as_ever(
    make: Make, broken: float
) -> None:
    sampler, plain = make(320), GREEDY
    special, rated = Sampling(max_tokens=1, temperature=0.9, top_k=4, seed=5), Sampling(max_tokens=1, logprobs=2)
    logits = np.zeros((5, 320), np.float32)
    logits[:, 7] = 9
    logits[[1, 3], 317] = broken
    for settings in ([plain] * 5, [special] * 5, [plain, plain, plain, special, special], [rated] * 5):
        works = works_of(settings)
        drawn = draw(sampler, logits, works)
        assert [one.suspect for one in drawn] == [False, True, False, True, False]
        check(drawn, sample(logits, works))


def test_the_likeliest_token_is_drawn_for_the_least_top_p_of_a_flat_distribution(make: Make) -> None:
    """The mass to remove is then rounded to all of it, or to more."""
    random = np.random.default_rng(6)
    logits = random.normal(0, 0.01, (ROWS, 32_000)).astype(np.float32)
    works = works_of([Sampling(max_tokens=1, temperature=1.0, top_p=1e-300, seed=n) for n in range(ROWS)])
    assert [one.token for one in draw(make(32_000), logits, works)] == logits.argmax(1).tolist()


def test_a_sequence_with_other_settings_has_none_of_those_before(make: Make) -> None:
    sampler, logits = make(40), np.linspace(0, 1, 40, dtype=np.float32)[None].repeat(ROWS, 0)
    for sampling in (
        Sampling(max_tokens=9, temperature=0.0, presence_penalty=2.0),
        Sampling(max_tokens=9, temperature=0.0, logit_bias=((3, 100.0),)),
        Sampling(max_tokens=9, temperature=0.0, repetition_penalty=2.0, logit_bias=((4, 100.0),)),
    ):
        works = works_of([sampling] * ROWS, [39, 39, 38, 3])
        check(draw(sampler, logits, works), sample(logits, works))


def test_given_tokens_are_rated_with_the_likeliest(make: Make) -> None:
    vocab, count = 5003, 5
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (ROWS, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, 9] = np.nan
    tokens = random.integers(0, vocab, ROWS, np.int32)
    logprobs, top, top_logprobs = make(vocab).score(cp.asarray(logits), tokens, count)
    expected, likeliest, their_logprobs = score(logits, tokens, count)
    assert np.isnan(logprobs).tolist() == [row == 2 for row in range(ROWS)]
    assert np.allclose(logprobs, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    sound = np.arange(ROWS) != 2
    assert (top[sound] == likeliest[sound]).all()
    assert np.allclose(top_logprobs[sound], their_logprobs[sound], rtol=1e-6, atol=1e-6)
    assert top.shape == (ROWS, count)

"""Prompts with images through scheduler and native runner: transformers' tokens, however they are computed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from services.worker.contracts.messages import EngineOperation, Submit
from services.worker.limits import SchedulerLimits
from services.worker.native.config import read_config
from services.worker.native.image_encoder import image_cost
from services.worker.native.prepare import prepare
from services.worker.native.runner import NativeRunner
from services.worker.scheduler.scheduler import Scheduler
from services.worker.scheduler.step_images import StepImages
from shared.blocks import ContentStored
from shared.hashing import content_keys, image_extras, pack_tokens, root_key, unpack_tokens
from shared.messages.generate import Image, Sampling
from tests.tiny_model import IMAGE_TOKEN, write_tiny_model
from tests.worker.native.golden.cases import (
    ANSWER_TOKENS,
    CASES,
    GOLDEN,
    IMAGE_STARTS,
    LLAVAS,
    image_pixels,
    image_prompt,
)
from tests.worker.native.test_vision_config import LLAVA_7B, PROCESSOR_7B, written

BLOCK_SIZE = 8
LLAMA = LLAVAS[0]


def expected(name: str) -> list[int]:
    with np.load(GOLDEN / "llava.npz") as golden:
        return [int(token) for token in golden[f"{name}: output"]]


class Seeing:
    """A model that takes images, its runner and its scheduler."""

    def __init__(self, directory: Path, name: str, *, step_tokens: int = 8192, cache_bytes: int = 1 << 20) -> None:
        source = write_tiny_model(directory / "model", **CASES[name])
        directory = prepare(source, directory / "cache", lambda _: None)
        self.runner = NativeRunner(
            directory, capacity_blocks=64, block_size=BLOCK_SIZE, encoder_cache_bytes=cache_bytes
        )
        facts = self.runner.facts
        assert facts.images is not None
        assert self.runner.encoder_cache is not None
        self.takes, self.cache = facts.images, self.runner.encoder_cache
        self.scheduler = Scheduler(
            SchedulerLimits(
                model="model",
                context_length=facts.context_length,
                eos_token_ids=frozenset(facts.eos_token_ids),
                block_size=BLOCK_SIZE,
                capacity_blocks=facts.capacity_blocks,
                max_waiting=64,
                first_tokens_per_s=1e9,
                max_step_tokens=step_tokens,
            )
        )
        self.scheduler.images = StepImages(self.cache, facts.image_cost)
        self.answers: dict[str, list[int]] = {}
        """The tokens of `run_with`."""
        self.stored: list[bytes] = []
        """The keys of the blocks that were stored, in order."""

    def image(self, number: int, start: int) -> Image:
        pixels = image_pixels(self.takes.width, number).tobytes()
        return Image(hashlib.sha256(pixels).digest(), start, self.takes.tokens, pixels)

    def images(self) -> tuple[Image, ...]:
        """Return those of `image_prompt`."""
        return tuple(self.image(number, start) for number, start in enumerate(IMAGE_STARTS))

    def submit(
        self, request: str, prompt: list[int], images: tuple[Image, ...], tokens: int = ANSWER_TOKENS, salt: str = ""
    ) -> None:
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        packed = pack_tokens(prompt)
        self.scheduler.submit(
            Submit(request, 1, "f", packed, len(prompt), sampling, 1e6, salt=salt, images=images), 0.0
        )

    def run(self) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Compute until all have ended. Return their tokens, and how many of the prompt's were cached."""
        answers: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        while self.scheduler.living:
            before = self.cache.encoded
            works = self.scheduler.schedule(0.0)
            outcome = self.scheduler.advance(self.runner.step(works), 0.001)
            self.scheduler.validate()
            assert self.cache.encoded - before <= 1, "one image a step"
            assert self.scheduler.images.tokens == (self.cache.encoded > before) * self.runner.facts.image_cost
            self.stored += [event.content.key for event in outcome.events if isinstance(event, ContentStored)]
            for part in outcome.parts["f"]:
                answers.setdefault(part.request, []).extend(unpack_tokens(part.tokens))
                cached[part.request] = part.cached_tokens
        return answers, cached


@pytest.mark.parametrize("step_tokens", [8192, 16, 21])
@pytest.mark.parametrize("name", LLAVAS)
def test_a_prompt_with_two_images_gets_transformers_answer_in_any_chunks(
    tmp_path: Path, name: str, step_tokens: int
) -> None:
    seeing = Seeing(tmp_path, name, step_tokens=step_tokens)
    seeing.submit("a", image_prompt(seeing.takes.tokens), seeing.images())
    answers, _ = seeing.run()
    assert answers["a"] == expected(name)
    assert (seeing.cache.encoded, seeing.cache.hits, len(seeing.cache)) == (2, 0, 2)


def test_the_same_images_again_are_neither_encoded_nor_computed_again(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    prompt, images = image_prompt(16), seeing.images()
    for request, salt, blocks in (("a", "", 0), ("b", "", 7), ("c", "", 0), ("d", "another tenant's", 0)):
        if request == "c":
            seeing.scheduler.clear()
        seeing.submit(request, prompt, images, salt=salt)
        answers, cached = seeing.run()
        assert answers[request] == expected(LLAMA)
        assert cached[request] == blocks * BLOCK_SIZE
        counts = {"a": (2, 0), "b": (2, 0), "c": (2, 2), "d": (4, 2)}
        assert (seeing.cache.encoded, seeing.cache.hits) == counts[request], "a tenant's images are its own"


def test_concurrent_requests_for_an_image_have_it_encoded_once(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    for number in range(4):
        seeing.submit(f"{number}", [7 + number, *image_prompt(16)[1:]], seeing.images())
    answers, cached = seeing.run()
    assert len(answers) == 4
    assert set(cached.values()) == {0}
    assert seeing.cache.encoded == 2


def test_a_cached_prefix_that_ends_within_an_image_gives_the_same_answer(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    prompt = image_prompt(16)
    end = IMAGE_STARTS[0] + 16
    seeing.submit("a", prompt[:end], seeing.images()[:1], tokens=1)
    seeing.run()
    seeing.cache.clear()
    seeing.submit("b", prompt, seeing.images())
    answers, cached = seeing.run()
    assert (answers["b"], cached["b"]) == (expected(LLAMA), 16)
    assert IMAGE_STARTS[0] < cached["b"] < end
    assert (seeing.cache.encoded, seeing.cache.hits) == (3, 0)


def test_another_picture_in_the_same_place_shares_only_the_blocks_before_it(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    prompt = image_prompt(16)
    first, second = seeing.images()
    seeing.submit("a", prompt, (first, second))
    seeing.submit("b", prompt, (first, seeing.image(2, IMAGE_STARTS[1])))
    answers, _ = seeing.run()
    seeing.submit("c", prompt, (first, seeing.image(3, IMAGE_STARTS[1])))
    more, later = seeing.run()
    assert answers["a"] == expected(LLAMA)
    assert len({tuple(answer) for answer in (answers["a"], answers["b"], more["c"])}) == 3
    assert later["c"] == IMAGE_STARTS[1] // BLOCK_SIZE * BLOCK_SIZE
    named = [(image.key, image.start, image.tokens) for image in (first, second)]
    keys = content_keys(root_key("model"), pack_tokens(prompt), BLOCK_SIZE, image_extras(named, BLOCK_SIZE))
    assert set(keys) <= set(seeing.stored)
    assert not set(content_keys(root_key("model"), pack_tokens(prompt), BLOCK_SIZE)) & set(seeing.stored)


def test_a_cache_that_holds_no_image_keeps_the_last_one_and_all_answers_are_right(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA, step_tokens=16, cache_bytes=0)
    for request in "ab":
        seeing.submit(request, image_prompt(16), seeing.images(), salt=request)
    answers, _ = seeing.run()
    assert answers == {"a": expected(LLAMA), "b": expected(LLAMA)}
    assert (len(seeing.cache), seeing.cache.size_bytes) == (1, 16 * 64 * 4)


def test_text_without_images_and_image_tokens_without_an_image_are_plain_tokens(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    seeing.submit("a", [5, IMAGE_TOKEN, 7], ())
    answers, _ = seeing.run()
    assert (len(answers["a"]), seeing.cache.encoded) == (ANSWER_TOKENS, 0)


def test_an_image_that_waits_for_another_ones_encoding_is_computed_in_a_later_step(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    for number in range(3):
        seeing.submit(f"{number}", [IMAGE_TOKEN] * 16 + [5 + number], (seeing.image(number, 0),), tokens=2)
    lengths: list[int] = []
    while seeing.scheduler.living:
        works = seeing.scheduler.schedule(0.0)
        lengths.append(len(works))
        seeing.scheduler.advance(seeing.runner.step(works), 0.001)
        seeing.scheduler.validate()
    assert lengths == [1, 2, 2, 1], "each step computes one prompt, and the next token of the one before"


def test_sleep_and_clear_forget_embeddings_and_the_tower_comes_back(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    rounds: list[tuple[str, tuple[EngineOperation, ...]]] = [("a", ()), ("b", ("clear",)), ("c", ("sleep", "wake"))]
    for request, operations in rounds:
        for operation in operations:
            assert seeing.runner.operate(operation, "", "", 2) == ""
            assert len(seeing.cache) == 0
        seeing.scheduler.clear()
        seeing.submit(request, image_prompt(16), seeing.images())
        answers, _ = seeing.run()
        assert answers[request] == expected(LLAMA)
    assert seeing.cache.encoded == 6


def test_an_image_costs_as_many_tokens_as_its_arithmetic(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, LLAVA_7B, PROCESSOR_7B))
    # 577 positions of 289.7 million weights and 576 of 21.0 million; a token has 6,476 million.
    assert image_cost(config) == 28


def test_embeddings_whose_numbers_are_not_finite_are_computed_once_more(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    broken = seeing.images()[0]
    seeing.cache.add(broken.key, np.full((16, 64), np.nan, np.float32), 4096)
    seeing.submit("a", image_prompt(16), seeing.images())
    answers, _ = seeing.run()
    assert answers["a"] == expected(LLAMA)
    assert seeing.cache.encoded == 3


class MemoryLookups:
    """Look-ups in a store that has some images, and notes which ones were stored."""

    def __init__(self, has: dict[bytes, bytes]) -> None:
        self.has = has
        self.kept: dict[bytes, bytes] = {}
        self._asked: list[bytes] = []

    def fileno(self) -> int:
        raise AssertionError("nothing waits")

    def look_up(self, key: bytes) -> None:
        self._asked.append(key)

    def take_found(self) -> list[tuple[bytes, bytes | None]]:
        asked, self._asked = self._asked, []
        return [(key, self.has.get(key)) for key in asked]

    def keep(self, key: bytes, embeddings: bytes) -> None:
        self.kept[key] = embeddings

    def close(self) -> None:
        """Nothing is open."""


def run_with(seeing: Seeing, store: MemoryLookups) -> list[list[int]]:
    """Compute until all have ended, with answers of the store after each step. Return the tokens of each step."""
    images, steps = StepImages(seeing.cache, seeing.runner.facts.image_cost, looks_up=True), list[list[int]]()
    seeing.scheduler.images = images
    seeing.runner.use_lookups(store)
    while seeing.scheduler.living:
        assert seeing.scheduler.busy, "it waits, and nothing is looked up"
        works = seeing.scheduler.schedule(0.0)
        steps.append([work.end - work.start for work in works])
        outcome = seeing.scheduler.advance(seeing.runner.step(works) if works else [], 0.001)
        seeing.scheduler.validate()
        for part in outcome.parts["f"]:
            seeing.answers.setdefault(part.request, []).extend(unpack_tokens(part.tokens))
        for key in images.take_lookups():
            store.look_up(key)
        assert works or not seeing.scheduler.busy, "a step computes nothing, and the next one begins at once"
        for key, found in store.take_found():
            if found is not None:
                seeing.runner.take_embeddings(key, found)
            images.looked_up(key)
    return steps


def test_images_are_looked_up_before_they_are_encoded_and_others_go_on_meanwhile(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    store = MemoryLookups({})
    seeing.submit("a", image_prompt(16), seeing.images())
    seeing.submit("b", [5, 6, 7], ())
    steps = run_with(seeing, store)
    assert seeing.answers["a"] == expected(LLAMA)
    start = IMAGE_STARTS[0]
    assert steps[0] == [start, 3], "the text before the first image, and the other prompt"
    assert (seeing.cache.encoded, seeing.cache.fetched, len(store.kept)) == (2, 0, 2)
    seeing.cache.clear()
    seeing.scheduler.clear()
    seeing.answers.clear()
    store.has = store.kept
    seeing.submit("c", image_prompt(16), seeing.images())
    steps = run_with(seeing, store)
    assert seeing.answers["c"] == expected(LLAMA)
    assert steps[0] == [start]
    assert steps[1] == [len(image_prompt(16)) - start], "both were looked up at once"
    assert (seeing.cache.encoded, seeing.cache.fetched, seeing.cache.hits) == (2, 2, 0)
    assert seeing.cache.image_s > 0


def test_embeddings_that_were_damaged_in_a_store_are_not_used(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    damaged = np.full(16 * 64, np.inf, np.float32).tobytes()
    seeing.submit("a", image_prompt(16), seeing.images())
    run_with(seeing, MemoryLookups({image.key: damaged for image in seeing.images()}))
    assert seeing.answers["a"] == expected(LLAMA)
    assert (seeing.cache.encoded, seeing.cache.fetched) == (2, 0)


def test_a_last_token_of_an_image_that_is_not_there_waits_for_a_step_that_may_encode_it(tmp_path: Path) -> None:
    seeing = Seeing(tmp_path, LLAMA)
    first, second = seeing.image(0, 0), seeing.image(1, 1)
    ends_in_it = [5, *[IMAGE_TOKEN] * 16]
    assert len(ends_in_it) == 2 * BLOCK_SIZE + 1
    seeing.submit("a", ends_in_it, (second,), tokens=1)
    seeing.run()
    seeing.cache.clear()
    seeing.submit("b", [IMAGE_TOKEN] * 16 + [5], (first,), tokens=1)
    seeing.submit("c", ends_in_it, (second,), tokens=1)
    _, cached = seeing.run()
    assert cached["c"] == 2 * BLOCK_SIZE, "one token of its image is computed, which looks like a decode"

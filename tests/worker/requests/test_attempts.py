from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.contracts.messages import Ready
from services.worker.requests.attempts import Attempts
from shared.hashing import pack_tokens
from shared.messages.cards import ImageInput, KvLayout, PictureEdit, PictureOutput
from shared.messages.frames import FinishReason, Part
from shared.messages.generate import Accepted, Generate, Image, Picture, Refused, Sampling
from tests.frontend.images.samples import png_of_size

FACTS = Ready(
    context_length=64,
    vocab_size=100,
    eos_token_ids=(0,),
    block_size=4,
    capacity_blocks=16,
    kv_layout=KvLayout("float32", 1, 1, 1, 4),
)


def generate(request: str, *, tokens: int = 4, prompt: int = 4, frontend: str = "f", model: str = "model") -> Generate:
    return Generate(
        request=request,
        attempt=1,
        model=model,
        frontend=frontend,
        tokens=pack_tokens(range(tokens)),
        prompt_tokens=prompt,
        sampling=Sampling(max_tokens=8),
        time_left_s=1.0,
    )


def part(request: str, *, first: int = 0, finish: FinishReason | None = None) -> Part:
    return Part(request=request, attempt=1, first=first, tokens=pack_tokens([7]), finish=finish)


def attempts(*, most_living: int = 4, most_waiting_tokens: int = 100) -> Attempts:
    return Attempts(model="model", most_living=most_living, most_waiting_tokens=most_waiting_tokens, most_remembered=4)


def code(account: Attempts, asked: Generate, facts: Ready | None = FACTS) -> str:
    reply, _ = account.admit(asked, facts)
    return reply.code if isinstance(reply, Refused) else "accepted"


def test_a_repeated_attempt_is_accepted_once_also_after_its_end() -> None:
    account = attempts()
    assert account.admit(generate("r"), FACTS) == (Accepted("r", 1), 1)
    assert account.admit(generate("r"), FACTS) == (Accepted("r", 1), 0)
    account.record_part(part("r", finish="stop"))
    assert account.admit(generate("r"), FACTS) == (Accepted("r", 1), 0)


def test_a_living_attempt_is_not_accepted_for_a_second_frontend_that_would_hear_nothing_of_it() -> None:
    account = attempts()
    assert code(account, generate("r", frontend="f")) == "accepted"
    assert code(account, generate("r", frontend="g")) == "bad_request"
    assert [stream.request for stream in account.streams_of("f")] == ["r"]


def test_a_generate_that_its_cancel_overtook_computes_nothing() -> None:
    account = attempts()
    assert not account.cancel(("r", 1)), "the engine does not know it"
    assert account.admit(generate("r"), FACTS) == (Accepted("r", 1), False)
    assert account.names == []
    for number in range(10):
        account.cancel((f"r{number}", 1))
        account.validate()


def test_numbers_are_never_used_twice() -> None:
    account = attempts()
    numbers = [account.admit(generate(request), FACTS)[1] for request in "ab"]
    account.forget(("b", 1))
    account.record_part(part("a", finish="stop"))
    numbers += [account.admit(generate(request), FACTS)[1] for request in "cb"]
    assert numbers == [1, 2, 3, 4]


def test_each_refusal_has_its_code() -> None:
    account = attempts(most_living=1)
    assert code(account, generate("a"), None) == "not_ready"
    assert code(account, generate("a", model="other")) == "wrong_model"
    assert code(account, generate("a", tokens=200)) == "bad_request"
    assert code(account, generate("a")) == "accepted"
    assert code(account, generate("b")) == "overloaded"
    account.draining = True
    assert code(account, generate("c")) == "draining"


def test_a_grammar_is_refused_by_name_where_it_would_be_passed_over() -> None:
    asked = generate("a")
    held = msgspec.structs.replace(asked, sampling=Sampling(max_tokens=8, grammar='start: "a"'))
    reply, _ = attempts().admit(held, FACTS)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.grammar: this engine does not support grammars")
    able = msgspec.structs.replace(FACTS, grammars=True)
    assert code(attempts(), held, able) == "accepted"
    for wrong in ({"ignore_eos": True}, {"grammar": "x" * 300_000}):
        sampling = msgspec.structs.replace(held.sampling, **wrong)
        assert code(attempts(), msgspec.structs.replace(asked, sampling=sampling), able) == "bad_request"


PIXELS = ImageInput(token_id=9, tokens=3, width=2, height=1, resize=0, filter="BICUBIC")


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ({}, ""),
        ({"start": 5}, ""),
        ({"start": -1}, "has the tokens -1 to 1: before 0, or no prompt's"),
        ({"start": 6}, "has the tokens 6 to 8: before 0, or no prompt's"),
        ({"tokens": 2}, "has 2 tokens; one of 2 by 1 has 3"),
        ({"width": 9, "height": 9}, ""),
        ({"key": b"k"}, "has a key of 1 bytes, not 32"),
        ({"pixels": bytes(7)}, "has 7 bytes, not those of 2 by 1"),
        ({"start": 1}, "stands for other tokens than 9"),
    ],
)
def test_an_image_is_within_the_prompt_and_stands_for_its_tokens(image: dict[str, Any], why: str) -> None:
    given = msgspec.structs.replace(Image(b"k" * 32, 2, 3, bytes(6)), **image)
    tokens = pack_tokens([7, 7, 9, 9, 9, *([9, 9, 9] if given.start > 4 else [7, 7, 7]), 7])
    asked = msgspec.structs.replace(generate("a", tokens=9, prompt=8), tokens=tokens, images=(given,))
    reply, _ = attempts().admit(asked, msgspec.structs.replace(FACTS, images=PIXELS, most_images=2))
    assert (reply.reason if isinstance(reply, Refused) else "") == (why and f"images: number 0 {why}")


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ({}, ""),
        ({"width": 2, "height": 6}, ""),
        ({"width": 4, "height": 2}, "has 3 tokens; one of 4 by 2 has 2"),
        ({"width": 6, "height": 1}, "has 3 tokens; one of 6 by 1 has 0"),
        ({"width": 0, "height": 0, "tokens": 0, "pixels": b""}, "has 0 tokens; one of 0 by 0 has 0"),
        ({"width": -6, "height": -2}, "has 3 tokens; one of -6 by -2 has 0"),
        ({"pixels": bytes(35)}, "has 35 bytes, not those of 6 by 2"),
        (
            {"width": 200, "height": 2, "tokens": 100, "pixels": bytes(1200)},
            "is of 200 by 2; at most 64 pixels are taken",
        ),
    ],
)
def test_an_image_that_keeps_its_shape_has_the_tokens_of_its_size(image: dict[str, Any], why: str) -> None:
    takes = msgspec.structs.replace(PIXELS, tokens=0, width=0, height=0, unit=2, least_pixels=4, most_pixels=64)
    given = msgspec.structs.replace(Image(b"k" * 32, 2, 3, bytes(36), 6, 2), **image)
    asked = msgspec.structs.replace(
        generate("a", tokens=9, prompt=8), tokens=pack_tokens([7, 7, 9, 9, 9, 7, 7, 7, 7]), images=(given,)
    )
    reply, _ = attempts().admit(asked, msgspec.structs.replace(FACTS, images=takes, most_images=2))
    assert (reply.reason if isinstance(reply, Refused) else "") == (why and f"images: number 0 {why}")


def test_images_are_refused_where_there_are_too_many_or_they_overlap_or_the_model_takes_none() -> None:
    one, two = (Image(b"k" * 32, start, 3, bytes(6)) for start in (0, 2))
    able = msgspec.structs.replace(FACTS, images=PIXELS, most_images=2)
    for images, facts, why in (
        ((one,), FACTS, "images: this engine takes none"),
        ((one, one, one), able, "images: 3; at most 2 are allowed (worker.most_images)"),
        ((one, two), able, "images: number 1 has the tokens 2 to 4: before 3, or no prompt's"),
    ):
        asked = msgspec.structs.replace(generate("a"), tokens=pack_tokens([9] * 8), prompt_tokens=8, images=images)
        reply, _ = attempts().admit(asked, facts)
        assert isinstance(reply, Refused)
        assert (reply.code, reply.reason) == ("bad_request", why)


MAKES = PictureOutput("StableDiffusionPipeline", 8, 8, 8, 16 * 16, 2, 4, edit=PictureEdit(2, 0.5))
PICTURE = Picture("a mill", 8, 8, 2, 0)


@pytest.mark.parametrize(
    ("picture", "makes", "why"),
    [
        ({}, {}, ""),
        ({"images": (png_of_size(8, 8),), "strength": 0.5}, {}, ""),
        ({"images": (png_of_size(16, 16), png_of_size(8, 16))}, {}, ""),
        ({"images": (png_of_size(8, 8),), "mask": png_of_size(8, 8)}, {"masked_edit": PictureEdit()}, ""),
        ({}, {"texts": False}, "images: none, and this engine makes no such picture from a text alone"),
        ({"mask": png_of_size(8, 8)}, {}, "images: none, and this engine makes no such picture from a text alone"),
        ({"strength": 0.5}, {}, "images: none, and this engine makes no such picture from a text alone"),
        ({"images": (b"",)}, {"edit": None}, "images: this engine makes no pictures from images without mask"),
        ({"images": (b"", b"", b"")}, {}, "images: 3; at most 2 are allowed"),
        ({"images": (b"",)}, {}, "images: no PNG of the right size, but 0 by 0 pixels"),
        ({"images": (b"GIF89a",)}, {}, "images: no PNG of the right size, but 0 by 0 pixels"),
        ({"images": (png_of_size(8, 16),)}, {}, "images: no PNG of the right size, but 8 by 16 pixels"),
        ({"images": (png_of_size(60_000, 60_000),) * 2}, {}, "images: no PNG of the right size, but 60000 by"),
        ({"images": (png_of_size(8, 8),), "mask": png_of_size(8, 8)}, {}, "images: this engine makes no pictures from"),
        (
            {"images": (png_of_size(8, 8),), "mask": png_of_size(9, 8)},
            {"masked_edit": PictureEdit()},
            "mask: no PNG of the right size, but 9 by 8 pixels",
        ),
        ({"images": (png_of_size(8, 8),), "strength": 0.0}, {}, "strength: 0"),
        ({"images": (png_of_size(8, 8),), "strength": float("nan")}, {}, "strength: nan"),
        ({"images": (png_of_size(8, 8),), "strength": 0.5}, {"edit": PictureEdit()}, "strength: 0.5"),
    ],
)
def test_images_that_a_picture_is_made_from_are_those_that_the_engine_takes(
    picture: dict[str, Any], makes: dict[str, Any], why: str
) -> None:
    given, facts = msgspec.structs.replace(PICTURE, **picture), msgspec.structs.replace(MAKES, **makes)
    asked = msgspec.structs.replace(generate("a", tokens=2, prompt=2), tokens=bytes(8), picture=given)
    reply, _ = attempts().admit(asked, msgspec.structs.replace(FACTS, pictures=facts))
    said = reply.reason if isinstance(reply, Refused) else ""
    assert said.startswith(why and f"picture.{why}"), said
    assert bool(said) == bool(why)


def test_what_is_embedded_is_a_prompt_alone_which_may_fill_the_context() -> None:
    def asked(tokens: int, prompt: int) -> Generate:
        sampling = Sampling(max_tokens=1, pooling="mean")
        return msgspec.structs.replace(generate("a", tokens=tokens, prompt=prompt), sampling=sampling)

    able = msgspec.structs.replace(FACTS, embedding_size=8)
    reply, _ = attempts().admit(asked(4, 4), FACTS)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.pooling: this engine makes no embeddings")
    assert code(attempts(), asked(FACTS.context_length, FACTS.context_length), able) == "accepted"
    assert code(attempts(), asked(FACTS.context_length + 1, FACTS.context_length + 1), able) == "bad_request"
    reply, _ = attempts().admit(asked(5, 4), able)
    assert isinstance(reply, Refused)
    assert reply.reason == "prompt_tokens: 4 of 5 tokens, but an embedding's tokens are all prompt"


def test_an_engine_of_one_pooling_refuses_text_and_the_other_pooling() -> None:
    able = msgspec.structs.replace(FACTS, embedding_size=8, generates=False, pooling="mean")
    reply, _ = attempts().admit(generate("a"), able)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.pooling: this engine makes embeddings only")
    last = msgspec.structs.replace(generate("a"), sampling=Sampling(max_tokens=1, pooling="last"))
    reply, _ = attempts().admit(last, able)
    assert isinstance(reply, Refused)
    assert reply.reason == "sampling.pooling: last; this engine was started with mean"


def test_log_probabilities_of_a_prompt_need_an_engine_that_computes_them_and_no_output() -> None:
    def asked(tokens: int, **fields: object) -> Generate:
        sampling = msgspec.structs.replace(Sampling(max_tokens=8, prompt_logprobs=2), **fields)
        return msgspec.structs.replace(generate("a", tokens=tokens), sampling=sampling)

    able = msgspec.structs.replace(FACTS, prompt_logprobs=True, embedding_size=8)
    assert code(attempts(), asked(4), able) == "accepted"
    for given, facts, why in (
        (asked(4), FACTS, "this engine does not support it"),
        (asked(5), able, "not for an answer that is continued"),
        (asked(4, prompt_logprobs=21), able, "21"),
        (asked(4, pooling="mean"), able, "not with an embedding"),
    ):
        reply, _ = attempts().admit(given, facts)
        assert isinstance(reply, Refused)
        assert (reply.code, reply.reason) == ("bad_request", f"sampling.prompt_logprobs: {why}")


def test_a_bias_is_refused_by_name_where_it_would_be_passed_over_or_is_none() -> None:
    asked = generate("a")

    def biased(*biases: tuple[int, float]) -> Generate:
        return msgspec.structs.replace(asked, sampling=Sampling(max_tokens=8, logit_bias=biases))

    reply, _ = attempts().admit(biased((5, 1.0)), FACTS)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.logit_bias: this engine does not support it")
    able = msgspec.structs.replace(FACTS, biases=True)
    assert code(attempts(), biased((5, 100.0), (6, -100.0)), able) == "accepted"
    many = [(token, 1.0) for token in range(301)]
    for wrong in ([(5, 1.0), (5, 1.0)], [(5, 100.5)], [(5, math.nan)], [(-1, 1.0)], [(FACTS.vocab_size, 1.0)], many):
        reply, _ = attempts().admit(biased(*wrong), able)
        assert isinstance(reply, Refused)
        assert reply.reason.startswith("sampling.logit_bias: "), wrong


def test_tokens_that_wait_are_bounded_until_their_first_part() -> None:
    account = attempts(most_waiting_tokens=10)
    assert code(account, generate("a", tokens=8)) == "accepted"
    assert code(account, generate("b", tokens=8)) == "overloaded"
    account.record_part(part("a"))
    assert code(account, generate("b", tokens=8)) == "accepted"


def test_an_attempt_is_cancelled_once() -> None:
    account = attempts()
    account.admit(generate("r"), FACTS)
    assert account.cancel(("r", 1))
    assert not account.cancel(("r", 1))
    assert not account.cancel(("stranger", 1))


def test_an_attempt_that_the_engine_did_not_take_may_come_again() -> None:
    account = attempts()
    account.admit(generate("r"), FACTS)
    account.forget(("r", 1))
    account.validate()
    assert account.admit(generate("r"), FACTS) == (Accepted("r", 1), 2)


def test_when_the_engine_is_lost_every_attempt_ends_where_it_was() -> None:
    account = attempts()
    account.admit(generate("a", frontend="f"), FACTS)
    account.admit(generate("b", tokens=6, frontend="g"), FACTS)
    account.record_part(part("a"))
    ended = account.fail_all("gone")
    assert [(p.request, p.first, p.finish, p.error) for p in ended["f"]] == [("a", 1, "error", "gone")]
    assert [(p.request, p.first) for p in ended["g"]] == [("b", 2)]
    assert account.names == []


def test_a_frontends_streams_say_how_far_they_are() -> None:
    account = attempts()
    account.admit(generate("a"), FACTS)
    account.admit(generate("b", frontend="g"), FACTS)
    account.record_part(part("a"))
    assert [(stream.request, stream.produced) for stream in account.streams_of("f")] == [("a", 1)]
    account.count_tokens([1, 2])
    account.count_tokens([1])
    assert [(stream.request, stream.produced) for stream in account.streams_of("f")] == [("a", 3)]
    assert [(stream.request, stream.produced) for stream in account.streams_of("g")] == [("b", 1)]


class AttemptsMachine(RuleBasedStateMachine):
    """No attempt is computed twice while it is remembered, and each that was accepted ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.account = attempts(most_living=3, most_waiting_tokens=20)
        self.living: dict[str, int] = {}
        """Request → length of its output."""
        self.numbers: dict[str, int] = {}

    @rule(number=st.integers(0, 6), tokens=st.integers(1, 12))
    def admit(self, number: int, tokens: int) -> None:
        reply, new = self.account.admit(generate(f"r{number}", tokens=tokens, prompt=1), FACTS)
        assert not new or (isinstance(reply, Accepted) and f"r{number}" not in self.living)
        if new:
            self.living[f"r{number}"] = tokens - 1
            self.numbers[f"r{number}"] = new

    @precondition(lambda self: self.living)
    @rule(choice=st.integers(0, 6), finish=st.sampled_from([None, "stop", "length"]))
    def tell(self, choice: int, finish: FinishReason | None) -> None:
        name = sorted(self.living)[choice % len(self.living)]
        self.account.record_part(part(name, first=self.living[name], finish=finish))
        self.living[name] += 1
        if finish is not None:
            del self.living[name]

    @rule()
    def advance(self) -> None:
        self.account.count_tokens([self.numbers[name] for name in self.living])
        self.living = {name: produced + 1 for name, produced in self.living.items()}

    @rule()
    def lose_the_engine(self) -> None:
        ended = {p.request: p.first for p in self.account.fail_all("lost").get("f", [])}
        assert ended == self.living
        self.living.clear()

    @invariant()
    def consistent(self) -> None:
        self.account.validate()
        assert {stream.request: stream.produced for stream in self.account.streams_of("f")} == self.living


TestAttemptsMachine = AttemptsMachine.TestCase
TestAttemptsMachine.settings = settings(max_examples=40, stateful_step_count=25)


def test_a_least_number_of_tokens_is_refused_by_name_where_it_would_be_passed_over_or_is_none() -> None:
    def least(tokens: int) -> Generate:
        return msgspec.structs.replace(generate("a"), sampling=Sampling(max_tokens=8, min_tokens=tokens))

    reply, _ = attempts().admit(least(1), FACTS)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.min_tokens: this engine does not support it")
    able = msgspec.structs.replace(FACTS, min_tokens=True)
    assert code(attempts(), least(8), able) == "accepted"
    for wrong in (-1, 9):
        reply, _ = attempts().admit(least(wrong), able)
        assert isinstance(reply, Refused)
        assert reply.reason == f"sampling.min_tokens: {wrong}"


def test_allowed_tokens_are_refused_by_name_where_they_would_be_passed_over_or_are_none() -> None:
    def allowed(packed: bytes) -> Generate:
        return msgspec.structs.replace(generate("a"), sampling=Sampling(max_tokens=8, allowed_tokens=packed))

    reply, _ = attempts().admit(allowed(pack_tokens([1])), FACTS)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.reason) == ("bad_request", "sampling.allowed_tokens: this engine does not support it")
    able = msgspec.structs.replace(FACTS, allowed_tokens=True)
    assert code(attempts(), allowed(pack_tokens([0, FACTS.vocab_size - 1])), able) == "accepted"
    for wrong in (b"123", pack_tokens([FACTS.vocab_size]), pack_tokens([1] * 16385)):
        reply, _ = attempts().admit(allowed(wrong), able)
        assert isinstance(reply, Refused)
        assert reply.reason == f"sampling.allowed_tokens: {len(wrong)} bytes"

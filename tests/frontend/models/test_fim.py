"""Marks of each family, in its order; and whole frontends of models that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from services.frontend.models.fim import FIM_FAMILIES, FimTokens, read_fim_tokens
from shared.hashing import unpack_tokens
from tests.frontend.peers import MODEL, VOCABULARY, clients, world

MARKS = {
    "Qwen2.5-Coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "CodeLlama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    "Codestral": ("[PREFIX]", "[SUFFIX]"),
}
WRITTEN = {
    **{
        name: f"{prefix}before{suffix}behind{middle}"
        for name, (prefix, suffix, middle) in ((name, marks) for name, marks in MARKS.items() if len(marks) == 3)
    },
    "Codestral": "[SUFFIX]behind[PREFIX]before",
}


def read(*tokens: str, begins: str = "", spaced: bool = False) -> tuple[FimTokens | None, dict[int, str]]:
    """Read a tokenizer of characters and these special tokens; return also what each id is."""
    names = [chr(code) for code in range(128)] + ["☺", "▁", *tokens]
    ids = {name: at for at, name in enumerate(names)}

    def encode(text: str, special: bool) -> list[int]:
        written = "▁" + text if spaced else text
        return [*([ids[begins]] if special and begins else []), *(ids[one] for one in written)]

    return read_fim_tokens(ids.get, encode), dict(enumerate(names))


@pytest.mark.parametrize("name", MARKS)
def test_each_family_has_its_own_order(name: str) -> None:
    infill, names = read(*MARKS[name], "<s>", begins="<s>")
    assert infill is not None
    packed = {word: b"".join(ord(one).to_bytes(4, "little") for one in word) for word in ("before", "behind")}
    prompt = infill.prompt(packed["before"], packed["behind"])
    assert "".join(names[token] for token in unpack_tokens(prompt)) == f"<s>{WRITTEN[name]}"
    assert {names[token] for token in infill.ends} == set(MARKS[name])


def test_every_family_is_named_above() -> None:
    assert {tuple(filter(None, (one.prefix, one.suffix, one.middle))) for one in FIM_FAMILIES} == set(MARKS.values())


def test_what_else_ends_an_answer_is_there_where_the_tokenizer_has_it() -> None:
    infill, names = read(*MARKS["CodeLlama"], "▁<EOT>")
    assert infill is not None
    assert "▁<EOT>" in {names[token] for token in infill.ends}


def test_some_of_a_familys_marks_are_none() -> None:
    assert read("<fim_prefix>", "<fim_suffix>")[0] is None
    assert read()[0] is None


def test_a_space_before_a_text_is_noticed() -> None:
    infill, names = read(*MARKS["CodeLlama"], spaced=True)
    assert infill is not None
    assert "".join(names[token] for token in unpack_tokens(infill.joint)) == "▁☺"
    assert infill.head == b""
    plain, _ = read(*MARKS["CodeLlama"])
    assert plain is not None
    assert plain.joint == b""


# --- at a whole frontend


def mark(directory: Path, *tokens: str) -> dict[str, int]:
    """Gives the tokenizer these tokens, in the place of its last words; their ids."""
    path = directory / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    ids = {token: VOCABULARY - 1 - at for at, token in enumerate(tokens)}
    vocabulary = {word: one for word, one in content["model"]["vocab"].items() if one not in ids.values()}
    content["model"]["vocab"] = vocabulary
    content["model"]["merges"] = [one for one in content["model"]["merges"] if "".join(one) in vocabulary]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [
        {"id": one, "content": token, **flags} for token, one in sorted(ids.items(), key=lambda pair: pair[1])
    ]
    path.write_text(json.dumps(content))
    return ids


async def test_a_suffix_becomes_a_prompt_with_marks_which_end_the_answer(copy: Path) -> None:
    ids = mark(copy, *MARKS["StarCoder"], "<fim_pad>")
    async with world(copy) as w, clients(w) as (client, _):
        w.say("x")
        await client.completions.create(
            model=MODEL, prompt=["a =", "b ="], suffix=" + 1", extra_body={"stop_token_ids": [7]}
        )
        first, second = sorted(w.workers[0].generates.all, key=lambda one: one.request)
        prefix, suffix, middle, pad = ids.values()
        for one, text in ((first, "a ="), (second, "b =")):
            assert unpack_tokens(one.tokens) == [prefix, *w.ids(text), suffix, *w.ids(" + 1"), middle]
            assert one.sampling.stop_token_ids == (7, prefix, suffix, middle, pad)
        await client.completions.create(model=MODEL, prompt="a =", suffix="")
        assert unpack_tokens(w.workers[0].generates.all[-1].tokens) == w.ids("a =")


async def test_only_a_prompt_begins_as_texts_do(copy: Path) -> None:
    """SentencePiece writes a space before a text."""
    ids = mark(copy, *MARKS["Codestral"])
    path = copy / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.save(str(path))
    async with world(copy) as w, clients(w) as (client, _):
        w.say("x")
        await client.completions.create(model=MODEL, prompt="a =", suffix="+ 1")
        [generate] = w.workers[0].generates.all
        plain = Tokenizer.from_file(str(path))
        plain.normalizer = None
        behind, before = plain.encode("+ 1").ids, plain.encode("_a =").ids
        assert unpack_tokens(generate.tokens) == [ids["[SUFFIX]"], *behind, ids["[PREFIX]"], *before]


async def test_an_echo_goes_before_each_answer_whole_and_streamed(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say(" and so on")
        prompts: Any = ["grüße", w.ids("more"), [1, 5]]
        due = ["grüße and so on"] * 2 + ["more and so on"] * 2 + [w.tokenizer.decode([1, 5], False) + " and so on"] * 2
        for prompt in prompts[:2]:
            answer = await client.completions.create(model=MODEL, prompt=prompt, echo=True)
            assert [one.text for one in answer.choices] == [due[0] if prompt == "grüße" else due[2]]
        prompts[1:] = [list(prompts[1]), list(prompts[2])]
        answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True)
        assert [one.text for one in answer.choices] == due
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6 * (len(w.ids(" and so on")) + 1)
        texts, firsts = [""] * 6, [""] * 6
        stream = await client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True, stream=True)
        async for chunk in stream:
            [choice] = chunk.choices
            firsts[choice.index] = firsts[choice.index] or choice.text
            texts[choice.index] += choice.text
        assert texts == due
        assert firsts == [text.removesuffix(" and so on") for text in due]


async def test_echoes_are_bounded_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.serving.text_prompts.RENDERED_LIMIT_CHARACTERS", 100)
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        body = {"model": MODEL, "prompt": ["x" * 10, "y" * 10], "echo": True}
        for n, status in ((5, 200), (6, 400)):
            async with http.post("/v1/completions", json=body | {"n": n}) as response:
                assert response.status == status
                assert status == 200 or (await response.json())["error"]["param"] == "echo"

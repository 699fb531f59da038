"""Grammars are compiled before anything of their request is queued: through a running frontend, and alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from services.frontend import child_processes
from services.frontend.child_processes import end_process
from services.frontend.config import LimitsConfig
from services.frontend.requests.admission import Admission, Permit
from services.frontend.structured import compiler as grammars_module
from services.frontend.structured.compiler import GrammarCompiler
from shared.errors import InvalidRequest, Overloaded, Unavailable
from shared.hashing import unpack_tokens
from tests.frontend.peers import MODEL, World, clients, world
from tests.frontend.pieces import CALL
from tests.frontend.test_tools import HELLO, TEMPLATE, TOOLS
from tests.tiny_model import write_tiny_model

PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOSTILE: dict[str, Any] = {
    "the library's memory": {"allOf": [{"type": "string", "pattern": f".*{i}.*(a|b){{{i}}}"} for i in range(40)]},
    "the library's time": {"type": "integer", "multipleOf": 1_000_003},
    "a reference to itself": {"$ref": "#"},
    "references in a ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "another place": {"$ref": "http://127.0.0.1/x.json"},
    "what nothing meets": {"type": "integer", "minimum": 5, "maximum": 3},
    "what is not built": {"type": "array", "uniqueItems": True},
    "no type": {"type": "strin"},
    "products": {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(8)]},
}


def schema(given: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def grammar_of(w: World) -> str:
    """Return the grammar of the latest attempt."""
    return next(worker.generates.all[-1].sampling.grammar for worker in w.workers if worker.generates.all)


def fits(w: World, grammar: str, text: str) -> bool:
    """Tell whether the grammar allows this answer."""
    tokenizer = LLTokenizer((w.directory / "tokenizer.json").read_text(), eos_token=[2])
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = w.ids(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def test_what_a_request_demands_is_the_grammar_of_its_attempt(directory: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": schema(PERSON)}, '{"name": "Ada", "age": 36}', '{"name": "Ada"}'),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"extra_body": {"structured_outputs": {"json": json.dumps(PERSON)}}}, '{"name":"","age":0}', "{}"),
        ({"extra_body": {"structured_outputs": {"json": PERSON}}}, '{ "name" : "x", "age" : 1 }', "x"),
        ({"extra_body": {"structured_outputs": {"regex": "a/b[/]\\/\n\\d{2}"}}}, "a/b//\n12", "a/b"),
        ({"extra_body": {"structured_outputs": {"choice": ['yes"', "n/o\n"]}}}, "n/o\n", "yes"),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: a\na: "x" a | "y"'}}}, "xxy", "x"),
        ({"extra_body": {"structured_outputs": {"json_object": True}}}, "{}", "1"),
    ]
    async with world(directory, grammars=True) as w, clients(w) as (client, _):
        w.say("fine")
        for fields, good, bad in cases:
            await client.chat.completions.create(model=MODEL, messages=HELLO, **fields)
            assert fits(w, grammar_of(w), good), good
            assert not fits(w, grammar_of(w), bad), bad
        await client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": {"regex": "[0-9]"}})
        assert fits(w, grammar_of(w), "7")
        await client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "text"})
        assert grammar_of(w) == ""


async def test_the_official_client_parses_what_it_asked_for(directory: Path) -> None:
    async with world(directory, grammars=True) as w, clients(w) as (client, _):
        w.say('{"name": "Ada", "age": 36}')
        answer = await client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=schema(PERSON))
        assert json.loads(answer.choices[0].message.content or "") == {"name": "Ada", "age": 36}
        assert answer.choices[0].finish_reason == "stop"


async def test_an_unsupported_grammar_is_refused_by_name_before_any_router_or_worker_is_asked(directory: Path) -> None:
    async with world(directory, grammars=True) as w, clients(w) as (client, _):
        for what, hostile in HOSTILE.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=MODEL, messages=HELLO, response_format=schema(hostile))
            assert refused.value.param == "response_format.json_schema.schema", what
            assert len(refused.value.message) < 1000, what
        structures: dict[str, tuple[Any, ...]] = {
            "regex": ("a(b", "(a)\\1", "(?=a)b", "(" * 2000 + "a" + ")" * 2000),
            "choice": (["a" * 16_000] * 11,),
            "grammar": ("begin: x", "start: x", "start: start", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
        }
        for field, texts in structures.items():
            for text in texts:
                structured = {"structured_outputs": {field: text}}
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.completions.create(model=MODEL, prompt="x", extra_body=structured)
                assert refused.value.param == f"structured_outputs.{field}", text
        assert w.router.asked.all == []
        w.say("{}")
        await client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})


async def test_a_worker_that_would_ignore_a_grammar_is_not_asked(directory: Path) -> None:
    async with world(directory, grammars=True, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce_worker("w2", grammars=True)
        await w.ready()
        w.say("{}")
        # The router knows of w1 already; this frontend does not.
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, response_format=schema(PERSON))
        assert answer.choices[0].message.content == "{}"
        assert w.workers[0].generates.all == []
        assert w.router.asked.all[-1].excluded == ("w1",)


async def test_calls_are_forced_in_the_models_own_format(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "templated")
    (tmp_path / "templated" / "chat_template.jinja").write_text(TEMPLATE)
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    time = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    async with world(tmp_path / "templated", grammars=True) as w, clients(w) as (client, _):
        w.say(CALL)
        ask = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        answer = await client.chat.completions.create(**ask, tool_choice="required")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [fits(w, grammar_of(w), text) for text in (CALL, f"{CALL}\n{time}", "x")] == [True, True, False]
        await client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
        assert [fits(w, grammar_of(w), text) for text in (CALL, f"{CALL}\n{time}")] == [True, False]
        await client.chat.completions.create(**ask, tool_choice=named)
        assert [fits(w, grammar_of(w), text) for text in (CALL, time, f"{time}\n{time}")] == [False, True, False]
        other: Any = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(openai.BadRequestError, match="there is no tool named 'other'"):
            await client.chat.completions.create(**ask, tool_choice=other)
        strict: Any = [{"type": "function", "function": {"name": "p", "strict": True, "parameters": PERSON}}]
        await client.chat.completions.create(**{**ask, "tools": strict}, tool_choice="required")
        assert not fits(w, grammar_of(w), '<tool_call>\n{"name": "p", "arguments": {}}\n</tool_call>')


async def test_the_official_clients_strict_tools_constrain_calls_that_the_model_chooses_to_make(
    directory: Path, tmp_path: Path
) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        hours: int

    shutil.copytree(directory, tmp_path / "templated")
    (tmp_path / "templated" / "chat_template.jinja").write_text(TEMPLATE)
    call = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Zürich", "hours": 3}}\n</tool_call>'
    async with world(tmp_path / "templated", grammars=True) as w, clients(w) as (client, _):
        w.say(f"I look.\n{call}")
        tools = [openai.pydantic_function_tool(Weather)]
        answer = await client.chat.completions.parse(model=MODEL, messages=HELLO, tools=tools)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        assert [one.function.parsed_arguments for one in calls] == [Weather(city="Zürich", hours=3)]
        fitting = (call, f"I look.\n{call}", "No.", call.replace("3", '"3"'), call.replace("Weather", "other"))
        assert [fits(w, grammar_of(w), text) for text in fitting] == [True, True, True, False, False]
        w.say(call)
        await client.chat.completions.parse(model=MODEL, messages=HELLO, tools=tools, response_format=Weather)
        content = '{"city": "Zürich", "hours": 3}'
        assert [fits(w, grammar_of(w), text) for text in (content, call, "No.")] == [True, True, False]
        await client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, tool_choice="none")
        assert grammar_of(w) == ""


async def test_of_several_schemas_the_one_that_is_no_good_is_named(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "templated")
    (tmp_path / "templated" / "chat_template.jinja").write_text(TEMPLATE)

    def tool(name: str, given: Any, *, strict: bool) -> Any:
        parameters = {"type": "object", "properties": {"x": given}}
        return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}

    fine, not_built, slow = {"type": "integer"}, HOSTILE["what is not built"], HOSTILE["the library's time"]
    async with world(tmp_path / "templated", grammars=True) as w, clients(w) as (client, _):
        ask: dict[str, Any] = {"model": MODEL, "messages": HELLO}
        for bad in (not_built, slow):
            loose, good, wrong = (
                tool("a", bad, strict=False),
                tool("b", fine, strict=True),
                tool("c", bad, strict=True),
            )
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ask, tools=[loose, good, wrong])
            assert refused.value.param == "tools[2].function.parameters"
            assert "call_" not in refused.value.message, "the request knows nothing of our grammar"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ask, tools=[good], response_format=schema(bad))
            assert refused.value.param == "response_format.json_schema.schema"
        assert w.router.asked.all == []


async def test_reasoning_ends_with_the_models_own_token(tmp_path: Path) -> None:
    tags = ("<think>", "</think>")
    directory = write_tiny_model(tmp_path / "thinking", marks=tags)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{# </think> #}{{ enable_thinking }}")
    async with world(directory, grammars=True) as w, clients(w) as (client, _):
        w.say("fine")
        ask: dict[str, Any] = {"model": MODEL, "messages": HELLO}
        await client.chat.completions.create(**ask, extra_body={"thinking_token_budget": 1})
        fitting = ("<think>a</think>b", "<think>ab", "<think></think>", "no <think>")
        assert [fits(w, grammar_of(w), text) for text in fitting] == [True, False, True, False]
        await client.chat.completions.create(**ask, response_format={"type": "json_object"})
        assert [fits(w, grammar_of(w), text) for text in ("<think>ab</think>{}", "{}", "ab")] == [True, True, False]
        await client.chat.completions.create(**ask, reasoning_effort="none")
        assert grammar_of(w) == "", "the template says so"
        latest = next(worker.generates.all[-1] for worker in w.workers if worker.generates.all)
        assert list(unpack_tokens(latest.tokens)) == w.ids("helloFalse")


async def test_a_budget_needs_a_model_that_reasons_and_workers_that_support_grammars(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "thinking", marks=("<think>", "</think>"))
    budget: dict[str, Any] = {"model": MODEL, "messages": HELLO, "extra_body": {"thinking_token_budget": 1}}
    for template, grammars in (("{{ messages[0].content }}", True), ("{{ messages[0].content }}<think>", False)):
        (directory / "chat_template.jinja").write_text(template)
        async with world(directory, grammars=grammars) as w, clients(w) as (client, _):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**budget)
            assert refused.value.param == "thinking_token_budget"
            assert w.router.asked.all == []


async def test_a_model_may_reason_before_its_answer_is_constrained(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "thinking")
    (tmp_path / "thinking" / "chat_template.jinja").write_text("{{ messages[0].content }}{# </think> #}")
    ask: dict[str, Any] = {"model": MODEL, "response_format": {"type": "json_object"}}
    async with world(tmp_path / "thinking", grammars=True) as w, clients(w) as (client, _):
        w.say("{}")
        await client.chat.completions.create(messages=HELLO, **ask)
        fitting = ("{}", "<think>\nhm</think>\n\n{}", "<think>hm</think>no", "hm</think>{}")
        assert [fits(w, grammar_of(w), text) for text in fitting] == [True, True, False, False]
        await client.chat.completions.create(messages=[{"role": "user", "content": "x<think>\n"}], **ask)
        begun = ("hm</think>\n\n{}", "{}", "hm</think>{} </think>{}")
        assert [fits(w, grammar_of(w), text) for text in begun] == [True, False, False]


async def test_a_process_that_has_ended_is_started_again() -> None:
    grammars = GrammarCompiler()
    try:
        await grammars.check(lark('start: "a"'), "x")
        [process] = grammars._processes.idle
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await grammars.check(lark('start: "b"'), "x")
        assert grammars._processes.idle != [process]
    finally:
        await grammars.aclose()
    grammars.validate()


async def test_a_process_killed_while_it_compiles_leaves_no_verdict() -> None:
    grammars = GrammarCompiler()
    try:
        await grammars.check(lark('start: "a"'), "x")
        [process] = grammars._processes.idle
        os.kill(process.pid, signal.SIGSTOP)
        compiled = asyncio.create_task(grammars.check(lark('start: "b"'), "x"))
        while grammars._processes.idle:  # noqa: ASYNC110 - nothing tells that the process was taken
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="was killed"):
            await compiled
        await grammars.check(lark('start: "b"'), "x")
    finally:
        await grammars.aclose()


async def test_the_status_of_a_process_that_is_ended_while_it_ends_is_kept() -> None:
    """asyncio's own kill() lost one of fourteen."""

    async def ended() -> int | None:
        process = await asyncio.create_subprocess_exec("sh", "-c", "kill -PROF $$", stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.read()
        await end_process(process)
        return process.returncode

    for _ in range(30):
        assert {*await asyncio.gather(*(ended() for _ in range(4)))} <= {-signal.SIGPROF, -signal.SIGKILL}


async def test_without_a_process_there_is_no_verdict_and_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(Unavailable, match="No such file"):
            await grammars.check(lark('start: "a"'), "x")
    try:
        await grammars.check(lark('start: "a"'), "x")
    finally:
        await grammars.aclose()


async def test_verdicts_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "VERDICTS_LIMIT", 3)
    grammars = GrammarCompiler()
    try:
        for _ in range(2):
            for text in ("a", "b", "(", "d", "e"):
                if text == "(":
                    with pytest.raises(InvalidRequest):
                        await grammars.check(lark(f"start: /{text}/"), "x")
                else:
                    await grammars.check(lark(f"start: /{text}/"), "x")
                grammars.validate()
    finally:
        await grammars.aclose()


async def test_waiting_grammars_are_bounded_and_one_that_is_cancelled_leaves_nothing() -> None:
    grammars = GrammarCompiler()
    admission = Admission(LimitsConfig(grammars=2), lambda _: None)
    permit, other = admission.reserve(), admission.reserve()
    third = admission.reserve()

    def check(name: str, of: Permit) -> Coroutine[Any, Any, None]:
        return grammars.check(lark(f'start: "{name}"'), "x", waiting=partial(of.waiting, "grammars"))

    try:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(check("a", permit)), tasks.create_task(check("b", other))]
            await asyncio.sleep(0)
            admission.validate()
            with pytest.raises(Overloaded, match="2 grammars already wait"):
                await check("c", third)
            waiting[0].cancel()
        await check("c", third)
        await check("b", permit)
        grammars.validate()
        assert not admission.totals["grammars"]
    finally:
        await grammars.aclose()


async def test_a_key_with_slow_grammars_waits_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "PROCESSES_LIMIT", 1)
    grammars, ended = GrammarCompiler(), list[str]()

    async def check(key: str, name: str, grammar: str) -> None:
        with suppress(InvalidRequest):
            await grammars.check(grammar, "x", key=key)
        ended.append(name)

    slow = [json.dumps({"grammars": [{"json_schema": {"type": "integer", "multipleOf": 10**6 + n}}]}) for n in (3, 33)]
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, grammar in enumerate(slow):
                tasks.create_task(check("greedy", f"slow {number}", grammar))
            for name in ("first", "second"):
                tasks.create_task(check("other", name, lark(f'start: "{name}"')))
    finally:
        await grammars.aclose()
    assert ended == ["slow 0", "first", "second", "slow 1"]

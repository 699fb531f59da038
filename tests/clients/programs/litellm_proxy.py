"""LiteLLM's proxy, a process in front of the frontend at the URL given, as OpenAI's and Anthropic's clients ask it.

litellm_proxy.py URL PORT        PORT: a free one, where the proxy listens; a traceback where something is not right

A model goes through the proxy's provider `openai`, and again through `hosted_vllm`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import anthropic
import openai
from asked import COUNTED, MULTIPLY, NUMBERS, PERSON, says

URL, PORT = sys.argv[1:]
PROXY = f"http://127.0.0.1:{PORT}"
KEY = "sk-0123456789abcdef0123456789abcdef0123456789abcdef"
LIMIT_S = 600.0
SETTINGS = {"num_retries": 0, "reasoning_auto_summary": True}
"""With the second one, messages that go through `openai` ask for a summary where the client asks for thinking."""
PR_SET_PDEATHSIG = 1
PROVIDERS = ("openai", "hosted_vllm")
MODELS = ("echo", "speaker")
ASKED: Any = says(COUNTED)[0]
CALLED = [("multiply", {"a": 6, "b": 7})]
client = openai.OpenAI(base_url=f"{PROXY}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S)
claude = anthropic.Anthropic(base_url=PROXY, api_key=KEY, max_retries=0, timeout=LIMIT_S)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the proxy; it dies with this process. Its settings are JSON, which is YAML too."""
    listed = [
        {
            "model_name": f"{provider}-{model}",
            "litellm_params": {"model": f"{provider}/{model}", "api_base": URL, "api_key": "any"},
            "model_info": {"supports_reasoning": model == "echo"},
        }
        for provider in PROVIDERS
        for model in MODELS
    ]
    settings = folder / "proxy.yaml"
    settings.write_text(json.dumps({"model_list": listed, "litellm_settings": SETTINGS}))
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("litellm")), "--config", str(settings)),
            *("--host", "127.0.0.1", "--port", PORT, "--telemetry", "False"),
        ],
        env=os.environ | {"LITELLM_MASTER_KEY": KEY},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=(folder / "proxy.log").open("wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def wait_ready(proxy: subprocess.Popen[bytes]) -> None:
    """Return when the proxy answers; it is asked at most every 0.2 s."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert proxy.poll() is None, f"the proxy ended with {proxy.returncode}"
        try:
            with urllib.request.urlopen(f"{PROXY}/health/readiness", timeout=LIMIT_S):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the proxy is not ready")


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def the_model_calls_and_gets_the_result(provider: str) -> None:
    """A chat, whole and streamed."""
    asked: Any = {"model": f"{provider}-echo", "tools": [MULTIPLY]}
    whole = client.chat.completions.create(messages=[ASKED], **asked)
    with client.chat.completions.stream(messages=[ASKED], stream_options={"include_usage": True}, **asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds, kinds
    for answer in (whole, streamed):
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I count. "), answer
        assert calls(choice.message) == CALLED, answer
        assert answer.usage.completion_tokens > 0, answer
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "42"}
        end = client.chat.completions.create(messages=[ASKED, choice.message, result], **asked)
        assert (end.choices[0].message.content, end.choices[0].finish_reason) == ("42", "stop"), end


def a_real_model_is_held_to_a_call_and_to_a_schema(provider: str) -> None:
    asked: Any = {"model": f"{provider}-speaker", "temperature": 0, "max_tokens": 200}
    forced = client.chat.completions.create(
        messages=[{"role": "user", "content": "6 times 7?"}],
        tools=[MULTIPLY],
        tool_choice="required",
        parallel_tool_calls=False,
        **asked,
    )
    [(name, numbers)] = calls(forced.choices[0].message)
    assert (name, set(map(type, numbers.values()))) == ("multiply", {int}), forced
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    person = client.chat.completions.create(
        messages=[{"role": "user", "content": "Who was Ada?"}], response_format=form, **asked
    )
    assert json.loads(person.choices[0].message.content or "").keys() == {"name", "born"}, person


def a_response_comes_whole_and_streamed_and_goes_on(provider: str) -> None:
    tools: Any = [{"type": "function", "name": "multiply", "parameters": NUMBERS, "strict": False}]
    asked: Any = {"model": f"{provider}-echo", "tools": tools}
    whole = client.responses.create(input=COUNTED, **asked)
    events = list(client.responses.create(input=COUNTED, stream=True, **asked))
    assert events[0].type == "response.created", events[0]
    assert events[-1].type == "response.completed", events[-1]
    for answer in (whole, events[-1].response):
        [call] = [item for item in answer.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == CALLED[0], answer
        assert answer.usage.output_tokens > 0, answer
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        end = client.responses.create(input=[output], previous_response_id=answer.id, **asked)
        assert end.output_text == "42", end


def thinking_comes_apart(provider: str) -> None:
    """In each API in its own place, streamed too.

    LiteLLM itself refuses efforts for models that it does not know. Messages go through `openai` as responses, and then
    it drops reasoning that is not a summary, and asks for one only where the client asks for thinking."""
    model, text = f"{provider}-echo", "<think>Hm.</think>Yes."
    messages = says(text)
    [choice] = client.chat.completions.create(model=model, messages=messages).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm."), choice
    chunks = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=model, messages=messages, stream=True)
        if chunk.choices
    ]
    assert "".join(chunk.content or "" for chunk in chunks) == "Yes.", chunks
    assert "".join(getattr(chunk, "reasoning_content", None) or "" for chunk in chunks) == "Hm.", chunks
    response = client.responses.create(model=model, input=text)
    assert response.output_text == "Yes.", response
    assert [item.type for item in response.output] == ["reasoning", "message"], response
    said = claude.messages.create(model=model, max_tokens=100, messages=messages)
    assert said.content[-1].text == "Yes.", said
    thoughts = [block.thinking for block in said.content if block.type == "thinking"]
    assert thoughts == (["Hm."] if provider == "hosted_vllm" else []), said
    with claude.messages.stream(model=model, max_tokens=100, messages=messages) as stream:
        assert stream.get_final_text() == "Yes."
    if provider == "openai":
        thinking_is_kept_as_its_summary({"model": model, "max_tokens": 2000}, messages)


def thinking_is_kept_as_its_summary(asked: Any, messages: Any) -> None:
    asked = asked | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = claude.messages.create(messages=messages, **asked)
    with claude.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        thought, text = answer.content
        assert (thought.thinking, text.text) == ("Hm.", "Yes."), answer
        turns = [*messages, {"role": "assistant", "content": [thought, text]}, {"role": "user", "content": "And now?"}]
        assert claude.messages.create(messages=turns, **asked).content[-1].text == "And now?"


def a_message_comes_whole_and_streamed(provider: str) -> None:
    """As Claude Code asks such a proxy."""
    tools: Any = [{"name": "multiply", "input_schema": NUMBERS}]
    asked: Any = {"model": f"{provider}-echo", "max_tokens": 500, "tools": tools, "system": "Be kind."}
    whole = claude.messages.create(messages=[ASKED], **asked)
    with claude.messages.stream(messages=[ASKED], **asked) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        text, use = answer.content
        assert (text.text, use.name, use.input) == ("I count. ", *CALLED[0]), answer
        assert answer.stop_reason == "tool_use", answer
        assert answer.usage.output_tokens > 0, answer
        turns: Any = [
            ASKED,
            {"role": "assistant", "content": [block.model_dump(include=BLOCK) for block in answer.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "42"}]},
        ]
        assert claude.messages.create(messages=turns, **asked).content[0].text == "42"


BLOCK = {"type", "text", "id", "name", "input"}


def texts_are_embedded(provider: str) -> None:
    answer = client.embeddings.create(model=f"{provider}-speaker", input=["a mill", "a river"])
    assert [len(entry.embedding) for entry in answer.data] == [576, 576], answer


def what_is_wrong_is_the_clients_error(provider: str) -> None:
    try:
        client.chat.completions.create(
            model=f"{provider}-echo", messages=[ASKED], extra_body={"structured_outputs": {"regex": "("}}
        )
    except openai.BadRequestError as wrong:
        said = str(wrong)
    else:
        raise AssertionError("no BadRequestError")
    assert "structured_outputs.regex" in said, said


def ask_everything() -> None:
    for provider in PROVIDERS:
        the_model_calls_and_gets_the_result(provider)
        a_real_model_is_held_to_a_call_and_to_a_schema(provider)
        a_response_comes_whole_and_streamed_and_goes_on(provider)
        a_message_comes_whole_and_streamed(provider)
        thinking_comes_apart(provider)
        texts_are_embedded(provider)
        what_is_wrong_is_the_clients_error(provider)


with tempfile.TemporaryDirectory() as made:
    proxy = start(Path(made))
    try:
        wait_ready(proxy)
        ask_everything()
    except BaseException:
        print((Path(made) / "proxy.log").read_text()[-4000:])
        raise
    finally:
        proxy.terminate()
        proxy.wait()

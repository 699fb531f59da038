"""Each template of the tree is found by its name, is tried as a model's own is, and renders tools in its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.template_trial import try_template
from services.frontend.tool_parsers.parser import detect_format
from shared.chat_templates import NAMES, template_file
from shared.errors import InvalidRequest, ModelError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "abcdefghi", "name": "weather"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
FORMATS = {"chatml": None, "hermes": "hermes", "smollm2": "hermes", "llama3": "llama3_json", "mistral": "mistral"}


def rendered(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    source = template_file(name).read_text()
    return ChatTemplate(source, TOKENS).render(messages, tools=tools or [])


def test_every_template_is_named_here() -> None:
    assert FORMATS.keys() == NAMES


@pytest.mark.parametrize(("name", "form"), FORMATS.items())
def test_a_template_is_bounded_and_shows_its_format(name: str, form: str | None) -> None:
    source = template_file(name).read_text()
    try_template(source, TOKENS)
    assert detect_format(source) == form


@pytest.mark.parametrize("name", sorted(NAMES - {"chatml"}))
def test_tools_calls_and_their_results_are_all_in_the_prompt(name: str) -> None:
    prompt = rendered(name, TALK, TOOLS)
    for part in ("Be brief.", "Rain?", '"weather"', "Łódź", "dry"):
        assert part in prompt, (part, prompt)
    assert prompt.index("Rain?") < prompt.index("Łódź") < prompt.index("dry")


@pytest.mark.parametrize("name", sorted(NAMES - {"chatml"}))
def test_no_message_and_no_text_next_to_calls_is_dropped(name: str) -> None:
    later = [{"role": "system", "content": "From now on in Polish."}, {"role": "user", "content": "And snow?"}]
    talk = [*TALK[:2], {**TALK[2], "content": "Let me look."}, TALK[3], *later]
    for tools in (TOOLS, None):
        prompt = rendered(name, talk, tools)
        for part in ("Be brief.", "Rain?", "Let me look.", "Łódź", "dry", "From now on in Polish.", "And snow?"):
            assert prompt.count(part) == 1, (part, prompt)
        assert prompt.index("Let me look.") < prompt.index("Łódź") < prompt.index("And snow?")


def test_chatml_keeps_all_messages() -> None:
    talk = [{"role": role, "content": f"{role}{at}"} for at, role in enumerate(["system", "user", "system", "tool"])]
    assert all(one["content"] in rendered("chatml", talk) for one in talk)


def test_mistral_joins_system_messages_and_refuses_what_it_has_no_place_for() -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "U"},
        {"role": "system", "content": "S"},
        {"role": "system", "content": "T"},
        {"role": "assistant", "content": "A", "tool_calls": [CALL]},
    ]
    call = '[{"name": "weather", "arguments": {"city": "Łódź"}, "id": "abcdefghi"}]'
    assert rendered("mistral", talk) == f"<s>[INST] S\n\nT\n\nU[/INST] A[TOOL_CALLS] {call}</s>"
    for refused in (talk[1:2], [{"role": "other", "content": "x"}]):
        with pytest.raises(InvalidRequest, match="the chat template refuses the messages"):
            rendered("mistral", refused)
    with pytest.raises(InvalidRequest, match="need a message of the user"):
        rendered("mistral", talk[3:], TOOLS)


def test_smollm2_keeps_its_own_prompt_without_tools() -> None:
    own = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered("smollm2", [{"role": "user", "content": "Hi"}]) == own
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    said = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in talk)
    assert rendered("smollm2", talk) == said + "<|im_start|>assistant\n" == rendered("hermes", talk)
    assert rendered("chatml", talk) == said + "<|im_start|>assistant\n"


def test_llama3_and_mistral_write_their_families_marks() -> None:
    talk = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}]
    assert rendered("mistral", talk) == "<s>[INST] U[/INST] A</s>[INST] V[/INST]"
    assert (
        rendered("llama3", talk)
        == "<s>"
        + "".join(f"<|start_header_id|>{one['role']}<|end_header_id|>\n\n{one['content']}<|eot_id|>" for one in talk)
        + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_a_file_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.touch()
    assert template_file(str(other)) == other
    with pytest.raises(ModelError, match="neither a file nor one of chatml, hermes"):
        template_file("hermse")


def test_a_name_that_no_file_system_takes_is_an_error_of_the_model(tmp_path: Path) -> None:
    for name in (f"{tmp_path}/{'x' * 300}", "a\0b"):
        with pytest.raises(ModelError, match="chat template"):
            template_file(name)

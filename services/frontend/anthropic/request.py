"""The body of /v1/messages, and the chat that it becomes. Pure.

body ─▶ decode ─▶ as_chat ─▶ a ChatRequest, checked and computed like any other
                              └── InvalidRequest ─▶ renaming(NAMES): this body's field names

Blocks of one turn become one chat message; each tool_result is a message of role tool. Text blocks of a user, of a
tool's result and of `system` are joined by line ends, those of the assistant by nothing. The answer continues the last
turn if that is the assistant's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from services.frontend.anthropic.blocks import (
    Block,
    CompactionBlock,
    DocumentBlock,
    ImageBlock,
    ResultBlock,
    SearchResultBlock,
    ShownImage,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.frontend.anthropic.tools import AnyTool, CallName, OfferedTools, decode_tools
from services.frontend.protocol import chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.decoding import NotBuilt
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import (
    Hint,
    IgnoredPart,
    Names,
    ThinkingSupport,
    ignore,
    names,
    placed,
    renaming,
    review,
    with_images,
)
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import (
    MESSAGES_LIMIT,
    Call,
    CalledFunction,
    ChatMessage,
)
from services.frontend.protocol.parts import (
    PARTS_LIMIT,
    ImageUrl,
    ResultContent,
    TextPart,
    joined,
    text_of_content,
    unseen,
)
from services.frontend.protocol.structured import (
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    NamedFunctionTool,
    ToolChoice,
)
from services.frontend.protocol.tools import (
    TOOLS_LIMIT,
)


class Turn(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=PARTS_LIMIT)]


class ToolChoiceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: CallName | None = None
    """The tool to call, with the type `tool`."""
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks before its answer, and how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: chat.TokenCount | None = None
    """Tokens of thinking at most, with the type `enabled`."""
    display: Hint = UNSET


class SchemaOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer, and the effort of thinking."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaOutput | None = None


class CountTokensRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES_LIMIT)]
    system: str | Texts | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: ToolChoiceConfig | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutput | None = None
    """The former name of `output_config.format`."""
    cache_control: Hint = UNSET
    context_management: Hint = UNSET
    mcp_servers: Hint = UNSET
    speed: Hint = UNSET


class MessagesRequest(CountTokensRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: chat.TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[chat.StopString], Meta(max_length=chat.STOPS_LIMIT)] | None = None
    temperature: chat.Temperature | None = None
    top_p: chat.TopP | None = None
    top_k: chat.TopK | None = None
    cache_salt: chat.CacheName | None = None
    """A chat has the same; Anthropic has no such field."""
    diagnostics: Hint = UNSET
    metadata: Hint = UNSET
    service_tier: Hint = UNSET
    compaction: NotBuilt = None
    thread: NotBuilt = None
    container: Hint = UNSET
    inference_geo: Hint = UNSET


_BILLING = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code puts before its system prompt. It differs in each request, so with it no
prompt would be found in a cache; it says nothing to the model."""
NAMES = names(
    {
        r"^stop$": "stop_sequences",
        r"^max_completion_tokens$": "max_tokens",
        r"^response_format(\.json_schema)?": "output_config.format",
        r"^reasoning_effort$": "output_config.effort",
        r"^thinking_token_budget$": "thinking.budget_tokens",
        r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"^(tools\[\d+\]|tool_choice)\.function": r"\1",
        r"^messages.*$": "messages",
    }
)
"""The names of a chat's fields in this body."""
_FORMER_NAMES = [*names({r"^response_format(\.json_schema)?": "output_format"}), *NAMES]
"""Names as above, for a body with the former name of `output_config.format`."""


def as_chat(request: CountTokensRequest, support: ThinkingSupport, ignored: IgnoredFields) -> tuple[ChatRequest, Names]:
    """Return the request as a chat, and the names of a chat's fields in it; note the fields that are ignored. Raise
    InvalidRequest."""
    review(request, ignored)
    tools = decode_tools(request.tools or (), ignored)
    prompt: str | list[TextBlock | ThinkingBlock] = request.system or ""
    if isinstance(prompt, list):
        prompt = [one for one in prompt if not (isinstance(one, TextBlock) and one.text.startswith(_BILLING))]
        if len(prompt) < len(request.system or ()):
            ignored.add("system.x-anthropic-billing-header")
    system = [ChatMessage("system", text)] if (text := _joined(prompt, "system")) else []
    continues = request.messages[-1].role == "assistant"
    if continues:
        _check_continued(request.messages[-1], f"messages[{len(request.messages) - 1}].content")
    thinking = _thinking(request, support, ignored)
    schema, own_names = request.output_format, NAMES if request.output_format is None else _FORMER_NAMES
    if request.output_config is not None and request.output_config.format is not None:
        if schema not in (None, request.output_config.format):
            raise field_error("output_format", "output_config.format contradicts it")
        schema, own_names = request.output_config.format, NAMES
    more: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        same = ("stream", "max_tokens", "temperature", "top_p", "top_k", "cache_salt")
        more = {field: getattr(request, field) for field in same} | {"stop": request.stop_sequences}
    asked = ChatRequest(
        model=request.model,
        messages=[*system, *_messages(request.messages)],
        continue_final_message=continues or None,
        tools=tools.offered or None,
        tool_choice=_choice(request.tool_choice, tools),
        parallel_tool_calls=False if request.tool_choice and request.tool_choice.disable_parallel_tool_use else None,
        response_format=None if schema is None else JsonSchemaFormat(JsonSchema("answer", schema.schema)),
        **thinking,
        **more,
    )
    table = placed(own_names, tools.places, "input_schema")
    table = with_images(table, asked.messages, _image_places(request.messages), {"image_url": "source"})
    with renaming(table):
        chat.check_chat(asked, ignored)
    return asked, table


def _check_continued(turn: Turn, where: str) -> None:
    """Check an assistant's turn that the answer continues. Raise InvalidRequest."""
    blocks = () if isinstance(turn.content, str) else turn.content
    for at, block in enumerate(blocks):
        if isinstance(block, ToolUseBlock):
            raise field_error(f"{where}[{at}]", "a tool_use in the last message needs its tool_result after it")
    if blocks and not isinstance(blocks[-1], TextBlock):
        raise field_error(where, "the last message is the assistant's and has no text at its end to continue")


def _thinking(request: CountTokensRequest, support: ThinkingSupport, ignored: IgnoredFields) -> dict[str, Any]:
    """Return a chat's fields about reasoning. A budget and an effort limit how long a model thinks, so they are ignored
    for one that does not. Raise InvalidRequest."""
    asked, effort = request.thinking, None if request.output_config is None else request.output_config.effort
    fields: dict[str, Any] = {}
    if asked is not None and asked.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif asked is not None and not support.thinks:
        ignore("thinking", ignored)
    elif asked is not None:
        fields["chat_template_kwargs"] = support.switch or None
        if asked.type == "enabled":
            fields["thinking_token_budget"] = _budget(asked, request)
    if effort is not None and "reasoning_effort" in support.reads and "reasoning_effort" not in fields:
        fields["reasoning_effort"] = "xhigh" if effort == "max" else effort
    elif effort is not None:
        ignore("output_config.effort", ignored)
    return fields


def _budget(asked: ThinkingConfig, request: CountTokensRequest) -> int:
    where = "thinking.budget_tokens"
    if asked.budget_tokens is None:
        raise field_error(where, "needed for thinking of type enabled")
    if isinstance(request, MessagesRequest) and asked.budget_tokens >= request.max_tokens:
        raise field_error(where, f"{asked.budget_tokens}, must be less than max_tokens, {request.max_tokens}")
    return asked.budget_tokens


_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


def _choice(asked: ToolChoiceConfig | None, tools: OfferedTools) -> ToolChoice | None:
    if asked is None:
        return None
    if (asked.type == "tool") != (asked.name is not None):
        raise field_error("tool_choice.name", "needed for type tool, and only allowed there")
    if asked.name in tools.ignored:
        raise field_error("tool_choice.name", f"the tool {asked.name!r} is not served", "unsupported_value")
    if asked.name is not None:
        return NamedFunctionTool(NamedFunction(asked.name))
    return _CHOICES[asked.type]


def _joined(content: str | Sequence[ThinkingBlock | ResultBlock], where: str) -> str:
    """Return the text of blocks that must be texts or be in the result of a tool. Raise InvalidRequest."""
    if isinstance(content, str):
        return content
    for at, block in enumerate(content):
        if isinstance(block, ThinkingBlock):
            raise field_error(f"{where}[{at}].type", "only blocks of type text are served here")
    return joined(map(_text, content), "user")


def _text(block: ThinkingBlock | ResultBlock) -> str:
    match block:
        case ImageBlock() | DocumentBlock():
            return unseen(str(block.__struct_config__.tag))
        case TextBlock() | SearchResultBlock():
            return block.text
        case _:
            return ""


def _image_places(turns: Sequence[Turn]) -> list[str]:
    """Return the places of the images that users show, in order."""
    return [
        f"messages[{at}].content[{number}]"
        for at, turn in enumerate(turns)
        if turn.role == "user" and not isinstance(turn.content, str)
        for number, block in enumerate(turn.content)
        if isinstance(block, ShownImage)
    ]


def _messages(turns: Sequence[Turn]) -> Iterator[ChatMessage]:
    """Return the chat messages of a conversation. Raise InvalidRequest for a block in a wrong place."""
    for at, turn in enumerate(turns):
        if isinstance(turn.content, str):
            yield ChatMessage(turn.role, turn.content)
            continue
        parts, thoughts, calls = list[TextPart | ImageUrl](), list[str](), list[Call]()
        for number, block in enumerate(turn.content):
            where = f"messages[{at}].content[{number}]"
            match block:
                case TextBlock():
                    parts.append(TextPart(block.text))
                case ShownImage() if turn.role == "user":
                    parts.append(block.part)
                case ThinkingBlock() if turn.role == "assistant":
                    thoughts.append(block.thinking)
                case ToolUseBlock() if turn.role == "assistant":
                    calls.append(Call(block.id, "function", CalledFunction(block.name, block.input)))
                case ToolResultBlock() if turn.role == "user":
                    if parts:
                        yield ChatMessage("user", _content(parts, "user"))
                        parts = []
                    content = _joined(block.content or "", f"{where}.content")
                    yield ChatMessage("tool", content, tool_call_id=block.tool_use_id)
                case CompactionBlock():
                    parts.append(TextPart(block.content or ""))
                case IgnoredPart():
                    pass
                case _:
                    raise field_error(where, f"a message of role {turn.role} has no such block")
        if turn.role == "assistant":
            yield ChatMessage(
                "assistant",
                _content(parts, "assistant"),
                tool_calls=calls or None,
                reasoning_content="".join(thoughts) or None,
            )
        elif parts:
            yield ChatMessage(turn.role, _content(parts, turn.role))


def _content(parts: Sequence[TextPart | ImageUrl], role: str) -> ResultContent:
    """Return the content of a chat's message: one text, or parts if some are images."""
    if any(isinstance(part, ImageUrl) for part in parts):
        return [*parts]
    return text_of_content(parts, role)

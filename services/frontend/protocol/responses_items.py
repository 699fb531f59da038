"""The items of a conversation of /v1/responses, and the chat messages that they become. Pure.

    items of the input ─▶ decode_items ─▶ messages_of ─▶ chat messages; each turn of the assistant becomes one message
    items of an answer ─────────────────────────┘
    references to items ─▶ items_by_id ─▶ decode_referenced ─▶ as items of the input

An item without `type` is a message: OpenAI's easy form. With an `id`, and neither role nor content, it is a reference.
Fields of an answer that clients send back (ids, status, annotations) are ignored. So are items of tools that another
server ran for its model: what the model made of them is in its messages. Calls that a client carried out are calls
here too, whatever kind of tool they were of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat_chunks import TokenLogprobs
from services.frontend.protocol.decoding import Harmless, check_not_built, decode_body, not_supported, part_not_served
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.foreign import Hint
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.messages import Call, CalledFunction, CalledName, ChatMessage
from services.frontend.protocol.parts import (
    PARTS_LIMIT,
    ImagePart,
    ResultContent,
    SeenContent,
    Unread,
    not_of_user,
    text_of_content,
    unseen_parts,
)
from services.frontend.protocol.responses_tools import AnyTool, chat_name
from services.frontend.protocol.tools import TOOLS_LIMIT
from shared.errors import MALFORMED

ITEMS_LIMIT = 4096
"""Items of one input."""

CallId = Annotated[str, Meta(min_length=1, max_length=16 << 10)]
Status = Literal["in_progress", "completed", "incomplete"]


_EMPTY = Harmless([], "")
Caller = Annotated[Hint, Harmless(msgspec.Raw(b'""'), msgspec.Raw(b'{"type":"direct"}'))]
"""Whether a program made the call; programs cannot call tools here."""


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the user or the assistant, or instructions."""

    role: Literal["user", "assistant", "system", "developer"]
    content: SeenContent | None
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: Hint = UNSET
    """Whether the assistant's text was its last word."""


class PastCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: str
    """A JSON object as a text; any other text if the model wrote that."""
    id: str | None = None
    status: str | None = None
    parsed_arguments: Unread | UnsetType = UNSET
    """The arguments in parsed form, which OpenAI's client adds."""
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    caller: Caller = UNSET


class CallOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """The output of a tool's call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: ResultContent | None
    id: str | None = None
    status: str | None = None
    name: CalledName | None = None
    """The tool's name; without it, chat templates that need one get the name in the call."""
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    caller: Caller = UNSET


class ClientCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool of the client's that is no function."""

    type: Literal["custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: CallId
    name: CalledName | None = None
    """A custom tool's name. The others are called by their type."""
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    id: str | None = None
    status: str | None = None
    namespace: Annotated[str, Meta(max_length=256)] | None = None
    caller: Caller = UNSET
    environment: Hint = UNSET
    created_by: Hint = UNSET

    @property
    def called(self) -> CalledFunction:
        """The call as one of a function."""
        given = self.action or self.operation or {"input": self.input or ""}
        return CalledFunction(self.name or self.type.removesuffix("_call"), given)


class ClientCallOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """The output of such a call."""

    type: Literal["custom_tool_call_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: Annotated[CallId | None, Meta(description="Without it, `id` has the call's id.")] = None
    output: Unread | UnsetType = UNSET
    """A text, parts, or an object that goes to the model as JSON."""
    id: str | None = None
    status: str | None = None
    name: CalledName | None = None
    max_output_length: Hint = UNSET
    caller: Caller = UNSET
    created_by: Hint = UNSET


class McpCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that another server made of an MCP server's tool, with its output."""

    type: Literal["mcp_call"]
    id: CallId
    name: CalledName
    arguments: str
    output: str | None = None
    error: Unread | UnsetType = UNSET
    server_label: str | None = None
    status: str | None = None
    approval_request_id: str | None = None


class AdditionalTools(Struct, frozen=True, forbid_unknown_fields=True):
    """Tools that the client offers from here on. They are offered as if they were in the request's `tools`."""

    type: Literal["additional_tools"]
    tools: Annotated[list[AnyTool], Meta(max_length=TOOLS_LIMIT)]
    role: str | None = None
    id: str | None = None


IgnoredType = Literal[
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "context_compaction",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]
IGNORED_ITEMS: tuple[IgnoredType, ...] = get_args(IgnoredType)


class IgnoredItem(Struct, frozen=True):
    """An item of a tool that another server ran, or one that only that server can read."""

    type: IgnoredType


class ThoughtText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """A text of reasoning, not encrypted."""

    text: str


class SummaryText(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="summary_text"):
    """A text of a summary of reasoning; in answers it is the whole reasoning."""

    text: str


class PastThought(Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning of the assistant that the client sends back; the chat template decides whether to render it."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Annotated[list[ThoughtText], Meta(max_length=PARTS_LIMIT)] | None = None
    status: str | None = None
    summary: Annotated[list[SummaryText], Meta(max_length=PARTS_LIMIT)] | None = None
    """The reasoning, unless there is content; next to content it is ignored."""
    encrypted_content: Annotated[str | None, Advisory(), _EMPTY] = None
    """Reasoning of a server that encrypts it; it cannot be read here."""


class ItemReference(Struct, frozen=True, forbid_unknown_fields=True):
    """An item of a stored response. The service replaces it by the item before anything else reads it."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    type: Literal["item_reference"] | None = None


InputItem = (
    InputMessage
    | PastCall
    | CallOutput
    | PastThought
    | ItemReference
    | ClientCall
    | ClientCallOutput
    | McpCall
    | AdditionalTools
    | IgnoredItem
)
INPUT_ITEMS: tuple[type[InputItem], ...] = get_args(InputItem)
AnyInputItem = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"anyOf": [{"$ref": f"#/components/schemas/{one.__name__}"} for one in INPUT_ITEMS]}),
]
"""An item that is not decoded yet. Its `type` says which it is; without one it is a message, or a reference if it has
an `id`, no role and no content."""


class _Kind(Struct, frozen=True):
    type: str | None = None
    id: Unread | UnsetType = UNSET
    role: Unread | UnsetType = UNSET
    content: Unread | UnsetType = UNSET

    @property
    def name(self) -> str | None:
        """The item's type; None for a message that does not say it."""
        if self.type is None and self.id is not UNSET and self.role is UNSET and self.content is UNSET:
            return "item_reference"
        return self.type


_ITEMS_BY_TYPE: dict[str | None, type[InputItem]] = {
    kind: item for item in INPUT_ITEMS for kind in get_args(get_type_hints(item)["type"]) if isinstance(kind, str)
}
_ITEMS_BY_TYPE |= {None: InputMessage, "message": InputMessage, "item_reference": ItemReference}


def decode_items(given: str | Sequence[msgspec.Raw], ignored: IgnoredFields = REFUSE) -> list[InputItem]:
    """Decode the items of `input`; a text is a message of the user. Raise InvalidRequest, naming the field."""
    if isinstance(given, str):
        return [InputMessage("user", given)]
    return [_decode_item(bytes(raw), f"input[{at}]", ignored) for at, raw in enumerate(given)]


def _decode_item(raw: bytes, where: str, ignored: IgnoredFields) -> InputItem:
    kind = decode_body(_Kind, raw, where=where).name
    struct = _ITEMS_BY_TYPE.get(kind)
    if struct is None:
        raise field_error(f"{where}.type", f"items of type {str(kind)[:64]!r} are not supported", UNSUPPORTED)
    item = decode_body(struct, raw, ignored, where)
    check_not_built(item, f"{where}.", ignored)
    if isinstance(item, IgnoredItem):
        refusal = field_error(f"{where}.type", f"items of type {item.type!r} are not supported", UNSUPPORTED)
        ignored.add_or_raise(f"input[].{item.type}", refusal)
    if isinstance(item, CallOutput | ClientCallOutput):
        for at, part in unseen_parts(_result(item)):
            kind = str(part.__struct_config__.tag)
            ignored.add_or_raise(f"input[].output[].{kind}", part_not_served(f"{where}.output[{at}].type", kind))
    if isinstance(item, InputMessage) and item.role != "user":
        for at, part in unseen_parts([*item.content] if isinstance(item.content, list) else None):
            if isinstance(part, ImagePart):
                raise not_of_user(f"{where}.content[{at}].type", item.role)
            raise part_not_served(f"{where}.content[{at}].type", str(part.__struct_config__.tag))
    if isinstance(item, PastThought) and item.content and item.summary:
        ignored.add_or_raise("input[].summary", not_supported(f"{where}.summary"))
    return item


def image_places(items: Sequence[InputItem]) -> list[str]:
    """Return the places of the images that users show, in order."""
    return [
        f"input[{at}].content[{place}]"
        for at, item in enumerate(items)
        if isinstance(item, InputMessage) and item.role == "user"
        for place, part in unseen_parts([*item.content] if isinstance(item.content, list) else None)
        if isinstance(part, ImagePart)
    ]


def added_tools(items: Iterable[InputItem]) -> list[tuple[str, msgspec.Raw]]:
    """Return the tools that items add, each with its place in the body."""
    return [
        (f"input[{at}].tools[{tool}]", raw)
        for at, item in enumerate(items)
        if isinstance(item, AdditionalTools)
        for tool, raw in enumerate(item.tools)
    ]


class _ItemId(Struct, frozen=True):
    id: str


class _Items(Struct, frozen=True):
    output: list[msgspec.Raw]


_ITEM_ID = msgspec.json.Decoder(_ItemId)
_ITEMS = msgspec.json.Decoder(_Items)


def items_by_id(response: bytes) -> dict[str, bytes]:
    """Return the items of a response in JSON, by their ids. Raise msgspec.MsgspecError."""
    return {_ITEM_ID.decode(raw).id: bytes(raw) for raw in _ITEMS.decode(response).output}


def decode_referenced(raw: bytes, at: int) -> InputItem:
    """Decode an item of an answer, to which `input[at]` refers, as if the client had sent it back. Raise
    InvalidRequest."""
    return _decode_item(raw, f"input[{at}]", IgnoredFields())


# --- items of an answer


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of an assistant's message."""

    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the assistant. It has one part once it has begun, none before."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputThought(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    content: list[ThoughtText]
    status: Status
    summary: list[SummaryText] = []
    """The reasoning in place of content, if the request asks for a summary."""
    encrypted_content: None = None


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


class OutputCustomCall(Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status
    namespace: str | UnsetType = UNSET

    @property
    def called(self) -> CalledFunction:
        """The call as one of a function."""
        return CalledFunction(self.name, {"input": self.input})


OutputItem = OutputThought | OutputMessage | OutputCall | OutputCustomCall


# --- as chat messages


def messages_of(
    items: Iterable[InputItem | OutputItem], chat_names: Mapping[tuple[str, str], str] = {}
) -> list[ChatMessage]:
    """Turn items into chat messages, in order. Neighbouring reasoning, text and calls of the assistant are one
    message. `chat_names`: for each namespace and name of a tool, its name in a chat."""
    messages: list[ChatMessage] = []
    thoughts, said, calls = list[str](), None, list[Call]()

    def end_turn() -> None:
        nonlocal thoughts, said, calls
        thought = "".join(thoughts) or None
        if said is not None or calls or thought:
            messages.append(ChatMessage("assistant", said, tool_calls=calls or None, reasoning_content=thought))
        thoughts, said, calls = [], None, []

    for item in items:
        match item:
            case PastThought() | OutputThought():
                if said is not None or calls:
                    end_turn()
                thoughts += [part.text for part in item.content or item.summary or ()]
            case OutputMessage() | InputMessage(role="assistant"):
                if said is not None or calls:
                    end_turn()
                said = _said(item)
            case PastCall() | OutputCall() | OutputCustomCall() | ClientCall() | McpCall():
                if len(calls) == TOOLS_LIMIT:
                    end_turn()
                calls.append(_call(item, chat_names))
                if isinstance(item, McpCall):
                    end_turn()
                    output = item.output or (bytes(item.error).decode() if item.error is not UNSET else "")
                    messages.append(ChatMessage("tool", output, item.name, tool_call_id=item.id))
            case CallOutput() | ClientCallOutput():
                end_turn()
                answered = item.call_id or item.id
                messages.append(
                    ChatMessage("tool", text_of_content(_result(item), "tool"), item.name, tool_call_id=answered)
                )
            case InputMessage():
                end_turn()
                content: ResultContent | None = [*item.content] if isinstance(item.content, list) else item.content
                messages.append(ChatMessage(item.role, content))
            case IgnoredItem() | AdditionalTools():
                pass
            case ItemReference():
                raise AssertionError("references are replaced before")
    end_turn()
    return messages


def _call(
    item: PastCall | OutputCall | OutputCustomCall | ClientCall | McpCall, chat_names: Mapping[tuple[str, str], str]
) -> Call:
    """Return a call as a chat has it."""
    if isinstance(item, ClientCall | OutputCustomCall):
        called = item.called
    else:
        called = CalledFunction(item.name, item.arguments)
    if isinstance(item, McpCall):
        return Call(item.id, "function", called)
    if space := item.namespace or "":
        name = chat_names.get((space, called.name)) or chat_name(space, called.name)
        called = CalledFunction(name, called.arguments)
    return Call(item.call_id, "function", called)


def _said(item: InputMessage | OutputMessage) -> str:
    if isinstance(item, OutputMessage):
        return "".join(part.text for part in item.content)
    return text_of_content(item.content, item.role)


_OUTPUT: msgspec.json.Decoder[ResultContent] = msgspec.json.Decoder(ResultContent)


def _result(item: CallOutput | ClientCallOutput) -> ResultContent | None:
    """Return the result of a call; one that is neither text nor parts is JSON."""
    if isinstance(item, CallOutput) or item.output is UNSET:
        return item.output if isinstance(item, CallOutput) else None
    try:
        return _OUTPUT.decode(item.output)
    except MALFORMED:
        pass
    try:
        return bytes(item.output).decode()
    except UnicodeDecodeError:
        raise field_error("input[].output", "is not UTF-8") from None


def check_calls(before: Iterable[ChatMessage], items: Sequence[InputItem]) -> None:
    """Check that each output comes after a call with its id. Raise InvalidRequest."""
    called = {call.id for message in before for call in message.tool_calls or ()}
    for at, item in enumerate(items):
        if isinstance(item, PastCall | ClientCall):
            called.add(item.call_id)
        elif isinstance(item, CallOutput | ClientCallOutput) and (item.call_id or item.id) not in called:
            raise field_error(f"input[{at}].call_id", f"no call {item.call_id!r} comes before this output")

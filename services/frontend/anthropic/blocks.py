"""The blocks of a message in Anthropic's API. Pure.

A conversation may have begun at Anthropic. What only Anthropic can read or repeat of its answers is ignored and named.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct

from services.frontend.protocol.foreign import Hint, IgnoredPart
from services.frontend.protocol.messages import CalledName, CallId
from services.frontend.protocol.parts import PARTS_LIMIT, ImageUrl


class TextBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text in a request."""

    text: str
    cache_control: Hint = UNSET
    citations: Hint = UNSET


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """Thinking of the assistant that the client sends back; the chat template decides whether to render it."""

    thinking: str
    signature: str | None = ""
    """The signature is not verified; answers have an empty one."""


class RedactedThinking(IgnoredPart, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Thinking that is encrypted."""


class ServerToolUse(IgnoredPart, frozen=True, tag_field="type", tag="server_tool_use"):
    """A call of a tool that Anthropic ran. What the model made of it is in its text. So it is with the next ones."""


class McpToolUse(IgnoredPart, frozen=True, tag_field="type", tag="mcp_tool_use"):
    """A call of an MCP server's tool."""


class McpToolResult(IgnoredPart, frozen=True, tag_field="type", tag="mcp_tool_result"):
    """The result of such a call."""


class WebSearchResult(IgnoredPart, frozen=True, tag_field="type", tag="web_search_tool_result"):
    """What was found on the web."""


class WebFetchResult(IgnoredPart, frozen=True, tag_field="type", tag="web_fetch_tool_result"):
    """A page of the web."""


class CodeResult(IgnoredPart, frozen=True, tag_field="type", tag="code_execution_tool_result"):
    """The output of a program."""


class BashResult(IgnoredPart, frozen=True, tag_field="type", tag="bash_code_execution_tool_result"):
    """The output of a command."""


class EditorResult(IgnoredPart, frozen=True, tag_field="type", tag="text_editor_code_execution_tool_result"):
    """What an editor did."""


class ToolSearchResult(IgnoredPart, frozen=True, tag_field="type", tag="tool_search_tool_result"):
    """The tools that a search found."""


class ContainerUpload(IgnoredPart, frozen=True, tag_field="type", tag="container_upload"):
    """A file for a program."""


class ToolReferenceBlock(IgnoredPart, frozen=True, tag_field="type", tag="tool_reference"):
    """The name of a tool, in the result of a search for tools."""


class Base64Source(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """An image's data."""

    media_type: str
    data: str


class UrlSource(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="url"):
    """Where an image is."""

    url: str


class ShownImage(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """An image that the user shows."""

    source: Base64Source | UrlSource
    cache_control: Hint = UNSET

    @property
    def part(self) -> ImageUrl:
        """The image as a chat has it."""
        if isinstance(self.source, UrlSource):
            return ImageUrl(self.source.url)
        return ImageUrl(f"data:{self.source.media_type};base64,{self.source.data}")


class ImageBlock(IgnoredPart, frozen=True, tag_field="type", tag="image"):
    """An image, in the result of a tool. A text stands for it, and for a document."""


class DocumentBlock(IgnoredPart, frozen=True, tag_field="type", tag="document"):
    """A document, in the result of a tool."""


class SearchResultBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="search_result"):
    """A text that a tool found."""

    content: Annotated[list[TextBlock], Meta(max_length=PARTS_LIMIT)]
    source: str = ""
    title: str = ""
    cache_control: Hint = UNSET
    citations: Hint = UNSET

    @property
    def text(self) -> str:
        """The text, after where it is from."""
        return "\n".join(filter(None, (self.title, self.source, *(block.text for block in self.content))))


class CompactionBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="compaction"):
    """A summary of former turns, which Anthropic made; it is a text of the assistant."""

    content: str | None = None
    cache_control: Hint = UNSET


Texts = Annotated[list[TextBlock | ThinkingBlock], Meta(max_length=PARTS_LIMIT)]
"""Texts. The other type is refused; it is here because msgspec asks for `type` only if there are several."""


class ToolUseBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A call that the assistant made."""

    id: CallId
    name: CalledName
    input: dict[str, Any] | str | None = None
    """An object. Clients have been seen to send its text, or nothing, after a call that was cut off."""
    cache_control: Hint = UNSET
    caller: Hint = UNSET


ResultBlock = TextBlock | ToolReferenceBlock | ImageBlock | DocumentBlock | SearchResultBlock


class ToolResultBlock(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: CallId
    content: str | Annotated[list[ResultBlock], Meta(max_length=PARTS_LIMIT)] | None = None
    is_error: Hint = UNSET
    cache_control: Hint = UNSET


Block = (
    TextBlock
    | ShownImage
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | CompactionBlock
    | RedactedThinking
    | ServerToolUse
    | McpToolUse
    | McpToolResult
    | WebSearchResult
    | WebFetchResult
    | CodeResult
    | BashResult
    | EditorResult
    | ToolSearchResult
    | ContainerUpload
)

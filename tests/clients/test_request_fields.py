"""Each field of a request that Anthropic's, Ollama's and OpenAI's own clients can send has a place here.

It is in the Struct that decodes the body, where it is served, ignored and named, or refused by name, or it is a known
field that is ignored and named. A newer client with another field fails these tests and names it.
"""

from __future__ import annotations

import json

import pytest
from msgspec import Struct

from services.frontend.anthropic import blocks
from services.frontend.anthropic import request as anthropic
from services.frontend.anthropic import tools as anthropic_tools
from services.frontend.ollama import request as ollama
from services.frontend.protocol import (
    chat,
    completions,
    embeddings,
    messages,
    parts,
    responses_items,
    responses_request,
    responses_tools,
    structured,
    tools,
)
from services.frontend.serving.known_fields import OTHERS
from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)

ROLES = ("Assistant", "Developer", "Function", "System", "Tool", "User")
STRUCTS: dict[str, dict[str, type[Struct]]] = {
    "chat": {
        "": chat.ChatRequest,
        **dict.fromkeys([f"ChatCompletion{role}MessageParam" for role in ROLES], messages.ChatMessage),
        "ChatCompletionContentPartRefusalParam": parts.RefusalPart,
        "ChatCompletionContentPartTextParam": parts.TextPart,
        "ChatCompletionFunctionToolParam": tools.Tool,
        "ChatCompletionMessageFunctionToolCallParam": messages.Call,
        "ChatCompletionAllowedToolChoiceParam": structured.AllowedChoice,
        "ChatCompletionAllowedToolsParam": structured.AllowedTools,
        "ChatCompletionNamedToolChoiceCustomParam": structured.NamedCustomTool,
        "ChatCompletionNamedToolChoiceParam": structured.NamedFunctionTool,
        "ChatCompletionStreamOptionsParam": chat.StreamOptions,
        "FunctionDefinition": tools.Function,
        "JSONSchema": structured.JsonSchema,
        "ResponseFormatJSONObject": structured.JsonObjectFormat,
        "ResponseFormatJSONSchema": structured.JsonSchemaFormat,
        "ResponseFormatText": structured.TextFormat,
    },
    "completions": {"": completions.CompletionRequest, "ChatCompletionStreamOptionsParam": chat.StreamOptions},
    "responses": {
        "": responses_request.ResponseRequest,
        "AdditionalTools": responses_items.AdditionalTools,
        "EasyInputMessageParam": responses_items.InputMessage,
        "FunctionCallOutput": responses_items.CallOutput,
        "FunctionToolParam": responses_tools.FunctionTool,
        "ItemReference": responses_items.ItemReference,
        "Message": responses_items.InputMessage,
        "Reasoning": responses_request.ReasoningConfig,
        "ResponseFormatTextJSONSchemaConfigParam": responses_request.SchemaFormat,
        "ResponseFunctionToolCallParam": responses_items.PastCall,
        "ResponseInputTextParam": parts.InputText,
        "ResponseOutputMessageParam": responses_items.InputMessage,
        "ResponseOutputTextParam": parts.PastText,
        "ResponseReasoningItemParam": responses_items.PastThought,
        "ResponseTextConfigParam": responses_request.TextConfig,
        "StreamOptions": chat.StreamOptions,
        "ToolChoiceFunctionParam": responses_tools.ChosenTool,
        "NamespaceToolParam": responses_tools.NamespaceTool,
        "ToolChoiceAllowedParam": responses_tools.ChosenTool,
    },
    "retrieve_response": {"": responses_request.StoredResponseRequest},
    "embeddings": {"": embeddings.EmbeddingRequest},
    "messages": {
        "": anthropic.MessagesRequest,
        "AssistantMessageParam": anthropic.Turn,
        "JSONOutputFormatParam": anthropic.SchemaOutput,
        "OutputConfigParam": anthropic.OutputConfig,
        "SearchResultBlockParam": blocks.SearchResultBlock,
        "TextBlockParam": blocks.TextBlock,
        "ThinkingBlockParam": blocks.ThinkingBlock,
        "ThinkingConfigAdaptiveParam": anthropic.ThinkingConfig,
        "ThinkingConfigDisabledParam": anthropic.ThinkingConfig,
        "ThinkingConfigEnabledParam": anthropic.ThinkingConfig,
        "ToolChoiceAnyParam": anthropic.ToolChoiceConfig,
        "ToolChoiceAutoParam": anthropic.ToolChoiceConfig,
        "ToolChoiceNoneParam": anthropic.ToolChoiceConfig,
        "ToolChoiceToolParam": anthropic.ToolChoiceConfig,
        "ToolParam": anthropic_tools.ClientTool,
        "ToolResultBlockParam": blocks.ToolResultBlock,
        "CompactionBlockParam": blocks.CompactionBlock,
        "ToolUseBlockParam": blocks.ToolUseBlock,
        "UserMessageParam": anthropic.Turn,
    },
    "count_tokens": {"": anthropic.CountTokensRequest},
    "ollama_chat": {
        "": ollama.OllamaChatRequest,
        "Message": ollama.OllamaMessage,
        "ToolCall": ollama.OllamaCall,
        "Tool": tools.Tool,
    },
    "ollama_generate": {"": ollama.OllamaGenerateRequest},
    "ollama_embed": {"": ollama.OllamaEmbedRequest},
    "ollama_show": {"": ollama.OllamaShowRequest},
}
"""Operation → the name of an object in the client's types, empty for the body → the Struct that decodes it."""


async def test_every_field_of_an_official_client_is_known(run_program: Run) -> None:
    found: dict[str, dict[str, list[str]]] = json.loads(await run_program("request_fields.py"))
    assert set(found.pop("ollama_options")[""]) <= ollama.OPTIONS
    assert found.keys() == STRUCTS.keys()
    for operation, structs in STRUCTS.items():
        assert structs.keys() <= found[operation].keys(), "a renamed type would be compared with nothing"
    unknown = [
        f"{operation}: {kind or 'body'}: {name}"
        for operation, structs in STRUCTS.items()
        for kind, struct in structs.items()
        for name in found[operation][kind]
        if name not in {*struct.__struct_encode_fields__, struct.__struct_config__.tag_field} | OTHERS
    ]
    assert unknown == []


async def test_every_answer_has_the_form_of_the_official_clients_types(run_program: Run, stack: Served) -> None:
    await run_program("official_answers.py", stack.url.removesuffix("/v1"))

"""The names of the files that this package reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shared.model_file import CONFIG_LIMIT_BYTES, LIST_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"

FILES: Mapping[str, int] = MappingProxyType(
    {
        CONFIG: CONFIG_LIMIT_BYTES,
        GENERATION: CONFIG_LIMIT_BYTES,
        TOKENIZER: TOKENIZER_LIMIT_BYTES,
        TOKENIZER_CONFIG: LIST_LIMIT_BYTES,
        SPECIAL_TOKENS: LIST_LIMIT_BYTES,
        TEMPLATE: CONFIG_LIMIT_BYTES,
        TOOL_TEMPLATE: CONFIG_LIMIT_BYTES,
        PROCESSOR_TEMPLATE: CONFIG_LIMIT_BYTES,
    }
)
"""The files → the largest size in bytes that is read of each."""

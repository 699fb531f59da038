"""Chat templates with the rules of well-known models, in other words: what they refuse, what they leave out, what they
expect of calls. Texts around the messages are short.

`MISTRAL_V3` is as Mistral 7B v0.3 and Nemo, `MISTRAL_V7` as Small 3.1, `MISTRAL_V11` as Devstral 2 and Ministral 3.
"""

from __future__ import annotations

from pathlib import Path

import shared.chat_templates

_SYSTEM_FIRST = """
{%- if messages[0].role == "system" %}{% set system = messages[0].content %}{% set rest = messages[1:] -%}
{%- else %}{% set system = "" %}{% set rest = messages %}{% endif -%}
"""
_MISTRAL_ID = """
{%- macro id_of(id, least, most) %}
{%- if id is not defined or id | length < least or id | length > most %}{{ raise_exception("ids have 9 letters") }}
{%- endif %}{{ id[-9:] }}{% endmacro -%}
"""
_MISTRAL = """
{%- set ns = namespace(turns=0) -%}
{%- for m in rest -%}
{%- if m.role == "user" or (m.role == "assistant" and not m.tool_calls) -%}
{%- if (m.role == "user") != (ns.turns % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif -%}
{%- set ns.turns = ns.turns + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == "user" -%}[INST]{{ BEFORE_LAST if loop.last }}{{ m.content }}[/INST]
{%- elif m.tool_calls -%}TEXT_WITH_CALLS[TOOL_CALLS]
{%- for c in m.tool_calls -%}{{ c.function | tojson }}{{ id_of(c.id, 9, LONGEST) }}{%- endfor -%}</s>
{%- elif m.role == "assistant" -%}
EMPTY_ANSWER{{ m.content }}</s>
{%- elif m.role == "tool" -%}[TOOL_RESULTS]{{ m.content }}{{ id_of(m.tool_call_id, 9, LONGEST) }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception("only the roles user and assistant, and system at first") }}{% endif -%}
{%- endfor -%}
"""


def _mistral(*, longest: str, system: str, before_last: str, empty_answer: str, text_with_calls: str) -> str:
    rest = _MISTRAL.replace("LONGEST", longest).replace("BEFORE_LAST", before_last)
    rest = rest.replace("EMPTY_ANSWER", empty_answer).replace("TEXT_WITH_CALLS", text_with_calls)
    return _SYSTEM_FIRST + _MISTRAL_ID + "<s>" + system + rest


MISTRAL_V3 = _mistral(longest="9", system="", before_last="system", empty_answer="", text_with_calls="")
MISTRAL_V7 = _mistral(
    longest="99", system="[SYSTEM_PROMPT]{{ system }}", before_last="''", empty_answer="", text_with_calls=""
)
MISTRAL_V11 = _mistral(
    longest="99",
    system="[SYSTEM_PROMPT]{{ system }}",
    before_last="''",
    empty_answer='{%- if not m.content %}{{ raise_exception("an answer needs a text or calls") }}{% endif -%}',
    text_with_calls="{{ m.content }}",
)
GEMMA_3 = (
    _SYSTEM_FIRST
    + """<bos>
{%- for m in rest -%}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif -%}
<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}
{{ system + "\n\n" if loop.first }}{{ m.content | trim }}<end_of_turn>
{%- endfor -%}{% if add_generation_prompt %}<start_of_turn>model{% endif %}"""
)
GEMMA_2 = (
    '{%- if messages[0].role == "system" %}{{ raise_exception("no role system") }}{% endif -%}'
    + GEMMA_3.partition("<bos>")[2].replace("rest", "messages").replace('{{ system + "\n\n" if loop.first }}', "")
)
QWEN_3_5 = """
{%- if not messages %}{{ raise_exception("no messages") }}{% endif -%}
{%- if messages[0].role == "system" -%}<|im_start|>system {{ messages[0].content }}<|im_end|>{%- endif -%}
{%- set ns = namespace(asked=false) -%}
{%- for m in messages[::-1] -%}{%- if m.role == "user" -%}
{%- set text = m.content | trim -%}
{%- set is_result = text.startswith("<tool_response>") and text.endswith("</tool_response>") -%}
{%- if not is_result %}{% set ns.asked = true %}{% endif -%}
{%- endif -%}{%- endfor -%}
{%- if not ns.asked %}{{ raise_exception("no question of the user") }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == "system" -%}{%- if not loop.first %}{{ raise_exception("system comes first") }}{% endif -%}
{%- elif m.role == "user" -%}<|im_start|>user {{ m.content }}<|im_end|>
{%- elif m.role == "assistant" -%}<|im_start|>assistant <think>{{ m.reasoning_content }}</think>{{ m.content | trim }}
{%- for c in m.tool_calls or () -%}<tool_call><function={{ c.function.name }}>
{%- for name, value in c.function.arguments | items -%}
<parameter={{ name }}>{{ value | tojson if value is mapping else value | string }}</parameter>
{%- endfor -%}</tool_call>{%- endfor -%}<|im_end|>
{%- elif m.role == "tool" -%}<|im_start|>user <tool_response>{{ m.content }}</tool_response><|im_end|>
{%- else %}{{ raise_exception("an unknown role") }}{% endif -%}
{%- endfor -%}"""
LLAMA_3_1 = """
{%- if messages[0].role == "system" %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] -%}
{%- else %}{% set system = "" %}{% endif -%}<|begin_of_text|>system {{ system }}<|eot_id|>
{%- if tools -%}
{%- if not messages %}{{ raise_exception("tools stand in the user's first message") }}{% endif -%}
user {{ tools | tojson }}{{ messages[0].content | trim }}<|eot_id|>{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for m in messages -%}
{%- if not (m.role == "tool" or "tool_calls" in m) -%}{{ m.role }} {{ m.content | trim }}<|eot_id|>
{%- elif "tool_calls" in m -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif -%}
{%- set call = m.tool_calls[0].function -%}
assistant {"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else -%}ipython {{ m.content | tojson }}<|eot_id|>{%- endif -%}
{%- endfor -%}"""
DEEPSEEK_R1 = """
{%- set ns = namespace(system="") -%}
{%- for m in messages -%}{%- if m.role == "system" %}{% set ns.system = m.content %}{% endif -%}{%- endfor -%}
{{ ns.system }}
{%- for m in messages -%}
{%- if m.role == "user" -%}<|User|>{{ m.content }}{%- endif -%}
{%- if m.role == "assistant" and m.content is none -%}<|Assistant|>
{%- for c in m.tool_calls -%}
{{ "<|tool|>" + c.type + "<|sep|>" + c.function.name + "\n```json\n" + c.function.arguments + "\n```" }}
{%- endfor -%}{%- endif -%}
{%- if m.role == "assistant" and m.content is not none -%}
<|Assistant|>{{ m.content.split("</think>")[-1] }}{%- endif -%}
{%- if m.role == "tool" -%}<|output|>{{ m.content }}{%- endif -%}
{%- endfor -%}"""
WITH_PARTS = """{%- for m in messages -%}{{ m.role }}
{%- for part in m.content -%}{%- if part.type == "text" -%} {{ part.text }}{%- endif -%}{%- endfor -%}
{%- for c in m.tool_calls or () -%}{{ c.function | tojson }}{%- endfor -%}{%- endfor -%}"""
STRICT = {
    "mistral_v3": MISTRAL_V3,
    "mistral_v7": MISTRAL_V7,
    "mistral_v11": MISTRAL_V11,
    "gemma_3": GEMMA_3,
    "gemma_2": GEMMA_2,
    "qwen_3_5": QWEN_3_5,
    "llama_3_1": LLAMA_3_1,
    "deepseek_r1": DEEPSEEK_R1,
    "with_parts": WITH_PARTS,
}
BUNDLED = {
    name: (Path(shared.chat_templates.__file__).parent / f"{name}.jinja").read_text()
    for name in sorted(shared.chat_templates.NAMES)
}

"""Renders chat templates: messages to a prompt's text, as `transformers` does, in Jinja's sandbox.

A template comes with the model and is a program. It runs in the sandbox, and its output is limited. Whatever it raises
is an error of the request: templates refuse conversations with `raise_exception`.

Its time is limited by counting: each turn of a loop and each call of a macro is a *step*, which the compiled template
counts itself. Python cannot end a thread, so a clock would not help. Products and powers are limited too. The time of
other single steps is not limited here: a filter over all messages may take long. Nor is the time to compile a template,
since Jinja computes constants then. So template_trial.py compiles and tries templates in a process of their own, and
what it has compiled is what runs here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from services.frontend.models.message_list import TemplateRules, find_rules
from shared.errors import InvalidRequest, ModelError

RENDERED_LIMIT_CHARACTERS = 8 << 20
"""The longest prompt, in characters: twice the largest request body."""
STEPS_LIMIT = 250_000
"""The number of steps that a template may take: some 0.2 s of a thread that shares Python's lock. The largest body has
fewer than half as many messages."""
NUMBER_LIMIT_BITS = 65_536
"""The largest product or power of whole numbers, in bits."""
CODE_LIMIT_CHARACTERS = 512 << 10
"""The largest compiled template, in characters: ten times that of a large real one."""
TRIAL_STEPS = 10_000
"""The number of steps that a template may take with each conversation that its rules are found with."""
_STEP = "0step"
"""The name of the step counter. It begins with a digit, so that no template can write it or change its meaning."""
_OURS = {"messages", "add_generation_prompt"}
_CALL = {"tools", "continue_final_message", "chat_template", "tokenize"}
"""Further arguments of the call that renders a template in `transformers`."""


class StepLimitReached(Exception):
    """A template took more steps than it may."""


class Generation(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}`: templates mark an assistant's text with it, for training.

    It renders what is inside, and names set inside end there, as in `transformers`.
    """

    tags = {"generation"}  # noqa: RUF012  Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Scope:
        """Return the statements up to the end tag."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the names that templates have in `transformers`, and without large products."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.do", loopcontrols, Generation])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power. Raise TemplateError if it is too large."""
        sizes = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
        numbers = [one for one in (left, right) if isinstance(one, int)]
        if operator == "**":
            large = len(numbers) == 2 and right > 0 and left.bit_length() * right > NUMBER_LIMIT_BITS
        elif sizes:
            large = bool(numbers) and sizes[0] * numbers[0] > RENDERED_LIMIT_CHARACTERS
        else:
            large = sum(number.bit_length() for number in numbers) > NUMBER_LIMIT_BITS
        if large:
            raise TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class CompiledTemplate(Struct, frozen=True):
    """What Jinja makes of a template's source."""

    source: str
    code: str
    """A Python module."""
    names: frozenset[str]
    """The names that the template reads and does not set."""
    rules: TemplateRules | None = None
    """What lists of messages it does not take; None if that was not tried."""


def compile_template(source: str) -> CompiledTemplate:
    """Compile a template. Nothing bounds the time and memory that it takes. Raise ModelError."""
    environment = Environment()
    try:
        # A field that the template does not read would be missing in the prompt without an error.
        names = meta.find_undeclared_variables(environment.parse(source))
        code = environment.compile(_counting(environment, source), raw=True)
    except TemplateSyntaxError as wrong:
        raise ModelError(f"the chat template, line {wrong.lineno}: {wrong.message}") from None
    except Exception as wrong:  # noqa: BLE001  a template is a plug-in: what Jinja makes of it may not compile
        raise ModelError(f"the chat template: {type(wrong).__name__}: {wrong}") from None
    if len(code) > CODE_LIMIT_CHARACTERS:
        raise ModelError(f"the chat template: compiled, it has more than {CODE_LIMIT_CHARACTERS} characters")
    return CompiledTemplate(source, code, frozenset(names - environment.globals.keys()))


class MessagesRefused(InvalidRequest):
    """A template refuses, or fails on, a list of messages."""


class ChatTemplate:
    """One model's compiled template."""

    def __init__(
        self,
        source: str | CompiledTemplate,
        tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Make it of a compiled template; a source is compiled here. `tokens` has names such as `bos_token`, as
        tokenizer_config.json gives them. Raise ModelError."""
        compiled = compile_template(source) if isinstance(source, str) else source
        self._tokens = dict(tokens)
        self._rules = compiled.rules
        self.source = compiled.source
        self.reads = set(compiled.names) - self._tokens.keys() - _OURS
        self.sets = frozenset(self._tokens.keys() | _OURS | _CALL)
        """The names that have their values from the call itself, or from the tokenizer."""
        self.reads_calls = "tool_calls" in self.source
        environment = Environment(now)
        try:
            code = compile(compiled.code, "<chat template>", "exec")
        except Exception as wrong:  # noqa: BLE001  such as names that Python does not take
            raise ModelError(f"the chat template: {type(wrong).__name__}: {wrong}") from None
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        # Each rendering copies them; out of Jinja's ChainMap that takes two thirds of a short chat's 19 µs.
        self._template.globals = dict(self._template.globals)

    @cached_property
    def rules(self) -> TemplateRules:
        """What lists of messages the template does not take."""

        def render(messages: Sequence[Mapping[str, object]]) -> str:
            try:
                return self.render(messages, TRIAL_STEPS)
            except StepLimitReached:
                return ""

        return find_rules(render) if self._rules is None else self._rules

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        steps: int = STEPS_LIMIT,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        more: Mapping[str, object] = MappingProxyType({}),
        answer_begins: bool = True,
    ) -> str:
        """Return the prompt; with `answer_begins` it ends where the assistant's answer begins. `more` has values for
        names that the template `reads`. Raise InvalidRequest, and StepLimitReached after `steps`."""
        refused = partial(MessagesRefused, param="messages")
        pieces: list[str] = []
        size, left = 0, steps

        def step() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise StepLimitReached

        given = {
            **self._tokens,
            "documents": None,  # as transformers has it
            **more,
            "messages": messages,
            "tools": tools or None,  # as transformers has it: many templates ask whether it is none
            "add_generation_prompt": answer_begins,
            _STEP: step,
        }
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                size += len(piece)
                if size > RENDERED_LIMIT_CHARACTERS:
                    too_long = f"the prompt is longer than {RENDERED_LIMIT_CHARACTERS} characters"
                    raise InvalidRequest(too_long, param="messages")
        except (InvalidRequest, StepLimitReached):
            raise
        except TemplateError as wrong:
            raise refused(f"the chat template refuses the messages: {wrong}") from None
        except Exception as wrong:  # noqa: BLE001  a template is a plug-in: its expressions may raise anything
            raise refused(f"the chat template fails on the messages: {type(wrong).__name__}: {wrong}") from None
        return "".join(pieces)


def _counting(environment: Environment, source: str) -> nodes.Template:
    """Return the template's syntax tree, with a call of `_STEP` at the beginning of each loop's and macro's body."""
    template = environment.parse(source)
    repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *template.find_all(nodes.For),
        *template.find_all(nodes.Macro),
        *template.find_all(nodes.CallBlock),
    ]
    for node in repeated:
        call = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    template.set_environment(environment)
    return template


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON, unlike Jinja's own filter without HTML escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

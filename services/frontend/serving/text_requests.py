"""The requests to workers that a request for text becomes: one for each choice of each prompt.

AskedText, TokenisedText, AnswerGrammar ─▶ text_requests ─▶ InferenceRequest, with the Output that makes its text
"""

from __future__ import annotations

import random

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter

from services.frontend.models.preprocess import Prompt
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Output, PromptEntries
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.messages import text_of
from services.frontend.protocol.structured import offered
from services.frontend.protocol.text_plan import sampling_of
from services.frontend.protocol.tools import CustomFunction
from services.frontend.requests.request_trace import CallSpans
from services.frontend.requests.stream import InferenceRequest
from services.frontend.serving.text_prompts import AskedText, TokenisedText
from services.frontend.structured.grammar import AnswerGrammar
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import FORMATS, AnswerParser, FormatName, ParsePlan
from shared.hashing import image_extras, pack_hashes, seed_of, sequence_hashes
from shared.messages.cards import SamplingDefaults
from shared.messages.generate import Sampling


def text_requests(
    asked: AskedText,
    tokenised: TokenisedText,
    grammar: AnswerGrammar | None,
    defaults: SamplingDefaults,
    tool_calls: Counter,
) -> list[list[InferenceRequest]]:
    """Return for each prompt the requests of its choices. Several choices are named `name/0` and so on. `tool_calls`
    counts calls by format and outcome."""
    plan, model, context = asked.plan, asked.model, asked.context
    found: list[list[InferenceRequest]] = []
    count, salt = plan.count, context.salt(asked.request.cache_salt)
    name, affinity_key = context.id.unique, asked.request.prompt_cache_key or context.session
    alone = count * len(tokenised.prompts) == 1
    outputs = _Outputs.of(asked, tokenised, tool_calls)
    extras = image_extras([(one.key, one.start, one.tokens) for one in tokenised.images], model.block_size)
    for at, (prompt, text) in enumerate(zip(tokenised.prompts, tokenised.echoed, strict=True)):
        sampling = _sampling(asked, prompt, grammar, defaults)
        first = InferenceRequest(
            id=name if alone else f"{name}/{at * count}",
            model=model.base,
            lora=model.lora,
            prompt=prompt.tokens,
            prompt_tokens=prompt.count,
            hashes=pack_hashes(
                sequence_hashes(prompt.tokens, model.block_size, seed_of(model.lora, salt), extras=extras)
            ),
            sampling=sampling,
            salt=salt,
            # The choices of a prompt share its blocks, so they prefer one worker.
            affinity_key=affinity_key or (f"{name}/{at}" if count > 1 else ""),
            deadline=asked.deadline,
            received_s=context.received_s,
            served=context.permit.served,
            output=outputs.output(prompt, text),
            prompt_entries=outputs.prompt_entries(prompt, text),
            trace=context.trace,
            prompt_only=plan.prompt_only,
            images=tokenised.images,
            image_input=asked.limits.images,
            grammar_param="" if grammar is None else grammar.param,
            is_follower=at > 0,
            priority=asked.priority,
        )
        others = [
            replace(
                first,
                id=f"{name}/{at * count + choice}",
                is_follower=True,
                repeats_prompt=True,
                sampling=replace(sampling, seed=seed),
                output=outputs.output(prompt, text),
                prompt_entries=outputs.prompt_entries(prompt, text),
            )
            for choice in range(1, count)
            for seed in [(sampling.seed + choice) & ((1 << 64) - 1)]  # as in vLLM
        ]
        found.append([first, *others])
    return found


def _sampling(asked: AskedText, prompt: Prompt, grammar: AnswerGrammar | None, defaults: SamplingDefaults) -> Sampling:
    request, fim = asked.request, asked.model.fim
    text = "" if grammar is None else grammar.grammar
    sampling = sampling_of(request, asked.plan, prompt.max_tokens, random.getrandbits(64), text, defaults)
    if isinstance(request, CompletionRequest) and request.suffix and fim is not None:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *fim.ends))
    return sampling


class _Outputs(Struct, frozen=True):
    """Makes what turns the tokens of each choice into text."""

    asked: AskedText
    parsing: ParsePlan | None
    """What the answers are parsed for. None if they are plain content, which needs no parser."""
    tool_calls: Counter
    named: TokenBytes
    """The model's tokens with the names that the request's log-probabilities have."""
    table: TokenBytes
    """Tokens as they stand in the text of answers, where some are marks or special ones."""
    special_stops: dict[int, str]
    """The stop strings that are tokens without a text, by their ids."""

    @staticmethod
    def of(asked: AskedText, tokenised: TokenisedText, tool_calls: Counter) -> _Outputs:
        plan, model = asked.plan, asked.model
        named = replace(model.token_bytes, numbered=plan.numbered_tokens)
        table = replace(model.marked_token_bytes, numbered=plan.numbered_tokens) if tokenised.is_parsed else named
        if plan.special_tokens:
            table = replace(table, table=table.names)
        ids = {stop: model.tokenizer.token_to_id(stop) for stop in plan.stops}
        stops = {token: stop for stop, token in ids.items() if token is not None and not table.bytes_of(token)}
        return _Outputs(asked, tokenised.parsing if tokenised.is_parsed else None, tool_calls, named, table, stops)

    def output(self, prompt: Prompt, echoed: str) -> Output | ParsedOutput:
        """Return what turns the tokens of one choice into text, which follows `echoed`."""
        plan, parsing = self.asked.plan, self.parsing
        output = Output(
            self.table,
            plan.stops,
            min_tokens=plan.min_tokens,
            include_stop=plan.include_stop,
            with_ids=plan.with_ids,
            begins_at=len(echoed),
            before=self._text_before(prompt, echoed),
            special_stops=self.special_stops,
            rates_stop=not plan.is_chat,  # as vLLM; programs that rate texts drop the last of all entries
        )
        if parsing is None:
            return output
        result = ParseResult() if parsing.calls is None else self._call_result(parsing.calls)
        return ParsedOutput(output, AnswerParser(parsing, result))

    def prompt_entries(self, prompt: Prompt, echoed: str) -> PromptEntries | None:
        """Return what makes entries of the prompt's log-probabilities for one choice, before which the prompt is
        echoed. None if they are not asked for."""
        return PromptEntries(self.named, prompt.tokens, echoed) if self.asked.plan.prompt_logprobs else None

    def _call_result(self, format_name: FormatName) -> ParseResult:
        """Return what collects the tool calls of one choice, gives each an id, and counts it."""
        request, trace, form = self.asked.request, self.asked.context.trace, FORMATS[format_name]
        assert isinstance(request, ChatRequest)
        spans = None if trace is None else CallSpans(trace, format_name)

        def draw_id() -> str:
            if spans is not None:
                spans.begun()
            return f"{form.id_prefix}{random.getrandbits(4 * form.id_digits):0{form.id_digits}x}"

        def count_call(outcome: str) -> None:
            self.tool_calls.labels(format_name, outcome).inc()
            if spans is not None:
                spans.ended(outcome)

        tools = [tool.function for tool in offered(request.tools, request.tool_choice)]
        return ParseResult(
            frozenset(tool.name for tool in tools),
            draw_id,
            count=count_call,
            parallel=request.parallel_tool_calls is not False,
            whole=not self.asked.plan.streamed,
            customs=frozenset(tool.name for tool in tools if isinstance(tool, CustomFunction)),
            schemas={tool.name: tool.parameters or {} for tool in tools},
        )

    def _text_before(self, prompt: Prompt, echoed: str) -> bytes:
        """Return the end of the text that an answer continues; empty for the answer of a chat, which begins a text."""
        request, table = self.asked.request, self.table
        if isinstance(request, ChatRequest) and not (request.continue_final_message and text_of(request.messages[-1])):
            return b""
        return replace(table, table=table.names).end_of(prompt.tokens) if echoed else table.end_of(prompt.tokens)

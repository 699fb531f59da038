"""The requests to workers that a request for text becomes: one for each choice of each prompt.

AskedText, TokenisedText, AnswerGrammar ─▶ text_requests ─▶ InferenceRequest, with the Output that makes its text
"""

from __future__ import annotations

import random

from msgspec.structs import replace
from prometheus_client import Counter

from services.frontend.models.preprocess import Prompt
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.output.prompt_entries import PromptEntries
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.messages import text_of
from services.frontend.protocol.text_plan import TextPlan, TextRequest, sampling_of
from services.frontend.protocol.tools import CustomFunction
from services.frontend.requests.request_trace import CallSpans
from services.frontend.requests.stream import InferenceRequest
from services.frontend.serving.text_prompts import AskedText, TokenisedText
from services.frontend.structured.grammar import AnswerGrammar
from services.frontend.tool_parsers.formats import FORMATS, FormatName
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser
from shared.hashing import pack_hashes, seed_of, sequence_hashes
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
    names = _named_tokens(plan, model.token_bytes)
    for at, (prompt, text) in enumerate(zip(tokenised.prompts, tokenised.echoed, strict=True)):
        sampling = _sampling(asked, prompt, grammar, defaults)
        first = InferenceRequest(
            id=name if alone else f"{name}/{at * count}",
            model=model.base,
            lora=model.lora,
            prompt=prompt.tokens,
            prompt_tokens=prompt.count,
            hashes=pack_hashes(sequence_hashes(prompt.tokens, model.block_size, seed_of(model.lora, salt))),
            sampling=sampling,
            salt=salt,
            # The choices of a prompt share its blocks, so they prefer one worker.
            affinity_key=affinity_key or (f"{name}/{at}" if count > 1 else ""),
            deadline=asked.deadline,
            received_s=context.received_s,
            served=context.permit.served,
            output=_output(asked, tokenised, prompt, text, tool_calls),
            prompt_entries=_prompt_entries(plan, names, prompt, text),
            trace=context.trace,
            prompt_only=plan.prompt_only,
            grammar_param="" if grammar is None else grammar.param,
            is_follower=at > 0,
            priority=asked.priority,
        )
        other = replace(first, is_follower=True, repeats_prompt=True)
        others = [
            replace(
                other,
                id=f"{name}/{at * count + choice}",
                sampling=replace(sampling, seed=seed),
                output=_output(asked, tokenised, prompt, text, tool_calls),
                prompt_entries=_prompt_entries(plan, names, prompt, text),
            )
            for choice in range(1, count)
            for seed in [(sampling.seed + choice) & ((1 << 64) - 1)]  # as in vLLM
        ]
        found.append([first, *others])
    return found


def _sampling(asked: AskedText, prompt: Prompt, grammar: AnswerGrammar | None, defaults: SamplingDefaults) -> Sampling:
    request, fim = asked.request, asked.model.fim
    text = "" if grammar is None else grammar.grammar
    sampling = sampling_of(request, prompt.max_tokens, random.getrandbits(64), text, defaults)
    if isinstance(request, CompletionRequest) and request.suffix and fim is not None:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *fim.ends))
    return replace(sampling, prompt_logprobs=sampling.logprobs) if asked.plan.prompt_logprobs else sampling


def _output(
    asked: AskedText, tokenised: TokenisedText, prompt: Prompt, echoed: str, tool_calls: Counter
) -> Output | ParsedOutput:
    """Return what turns the tokens of one choice into text, which follows `echoed`. Plain content needs no parser."""
    plan, parsing = asked.plan, tokenised.parsing
    table = _named_tokens(plan, asked.model.marked_token_bytes if tokenised.is_parsed else asked.model.token_bytes)
    if plan.special_tokens:
        table = replace(table, table=table.names)
    output = Output(
        table,
        plan.stops,
        min_tokens=plan.min_tokens,
        include_stop=plan.include_stop,
        with_ids=plan.with_ids,
        begins_at=len(echoed),
        before=_text_before(asked.request, table, prompt, echoed),
        special_stops=_special_stops(asked, table),
    )
    if not tokenised.is_parsed:
        return output
    result = ParseResult() if parsing.calls is None else _call_result(asked, parsing.calls, tool_calls)
    return ParsedOutput(output, AnswerParser(parsing, result))


def _special_stops(asked: AskedText, table: TokenBytes) -> dict[int, str]:
    """Return the stop strings that are tokens without a text, by their ids."""
    ids = {stop: asked.model.tokenizer.token_to_id(stop) for stop in asked.plan.stops}
    return {token: stop for stop, token in ids.items() if token is not None and not table.bytes_of(token)}


def _call_result(asked: AskedText, format_name: FormatName, tool_calls: Counter) -> ParseResult:
    """Return what collects the tool calls of one choice, gives each an id, and counts it."""
    request, trace, form = asked.request, asked.context.trace, FORMATS[format_name]
    assert isinstance(request, ChatRequest)
    spans = None if trace is None else CallSpans(trace, format_name)

    def draw_id() -> str:
        if spans is not None:
            spans.begun()
        return f"{form.id_prefix}{random.getrandbits(4 * form.id_digits):0{form.id_digits}x}"

    def count_call(outcome: str) -> None:
        tool_calls.labels(format_name, outcome).inc()
        if spans is not None:
            spans.ended(outcome)

    tools = [tool.function for tool in request.tools or ()]
    return ParseResult(
        frozenset(tool.name for tool in tools),
        draw_id,
        count=count_call,
        parallel=request.parallel_tool_calls is not False,
        whole=not asked.plan.streamed,
        customs=frozenset(tool.name for tool in tools if isinstance(tool, CustomFunction)),
    )


def _text_before(request: TextRequest, table: TokenBytes, prompt: Prompt, echoed: str) -> bytes:
    """Return the end of the text that an answer continues; empty for the answer of a chat, which begins a text."""
    if isinstance(request, ChatRequest) and not (request.continue_final_message and text_of(request.messages[-1])):
        return b""
    return replace(table, table=table.names).end_of(prompt.tokens) if echoed else table.end_of(prompt.tokens)


def _prompt_entries(plan: TextPlan, table: TokenBytes, prompt: Prompt, echoed: str) -> PromptEntries | None:
    """Return what makes entries of the prompt's log-probabilities for one choice, before which the prompt is echoed.
    None if they are not asked for."""
    return PromptEntries(table, prompt.tokens, echoed) if plan.prompt_logprobs else None


def _named_tokens(plan: TextPlan, table: TokenBytes) -> TokenBytes:
    """Return a model's tokens with the names that the request's log-probabilities have."""
    return replace(table, numbered=True) if plan.numbered_tokens else table

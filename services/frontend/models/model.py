"""What the frontend knows about a model, from the model's directory.

A `Model` is loaded once, in a thread, and never changes. Its tokenizer must be, byte for byte, that of the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from tokenizers import Tokenizer

from services.frontend.models import template_trial
from services.frontend.models.bpe_cache import WordCache, read_words
from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.fim import FimTokens, read_fim_tokens
from services.frontend.models.token_lengths import characters_of_a_token
from services.frontend.models.tokenizer_trial import try_tokenizer
from services.frontend.output.detokenize import TokenBytes, read_token_bytes
from services.frontend.output.tokenizer_json import TokenizerJson, parse_tokenizer_json
from services.frontend.tool_parsers import reasoning
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ReasoningName, detect_format, detect_reasoning
from shared import model_file
from shared.chat_templates import NAMES
from shared.errors import ModelError
from shared.hashing import pack_tokens
from shared.messages.cards import ImageInput, ModelCard, PictureOutput, Pooling, SamplingDefaults
from shared.model_files import templates
from shared.model_files.special_tokens import read_named_tokens
from shared.model_files.tokenizer import complete_tokenizer


class ParserNames(Struct, frozen=True):
    """The parsers of a model's text; auto: the one that its chat template shows."""

    tools: FormatName | Literal["auto", "none"] = "auto"
    reasoning: ReasoningName | Literal["auto", "none"] = "auto"


BY_TEMPLATE = ParserNames()


class Model(Struct, frozen=True):
    """A model's tokenizer, templates and parsers."""

    name: str
    tokenizer: Tokenizer
    words: WordCache | None
    """The cache of words; None if all texts are left to the tokenizer."""
    around: tuple[bytes, bytes]
    """The packed special tokens that the tokenizer puts before and after a text, for texts from the cache."""
    largest_token: int
    """The largest token id that a text can be encoded to."""
    token_bytes: TokenBytes
    template: ChatTemplate | None
    """The chat template; None if the model has none, and no chat."""
    tool_template: ChatTemplate | None
    """The template for requests with tools; None if the model's template has no place for them."""
    tool_format: FormatName | None
    """The format of its tool calls; None if it is unknown."""
    thinks: bool
    """Whether its answers may begin with reasoning."""
    marked_token_bytes: TokenBytes
    """The bytes of tokens with the special tokens that mark tool calls and reasoning, for answers that are parsed."""
    marks: Mapping[str, int]
    """The marks that are tokens of their own → their ids."""
    fim: FimTokens | None
    """The tokens for an answer between a prompt and a suffix; None if its tokenizer has none."""
    tokenizer_digest: str
    block_size: int
    template_digest: str = ""
    """The digest of the chat template's file, as the worker's card has it."""
    parent: str = ""
    """The name of the model that a LoRA changes, of which it is a copy here under its own name. Empty means no LoRA."""
    lora: str = ""
    """The id of the LoRA that its name means. Empty means no LoRA."""
    characters_of_a_token: int | None = None
    """The largest number of characters of a text that become one token; None if there is no such number."""
    encodes_inline: bool = True
    """Whether a short text surely takes its tokenizer no longer than its length says."""

    @property
    def base(self) -> str:
        """The name by which routers and workers know it."""
        return self.parent or self.name


class ModelLimits(Struct, frozen=True):
    """The limits of a model: the least that any of its workers offers."""

    context_length: int
    vocab_size: int
    grammars: bool
    """Whether all workers support grammars."""
    biases: bool
    """Whether all workers support `logit_bias`."""
    embedding_size: int = 0
    """The count of numbers in an embedding; 0 if not all workers make embeddings of the same size."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What the model recommends, as the latest worker's card has it."""
    pooling: Pooling = ""
    """The pooling of embeddings; empty if it is not supported, or not the same for all workers."""
    min_tokens: bool = False
    """Whether all workers support `min_tokens`."""
    prompt_logprobs: bool = False
    """Whether all workers compute the log-probabilities of prompt tokens."""
    allowed_tokens: bool = False
    """Whether all workers support `allowed_token_ids`."""
    generates: bool = True
    """Whether all workers answer with text."""
    pictures: PictureOutput | None = None
    """What the model makes that makes pictures, as the latest worker's card has it; None if it makes none."""
    images: ImageInput | None = None
    """How images are prepared; None if not all workers take them, prepared in the same way."""


def model_limits(cards: Sequence[ModelCard]) -> ModelLimits:
    """Return the limits of a model; `cards` are those of its workers, at least one, the latest last."""
    sizes = {card.embedding_size for card in cards}
    poolings: set[Pooling] = {card.pooling for card in cards}
    return ModelLimits(
        min(card.context_length for card in cards),
        min(card.vocab_size for card in cards),
        all(card.grammars for card in cards),
        all(card.biases for card in cards),
        sizes.pop() if len(sizes) == 1 else 0,
        cards[-1].sampling,
        poolings.pop() if len(poolings) == 1 else "",
        all(card.min_tokens for card in cards),
        all(card.prompt_logprobs for card in cards),
        all(card.allowed_tokens for card in cards),
        all(card.generates for card in cards),
        cards[-1].pictures,
        cards[0].images if len({card.images for card in cards}) == 1 else None,
    )


def is_template_text_true(card: ModelCard) -> bool:
    """Tell whether the text of a card's chat template, if it has one, has the card's digest."""
    return not card.template_text or hashlib.sha256(card.template_text.encode()).hexdigest() == card.template_digest


def load_model(card: ModelCard, directory: Path, parsers: ParserNames = BY_TEMPLATE) -> Model:
    """Load a model from the files of its tokenizer and its templates. Blocks. Raise ModelError."""
    path = directory / "tokenizer.json"
    content = model_file.read_model_file(path, model_file.TOKENIZER_LIMIT_BYTES)
    digest = hashlib.sha256(content).hexdigest()
    if digest != card.tokenizer_digest:
        raise ModelError(f"{path}: SHA-256 {digest[:16]}… is not the workers' {card.tokenizer_digest[:16]}…")
    template, tool_template = _templates_of_card(directory, card)  # first, since it takes least
    file = parse_tokenizer_json(content)
    is_quick = try_tokenizer(content, file, digest)
    completed = complete_tokenizer(directory, content)
    if completed is not content:
        content, file = completed, parse_tokenizer_json(completed)
        is_quick = try_tokenizer(content, file)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except BaseException as wrong:  # noqa: BLE001  the package raises bare Exception, and panics, which are none
        raise ModelError(f"{path}: {wrong}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words, around = _read_words(tokenizer, file)
    token_bytes = read_token_bytes(file)
    source = "" if tool_template is None else tool_template.source
    if parsers.tools == "auto":
        tool_format = detect_format(source)
    else:
        tool_format = None if parsers.tools == "none" else parsers.tools
    thinks = parsers.reasoning == "think" or (parsers.reasoning == "auto" and detect_reasoning(source) is not None)
    marks = (*(FORMATS[tool_format].marks if tool_format else ()), *(reasoning.MARKS if thinks else ()))
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return Model(
        name=card.model,
        tokenizer=tokenizer,
        words=words,
        around=around,
        largest_token=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        token_bytes=token_bytes,
        template=template,
        tool_template=tool_template if tool_template is not None and "tools" in tool_template.reads else None,
        tool_format=tool_format,
        thinks=thinks,
        marked_token_bytes=token_bytes.showing(marks) if marks else token_bytes,
        marks={mark: added[mark] for mark in marks if mark in added},
        fim=_read_fim(tokenizer),
        tokenizer_digest=digest,
        block_size=card.block_size,
        template_digest=card.template_digest,
        characters_of_a_token=characters_of_a_token(file),
        encodes_inline=is_quick,
    )


def _read_words(tokenizer: Tokenizer, file: TokenizerJson) -> tuple[WordCache | None, tuple[bytes, bytes]]:
    """Return `Model.words` and `Model.around`."""
    bpe = tokenizer.model
    words = read_words(file, lambda word: [token.id for token in bpe.tokenize(word)], tokenizer.token_to_id)
    if words is None:
        return None, (b"", b"")
    around = {_around(tokenizer, words, probe) for probe in ("a", "b")}
    [found] = around if len(around) == 1 else [None]
    return (None, (b"", b"")) if found is None else (words, found)


def _read_fim(tokenizer: Tokenizer) -> FimTokens | None:
    try:
        return read_fim_tokens(
            tokenizer.token_to_id, lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids
        )
    except BaseException:  # noqa: BLE001  a tokenizer comes with the model, and may not know even these texts
        return None


def _around(tokenizer: Tokenizer, words: WordCache, probe: str) -> tuple[bytes, bytes] | None:
    """Return the tokens that the tokenizer puts before and after a text; None if it changes more than that."""
    try:
        alone, whole = tokenizer.encode(probe, add_special_tokens=False).ids, tokenizer.encode(probe).ids
    except BaseException:  # noqa: BLE001  a tokenizer comes with the model, and may not know even this text
        return None
    if not alone or list(words.encode(probe)) != [pack_tokens(alone)]:
        return None
    for start in range(len(whole) - len(alone) + 1):
        if whole[start : start + len(alone)] == alone:
            return pack_tokens(whole[:start]), pack_tokens(whole[start + len(alone) :])
    return None


def _templates_of_card(directory: Path, card: ModelCard) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    given = card.chat_template
    if not card.template_text and given and given not in NAMES and not Path(given).is_absolute():
        raise ModelError(f"chat template {given[:256]!r}: not a name, and the card's path is not absolute")
    if not is_template_text_true(card):
        raise ModelError(f"template_text: its SHA-256 is not template_digest, {card.template_digest[:16]!r}…")
    return read_templates(directory, given, text=card.template_text, digest=card.template_digest)


def read_templates(
    directory: Path, given: str, *, text: str = "", digest: str | None = None
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Return the template for requests without tools and that for requests with tools, mostly the same. `given` names
    the one that replaces the model's own, and `text` is its text if it is known; `digest`, if it is known, is that of
    its file. Raise ModelError."""
    if text:
        chat = tools = text
    else:
        found = templates.read_templates(directory, given)
        chat, tools = found.chat, found.tools
        if given and digest is not None and found.digest != digest:
            raise ModelError(f"{given}: SHA-256 {found.digest[:16]}… is not the workers' {digest[:16]}…")
    if not chat:
        return None, None
    named = read_named_tokens(directory)
    template = ChatTemplate(template_trial.try_template(chat, named), named)
    if tools == chat:
        return template, template
    return template, ChatTemplate(template_trial.try_template(tools, named), named)

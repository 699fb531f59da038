"""Merges the routers' explanations and renders them for `headrace explain`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deploy.local.table import age, table
from shared.messages.control import FoundNotes
from shared.messages.people import Explanation, Explanations
from shared.messages.select import Candidate

LATEST = 20
"""Number of decisions in the list of the latest ones."""


def merge(answers: Iterable[Explanations], *, latest: bool) -> list[Explanation]:
    """Return the decisions of all routers, oldest first: those of one request, whose attempts several routers may have
    routed, or only the `latest` of all requests."""
    found = sorted((one for answer in answers for one in answer.decisions), key=lambda one: -one.age_s)
    return found[-LATEST:] if latest else found


def render_candidates(decisions: Sequence[Explanation]) -> str:
    """Return the decisions of one request, each with a table of its candidates."""
    return "\n\n".join(map(_decision, decisions))


def _decision(one: Explanation) -> str:
    remote = any(row.overlap.remote for row in one.candidates)
    head = f"  INSTANCE  RANK  DEVICE  HOST  DISK  {'REMOTE  ' * remote}HELD  QUEUED  PREDICTED  SCORE  REASON"
    chosen = one.instance, one.rank
    rows = [_candidate(row, chosen=(row.instance, row.rank) == chosen, remote=remote) for row in one.candidates]
    lora = f" with the LoRA {one.lora}" if one.lora else ""
    return "\n".join(
        (
            f"request {one.request}, attempt {one.attempt}, {age(one.age_s)} ago",
            f"model {one.model}{lora}, chosen by router {one.router}: {one.reason}",
            *([f"trace {one.trace}"] if one.trace else []),
            "",
            table(head, rows),
            *_passed_over(one),
            "",
            f"cached tokens      {_cached(one)} of {one.prompt_tokens}",
            *([f"images             {one.images}, with {one.image_tokens} tokens"] if one.images else []),
            f"first token after  {_first_token(one)}",
            f"ended              {'not yet' if one.ended_s is None else f'{_seconds(one.ended_s)} after the choice'}",
        )
    )


def _passed_over(one: Explanation) -> list[str]:
    """Return the lines of the workers that could not be chosen."""
    lines = [f"{instance} was passed over: {why}" for instance, why in one.passed_over.items()]
    return ["", *lines] if lines else []


def _candidate(row: Candidate, *, chosen: bool, remote: bool) -> tuple[object, ...]:
    """Return a row of the table; overlap and held are in blocks, queued in tokens. Without `remote` the table has no
    such column."""
    found = row.overlap
    overlap = (found.device, found.host, found.disk, *([found.remote] if remote else []))
    load = (row.active_blocks, row.queued_tokens)
    predicted = _seconds(row.predicted_s) or "?"
    return ("*" if chosen else "", row.instance, row.rank, *overlap, *load, predicted, f"{row.score:.4g}", row.reason)


def _cached(one: Explanation) -> str:
    actual = "not reported yet" if one.actual_cached_tokens is None else f"{one.actual_cached_tokens} found"
    return f"{one.predicted_cached_tokens} predicted, {actual}"


def _first_token(one: Explanation) -> str:
    predicted = [row.predicted_s for row in one.candidates if (row.instance, row.rank) == (one.instance, one.rank)]
    said = f"{_seconds(predicted[0])} predicted, " if predicted and predicted[0] is not None else ""
    if one.first_token_s is not None:
        return f"{said}{_seconds(one.first_token_s)} as the client saw it"
    if one.actual_cached_tokens is not None:
        return f"{said}sent by an earlier attempt"
    return f"{said}not reported yet"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def render_notes(found: Sequence[FoundNotes]) -> str:
    """Return what happened to a request, as a table, oldest first."""
    notes = sorted(((note, one) for one in found for note in one.notes), key=lambda each: -each[0].age_s)
    rows = [(age(note.age_s), one.service, one.instance, note.attempt or "", note.text) for note, one in notes]
    return "\n".join(("what happened", "", table("AGO  SERVICE  INSTANCE  ATTEMPT  WHAT", rows)))


def render_block(found: Sequence[FoundNotes]) -> str:
    """Return where a block is, and what happened to it, oldest first."""
    places = [(one.service, one.instance, place) for one in found for place in one.places]
    parts = [table("SERVICE  INSTANCE  WHERE IT IS NOW", places)] if places else []
    if any(one.notes for one in found):
        parts.append(render_notes(found))
    return "\n\n".join(parts)


def render_list(decisions: Sequence[Explanation]) -> str:
    """Return the latest decisions of all requests, one line each."""
    head = "AGO  REQUEST  ATTEMPT  INSTANCE  PROMPT  PREDICTED  FOUND  FIRST TOKEN  ENDED  REASON"
    rows = []
    for one in decisions:
        tokens = (one.prompt_tokens, one.predicted_cached_tokens, one.actual_cached_tokens)
        times = (_seconds(one.first_token_s), _seconds(one.ended_s))
        rows.append((age(one.age_s), one.request, one.attempt, one.instance, *tokens, *times, one.reason))
    return table(head, rows)

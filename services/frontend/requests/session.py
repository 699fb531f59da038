"""One request from the choice of its first worker to its end: events in, actions out. Pure.

                   ┌─ RetryDue ─ WAITING ◀─ no choice, after a loss or while NATS is away
                   │                ▲
                   ▼                │
    start ──▶ CHOOSING ─────────────┘
                ▲  └── Selected ──▶ OFFERED ── Accepted, or its first part ──▶ STREAMING ── finished ──▶ ENDED
                │                      │                                          │
                └────── lost ──────────┴──────────────────────────────────────────┘

    STREAMING ── handed over: the prompt's worker has its first token ──▶ OFFERED to the worker that decodes
    CHOOSING ── the model takes turns: it has woken ──▶ CHOOSING, or it stays asleep ──▶ ENDED
    any state ── no choice, stop string, client gone, a limit of time, too many attempts ──▶ ENDED

A router may choose two workers: one computes the prompt, as attempt n, and the other decodes, as attempt n + 1, whose
load is reserved from the choice on. If either is lost, the request goes on with another choice.

A lost attempt is withdrawn and its reservation released. The next attempt continues after the tokens so far;
requests/retry.py decides how often.

Indices into the request's whole output:

    | received before      | new in this part
    0                      len(tokens) = the `first` that is due

docs/decisions/0010 gives the reasons.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import assert_never

from services.frontend.requests.actions import (
    Action,
    AnnounceAttempt,
    CountLoss,
    DispatchAttempt,
    EmitPromptLogprobs,
    EmitStep,
    EmitTokens,
    Fail,
    Finish,
    HandOver,
    ImagesApart,
    PublishLoad,
    RetryLater,
    SelectWorker,
    WithdrawAttempt,
)
from services.frontend.requests.events import (
    Answer,
    AnswerMissed,
    AttemptLost,
    ClientLeft,
    Event,
    InstanceGone,
    PartReceived,
    RetryDue,
    StopFound,
    TimeExpired,
    TurnWaited,
    Unreachable,
    Unrouted,
    Unsendable,
)
from services.frontend.requests.prompt_logprobs import DuePromptLogprobs
from services.frontend.requests.retry import Loss, RetryBudget
from shared.errors import HeadraceError, InvalidRequest, NotFinite, Overloaded, RequestTimeout, Unavailable
from shared.hashing import unpack_tokens
from shared.messages.frames import BLOCKED, NOT_BEGUN, NOT_FINITE, SHUTTING_DOWN, UNFOLLOWABLE, Part
from shared.messages.generate import Accepted, Refused
from shared.messages.select import Finished, Prefilled, Selected, SelectRefused

FILE_BYTES = 256 << 20
"""The most bytes of the file of a picture or a video."""
RETRY_MOST_S = 60.0
"""The longest Retry-After, in seconds, of a request whose worker had no room for it in time."""


class State(Enum):
    CHOOSING = "choosing"
    WAITING = "waiting"
    OFFERED = "offered"
    STREAMING = "streaming"
    ENDED = "ended"


class Session:
    """The state machine of one request."""

    def __init__(
        self,
        request: str,
        max_tokens: int,
        tries: RetryBudget | None = None,
        *,
        embedding_bytes: int = 0,
        grammar_param: str = "",
        wait_s: float = 0.0,
        prompt_logprobs: int = 0,
        makes_picture: bool = False,
    ) -> None:
        """Create a session.

        `embedding_bytes`: the size of the embedding if one is asked for; such an answer has no tokens.
        `grammar_param`: the field of the body that the grammar comes from.
        `wait_s`: the seconds that a request without a lost attempt may wait in workers' queues. 0 means until its
        deadline. `prompt_logprobs`: the prompt tokens whose log-probabilities must come before the first token. 0 if
        none must. `makes_picture`: the answer is the file of a picture, and has no tokens.
        """
        self._wait_s = wait_s
        self._grammar_param = grammar_param
        self._retries = RetryBudget() if tries is None else tries
        self._embedding_bytes = embedding_bytes
        self._makes_picture = makes_picture
        self._file_bytes = 0
        """How much this attempt has brought of the picture's file."""
        self.request = request
        self.max_tokens = max_tokens
        self.state = State.CHOOSING
        self.attempt = 0
        self.instance = ""
        """The worker that has the attempt; empty unless OFFERED or STREAMING."""
        self.tokens = array("I")
        """The output so far, of all attempts."""
        self.cached_tokens = self.cached_host_tokens = self.cached_disk_tokens = 0
        """The cached prompt tokens that the first attempt with a token reported: all, in host memory, on disk."""
        self.prompt_logprobs = DuePromptLogprobs(prompt_logprobs)
        self.prefilled = False
        """Whether this attempt has brought a token."""
        self._decoder: tuple[str, int] | None = None
        """The (instance, rank) that decodes after this attempt, as the attempt after it. None if this attempt
        decodes."""
        self._prefill_only = False
        """Whether this attempt ends with its first token."""
        self._last_attempt = 0
        """The highest number of an attempt for which a router has, or may have, a reservation."""
        self._answer_missed = False
        """Whether a router's answer about this attempt was lost. If it named two workers, routers have a reservation
        for the next attempt's number."""
        self._no_choice: HeadraceError | None = None
        """The error of the last choice that found no worker."""

    def start(self) -> list[Action]:
        """Ask for the first worker."""
        assert self.attempt == 0, "started twice"
        return self._next()

    def is_choosing(self, attempt: int) -> bool:
        """Return whether this attempt still waits for a choice."""
        return self.state is State.CHOOSING and attempt == self.attempt

    def is_offered(self, attempt: int) -> bool:
        """Return whether this attempt has a worker that has not answered."""
        return self.state is State.OFFERED and attempt == self.attempt

    def on(self, event: Event) -> list[Action]:
        """Apply an event and return the actions that follow. Events of other attempts change nothing."""
        match event:
            case PartReceived():
                return self._on_part(event.instance, event.part)
            case Selected():
                return self._on_selected(event)
            case ClientLeft():
                return self._end([])
            case StopFound():
                return self._end([Finish("stop")])
            case TimeExpired():
                late = "the request's deadline has passed" if event.limit == "deadline" else "no token came in time"
                return self._end([Fail(RequestTimeout(self._retries.error_text(late)))])
            case InstanceGone():
                gone = bool(self.instance) and self.instance == event.instance
                if not gone and self._decoder is not None and self._decoder[0] == event.instance:
                    return self._drop_decoder(withdraw=False)
                return self._attempt_lost("gone", "the worker is gone") if gone else []
            case AttemptLost():
                lost = self.state is State.STREAMING and event.attempt == self.attempt
                return self._attempt_lost(event.loss, event.reason) if lost else []
            case AnswerMissed():
                self._answer_missed |= self.is_choosing(event.attempt)
                return []
            case TurnWaited():
                return self._on_turn(event.failed) if self.is_choosing(event.attempt) else []
            case RetryDue():
                waited = self.state is State.WAITING and event.attempt == self.attempt
                return self._on_again(event.now_s) if waited else []
            case SelectRefused() | Unrouted() | Accepted() | Refused() | Unreachable() | Unsendable():
                return self._on_answer(event) if event.attempt == self.attempt else []
            case _:
                assert_never(event)

    def next_token(self, instance: str, part: Part) -> int:
        """Apply a part that only continues the stream by one token, and return that token.

        For any other part return -1 and change nothing: `on` must see it. Nearly all parts continue by one token, for
        which `on` would return EmitTokens([token], None). This method takes 0.3 µs instead of 1.4.
        """
        if (
            part.first != len(self.tokens)
            or part.finish is not None
            or part.attempt != self.attempt
            or instance != self.instance
            or not self.prefilled
            or part.logprobs is not None
            or len(part.tokens) != 4
            or part.first >= self.max_tokens
        ):
            return -1
        token = int.from_bytes(part.tokens, "little")
        self.tokens.append(token)
        return token

    def _on_selected(self, choice: Selected) -> list[Action]:
        if self.state is not State.CHOOSING or choice.attempt != self.attempt:
            # The answer came too late, or twice. The reservation of a live attempt ends with that attempt.
            live = self.state is not State.ENDED and choice.attempt == self.attempt
            if live:
                return self._give_back_decoder(choice)
            reserved = [choice.attempt, choice.attempt + 1] if choice.decode else [choice.attempt]
            used = -1 if self.state is State.ENDED else self.attempt
            return [PublishLoad(Finished(self.request, attempt)) for attempt in reserved if attempt != used]
        self.state = State.OFFERED
        self.instance = choice.instance
        self._prefill_only = bool(choice.decode)
        if choice.decode:
            self._decoder = choice.decode, choice.decode_rank
            self._last_attempt = self.attempt + 1
        first_try = not (self.tokens or self._retries.may_wait)
        wait_s = self._wait_s if first_try else 0.0
        images = ImagesApart(choice.encode, choice.encode_images, choice.encode_wait_s) if choice.encode else None
        actions: list[Action] = [
            DispatchAttempt(
                self.attempt, choice.instance, choice.rank, wait_s, prefill_only=self._prefill_only, images=images
            )
        ]
        if choice.decode:
            actions.append(AnnounceAttempt(self._last_attempt, choice.decode, choice.decode_rank, choice.instance))
        return actions

    def _on_turn(self, failed: str) -> list[Action]:
        if failed:
            return self._end([Fail(Unavailable(self._retries.error_text(failed)))])
        self._retries.turn_came()
        return self._ask()

    def _on_answer(self, answer: Answer) -> list[Action]:
        match answer:
            case SelectRefused() | Unrouted():
                if self.state is not State.CHOOSING:
                    return []
                return self._on_no_choice(answer)
            case _ if self.state is not State.OFFERED:
                return []  # its parts were faster than the answer, or it is over
            case Accepted():
                self.state = State.STREAMING
                return []
            case Refused(code="bad_request"):
                return self._end([Fail(InvalidRequest(f"the worker refused: {answer.reason}"))], withdraw=False)
            case Refused():
                overloaded = answer.code == "overloaded"
                return self._attempt_lost("refused", f"refused: {answer.reason}", withdraw=False, overloaded=overloaded)
            case Unreachable():
                return self._attempt_lost("unreachable", f"the worker did not answer: {answer.reason}")
            case Unsendable():
                return self._end([Fail(InvalidRequest(f"the request cannot be sent: {answer.reason}"))], withdraw=False)
            case _:
                assert_never(answer)

    def _on_part(self, instance: str, part: Part) -> list[Action]:
        if part.attempt != self.attempt or not self.instance or instance != self.instance:
            # An attempt that is over still runs, perhaps at a worker that was frozen.
            return [] if part.finish else [WithdrawAttempt(instance, part.attempt)]
        if not self._is_sound(part):
            return self._attempt_lost("senseless", "the worker's stream is inconsistent")
        if part.first > len(self.tokens):
            return self._attempt_lost("gap", "a part of the stream was lost")
        known = len(self.tokens) - part.first
        new = unpack_tokens(part.tokens)[known:]
        actions: list[Action] = []
        if part.prompt_logprobs is not None and (given := self.prompt_logprobs.receive(part.prompt_logprobs)):
            actions.append(EmitPromptLogprobs(given))
        if self.prompt_logprobs.lacks(part):
            return actions + self._attempt_lost("gap", "log-probabilities of the prompt were lost")
        if part.picture is not None:
            piece = part.picture
            if piece.first != self._file_bytes or piece.first + len(piece.content) > FILE_BYTES:
                return actions + self._attempt_lost("gap", "a piece of the picture was lost, or it is too large")
            self._file_bytes += len(piece.content)
            actions.append(EmitStep(piece.step, piece.preview, piece.first, piece.content))
        self.state = State.STREAMING
        if new:
            actions += self._receive(new, part, known)
        return actions if part.finish is None else actions + self._on_finish(part, new)

    def _on_finish(self, part: Part, new: list[int]) -> list[Action]:
        """Handle the last part of an attempt, which brought `new` tokens."""
        match part.finish:
            case "stop" | "length":
                prefilled = self._prefill(part) if part.embedding or part.picture is not None else []
                ends = bool(new) and part.finish == "stop"
                logprob = part.logprobs[-1] if ends and part.logprobs is not None else None
                last = Finish(part.finish, part.embedding, new[-1] if ends else None, logprob)
                return prefilled + self._end([last], withdraw=False)
            case "deadline":
                late = RequestTimeout(self._retries.error_text("the request's deadline has passed"))
                return self._end([Fail(late)], withdraw=False)
            case "handed_over":
                if not (self._prefill_only and self.prefilled):
                    return self._attempt_lost("senseless", "it handed over what it must not", withdraw=False)
                return self._hand_over()
            case "cancelled":  # not at our request
                return self._attempt_lost(
                    "handed_back", "the worker assumed that this frontend was gone", withdraw=False
                )
            case "error" if part.error == SHUTTING_DOWN:
                return self._attempt_lost("handed_back", part.error, withdraw=False)
            case "error" if part.error.startswith(NOT_BEGUN):
                return self._on_not_begun(part.error)
            case "error" if part.error.startswith(UNFOLLOWABLE):
                wrong = InvalidRequest(f"{self._grammar_param}: {part.error}", param=self._grammar_param)
                return self._end([Fail(wrong)], withdraw=False)
            case "error" if part.error.startswith(NOT_FINITE):
                return self._end([Fail(NotFinite(part.error))], withdraw=False)
            case "error" if part.error.startswith(BLOCKED):
                blocked = InvalidRequest(part.error, param="prompt", code="content_policy_violation")
                return self._end([Fail(blocked)], withdraw=False)
            case "error":
                return self._attempt_lost("failed", f"the worker failed: {part.error}", withdraw=False)
            case None:
                raise AssertionError("no last part")
            case _:
                assert_never(part.finish)

    def _on_not_begun(self, why: str) -> list[Action]:
        """Handle an attempt that its worker did not begin in time."""
        if self.tokens:
            return self._attempt_lost("handed_back", why, withdraw=False)
        retry_after_s = min(self._wait_s, RETRY_MOST_S)  # the queue was at least as long
        return self._end([Fail(Overloaded(self._retries.error_text(why), retry_after_s=retry_after_s))], withdraw=False)

    def _is_sound(self, part: Part) -> bool:
        """Return whether the part agrees with itself and with the request, so that reading it cannot fail."""
        count, rest = divmod(len(part.tokens), 4)
        embedding_bytes = self._embedding_bytes if part.finish in ("stop", "length") else 0
        most_tokens = 0 if self._embedding_bytes or self._makes_picture else self.max_tokens
        if (part.picture is not None) != self._makes_picture and (part.picture or part.finish in ("stop", "length")):
            return False
        if rest or part.first < 0 or part.first + count > most_tokens or len(part.embedding) != embedding_bytes:
            return False
        if part.prompt_logprobs is not None and not self.prompt_logprobs.is_sound(part.prompt_logprobs):
            return False
        if part.logprobs is None:
            return True
        return len(part.logprobs) == count and all(
            len(one.top_tokens) == 4 * len(one.top_logprobs) for one in part.logprobs
        )

    def _prefill(self, part: Part) -> list[Action]:
        """Handle the first part of the attempt that brings a token or an embedding."""
        self.prefilled = True
        self._retries.token_received()
        if not self.tokens:
            self.cached_tokens = part.cached_tokens
            self.cached_host_tokens = part.cached_host_tokens
            self.cached_disk_tokens = part.cached_disk_tokens
        prefilled = Prefilled(
            self.request,
            self.attempt,
            part.cached_tokens,
            instance=self.instance,
            cached_host_tokens=part.cached_host_tokens,
            cached_disk_tokens=part.cached_disk_tokens,
        )
        return [PublishLoad(prefilled)]

    def _receive(self, new: list[int], part: Part, known: int) -> list[Action]:
        actions = [] if self.prefilled else self._prefill(part)
        self.tokens.extend(new)
        shown = new[:-1] if part.finish == "stop" else new
        if shown:
            logprobs = None if part.logprobs is None else part.logprobs[known : known + len(shown)]
            actions.append(EmitTokens(shown, logprobs))
        return actions

    def _hand_over(self) -> list[Action]:
        """Go on where the prompt's blocks are handed over to; if that worker is gone, with another choice."""
        decoder, self._decoder = self._decoder, None
        actions = self._leave(withdraw=False)
        if decoder is None:
            return actions + self._next()
        ended, self.attempt = self.attempt, self._last_attempt
        self._retries.attempt_started()
        self.state = State.OFFERED
        self.instance, rank = decoder
        return [*actions, HandOver(ended, self.instance), DispatchAttempt(self.attempt, self.instance, rank)]

    def _give_back_decoder(self, repeated: Selected) -> list[Action]:
        """Release the worker that decodes by another answer to the question of this attempt, unless this attempt has
        one itself. No later attempt has its number."""
        if not repeated.decode or self._decoder is not None:
            return []
        self._last_attempt = max(self._last_attempt, self.attempt + 1)
        return [PublishLoad(Finished(self.request, self.attempt + 1))]

    def _drop_decoder(self, *, withdraw: bool) -> list[Action]:
        """Give up the worker that was to decode. It has nothing of the request but the advice to load blocks."""
        if self._decoder is None:
            return []
        instance, self._decoder = self._decoder[0], None
        withdrawn: list[Action] = [WithdrawAttempt(instance, self._last_attempt)] if withdraw else []
        return [*withdrawn, PublishLoad(Finished(self.request, self._last_attempt))]

    def _attempt_lost(self, loss: Loss, why: str, *, withdraw: bool = True, overloaded: bool = False) -> list[Action]:
        """Go on after a lost attempt: with the next one, or to the end."""
        counted: list[Action] = [CountLoss(loss, self.prefilled, self.attempt, why)]
        refusal = self._retries.attempt_failed(loss, self.attempt, self.instance, why, overloaded=overloaded)
        if len(self.tokens) >= self.max_tokens:
            return counted + self._end([Finish("length")], withdraw=withdraw)  # only the finish reason was lost
        if refusal:
            return counted + self._end([Fail(Unavailable(refusal))], withdraw=withdraw)
        return counted + self._leave(withdraw) + self._next()

    def _next(self) -> list[Action]:
        self.attempt = self._last_attempt = self._last_attempt + 1
        self._answer_missed = False
        self._file_bytes = 0
        self._retries.attempt_started()
        return self._ask()

    def _ask(self) -> list[Action]:
        self.state = State.CHOOSING
        return [SelectWorker(self.attempt, len(self.tokens), tuple(self._retries.excluded))]

    def _on_no_choice(self, answer: SelectRefused | Unrouted) -> list[Action]:
        """Wait, or end. The next question has the same attempt number, because nothing was reserved for it."""
        self.state = State.WAITING
        if isinstance(answer, Unrouted):
            self._answer_missed = True
            self._retries.may_wait |= answer.away
            why = Unavailable(self._retries.error_text(answer.reason))
        elif answer.code == "bad_request":
            return self._end([Fail(InvalidRequest(f"the router refused: {answer.reason}"))])
        else:
            kind = Overloaded if answer.code == "overloaded" else Unavailable
            reason = self._retries.error_text(f"no worker can take the request: {answer.reason}")
            why = kind(reason, retry_after_s=answer.retry_after_s)
        if not self._retries.may_wait:
            return self._end([Fail(why)])
        if isinstance(answer, SelectRefused) and answer.code == "all_excluded":
            self._retries.excluded.clear()
        self._no_choice = why
        return [RetryLater(self.attempt, self._retries.pause_s, answer.reason)]

    def _on_again(self, now_s: float) -> list[Action]:
        if self._retries.pause_ended(now_s):
            return self._ask()
        assert self._no_choice is not None, "it waited because no worker could be chosen"
        return self._end([Fail(self._no_choice)])

    def _leave(self, withdraw: bool) -> list[Action]:
        """Leave the attempt: free what it holds at the worker and at the routers."""
        leaving: list[Action] = [WithdrawAttempt(self.instance, self.attempt)] if withdraw and self.instance else []
        self.instance = ""
        self.prefilled = self._prefill_only = False
        leaving += [PublishLoad(Finished(self.request, self.attempt)), *self._drop_decoder(withdraw=True)]
        if self._answer_missed and self._last_attempt == self.attempt:
            self._last_attempt += 1
            leaving.append(PublishLoad(Finished(self.request, self._last_attempt)))
        return leaving

    def _end(self, last: list[Action], *, withdraw: bool = True) -> list[Action]:
        if self.state is State.ENDED:
            return []
        self._answer_missed |= self.state is State.CHOOSING  # an answer that comes is too late
        self.state = State.ENDED
        return self._leave(withdraw) + last

    def validate(self) -> None:
        """Assert the invariants."""
        assert bool(self.instance) == (self.state in (State.OFFERED, State.STREAMING))
        self._retries.validate()
        assert self.state is not State.WAITING or (self._retries.may_wait and self._no_choice is not None)
        assert not self.prefilled or (self.state is State.STREAMING and self.tokens)
        assert len(self.tokens) <= self.max_tokens
        self.prompt_logprobs.validate()
        assert not (self.prompt_logprobs.due and self.tokens)
        assert self._decoder is None or (
            self._prefill_only and self.instance and self._last_attempt == self.attempt + 1
        )
        assert self._last_attempt >= self.attempt

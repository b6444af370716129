"""The arms: one question about one value of a field, laid out in several ways.

    prefix, 0 %       [header, field: V]  [policy]                             [question]
    prefix, p %       [header]  [policy ... field: V ... policy]               [question]
    hoist             [header]  [policy, field: V]                             [question]
    late system       [header]  [policy]  [field: V]                           [question]
    erratum           [header, field: old]  [policy]  [erratum: V]             [question]
    no change         [header, field: old]  [policy]                           [question]
    splice            as prefix, 0 %; the policy is a compiled segment
    refresh+erratum   [header, field: V]  [policy, its notes of the old value]  [erratum: V]  ...

Every request has a value and a question that no other has. Owns the questions, the layouts, and
how many tokens of them a prefix cache can serve. Knows no server.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvnotes.bench.text import HEADER
from kvnotes.errors import PlanError
from kvnotes.plan import DEFAULT_NUM_SEAM_TOKENS
from kvnotes.prompt import ErratumStyle, Message, PromptTemplate, PromptTokenizer, SegmentText
from kvnotes.prompt.slots import escape

FIELD = "order_status"

OLD = "shipped since 07:59:59"
"""The value before the change; no request has it."""

STATUSES = ("pending", "delivered", "cancelled")

MIN_QUESTION_TOKENS = 32

EPIC_TOKENS = 16
"""Recomputed tokens of each segment, as EPIC (LegoLink) recommends."""

Layout = Literal["prefix", "hoist", "late", "erratum", "same", "refresh+erratum"]

SegmentKind = Literal["", "alone", "behind old"]
"""Whether the policy is a compiled segment, and what it was compiled behind."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A value, and a question about it that has a right answer.

    Args:
        value: The field's value.
        question: What the customer writes.
        cue: How the reply begins, so that its next word is the answer.
        choices: The answers that are compared.
        right: Index of the right one.
        kind: Whether the field is read, or a rule about it applied.
    """

    value: str
    question: str
    cue: str
    choices: tuple[str, ...]
    right: int
    kind: Literal["status", "rule"]


_NAMES = ("Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_THINGS = ("a lamp", "two chairs", "a kettle", "a bicycle", "three books", "a winter coat")
_RULES = (
    (
        "Please cancel it. Orders can be cancelled only while their status is pending. Can mine "
        "be cancelled now? Answer yes or no.",
        "pending",
    ),
    (
        "I want to send it back. Orders can be returned only when their status is delivered. Can "
        "mine be returned now? Answer yes or no.",
        "delivered",
    ),
)
_FIRST_SECOND, _STEP_SECONDS = 8 * 3600, 7
_READ = "Please look it up for me: what is the status of this order now?"
_READ_CUE = "The status of the order is"
_RULE_CUE = "The answer is"
_YES_NO = ("yes", "no")


def make_ask(index: int) -> Ask:
    """Return a value and a question; each index has another one of both."""
    rng = random.Random(index)
    status = rng.choice(STATUSES)
    minutes, second = divmod(_FIRST_SECOND + index * _STEP_SECONDS, 60)
    value = f"{status} since {minutes // 60:02}:{minutes % 60:02}:{second:02}"
    start = (
        f"Hello, my name is {rng.choice(_NAMES)}, I have ordered {rng.choice(_THINGS)} from you, "
        f"and my order number is #W{100_000 + index * 37}. "
    )
    if index % 2:
        rule, allowed = rng.choice(_RULES)
        return Ask(value, start + rule, _RULE_CUE, _YES_NO, int(status != allowed), "rule")
    words = (*STATUSES, OLD.split()[0])
    return Ask(value, start + _READ, _READ_CUE, words, words.index(status), "status")


@dataclass(frozen=True, slots=True)
class Fork:
    """Where the answers to a question part.

    Args:
        token_ids: With what all of them begin: the cue.
        choices: The next token of each.
    """

    token_ids: tuple[int, ...]
    choices: tuple[int, ...]


def fork_of(tokenizer: PromptTokenizer, ask: Ask) -> Fork:
    """Return where the answers to a question part.

    Raises:
        PlanError: Two of them go on alike: which is meant cannot be told by one token.
    """
    for quote in ("", '"'):  # behind a quote a tokenizer begins with the word's own letter
        given = [tokenizer.encode(f"{ask.cue} {quote}{choice}") for choice in ask.choices]
        same = 0
        while all(len(ids) > same for ids in given) and len({ids[same] for ids in given}) == 1:
            same += 1
        found = tuple(ids[same] for ids in given if len(ids) > same)
        if len(set(found)) == len(ask.choices):
            return Fork(given[0][:same], found)
    raise PlanError(
        f"with this tokenizer two of the answers {', '.join(ask.choices)} begin alike",
        hint="use another model",
    )


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to tell the model of a changed value.

    Args:
        name: What tables call it.
        layout: How its prompts are laid out.
        place: Where the field stands in the policy, in percent; 0 is before it.
        segment: Whether the policy is a compiled segment.
        num_seam_tokens: Tokens recomputed at the splice.
    """

    name: str
    layout: Layout
    place: int = 0
    segment: SegmentKind = ""
    num_seam_tokens: int = 0

    @property
    def swept(self) -> bool:
        """Whether it only says how the place matters: measured at saturation alone."""
        return self.place > 0


REFERENCE = Arm("prefix, 0 %", "prefix")
"""Its prompts are what a clean prefill reads: their decisions judge all others."""


def stock_arms(places: Iterable[int]) -> list[Arm]:
    """Return the arms that any server takes.

    Args:
        places: Where the field stands in the policy, in percent.
    """
    swept = [Arm(f"prefix, {p} %", "prefix", p) for p in sorted(set(places)) if p]
    return [
        REFERENCE,
        *swept,
        Arm("hoist", "hoist"),
        Arm("late system", "late"),
        Arm("erratum", "erratum"),
        Arm("no change", "same"),
    ]


def plugin_arms() -> list[Arm]:
    """Return the arms for which the server needs the plug-in."""
    return [
        Arm("splice", "prefix", 0, "alone", DEFAULT_NUM_SEAM_TOKENS),
        Arm(f"splice, EPIC {EPIC_TOKENS}", "prefix", 0, "alone", EPIC_TOKENS),
        Arm("refresh+erratum", "refresh+erratum", 0, "behind old", 0),
    ]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request.

    Args:
        token_ids: All of them.
        start: Where the policy stands; it is one message, header and end token included.
        stop: The position after it.
    """

    token_ids: tuple[int, ...]
    start: int
    stop: int


class Prompts:
    """Makes prompts over one policy.

    Args:
        tokenizer: Tokenizer and chat template of the model.
        text: The policy, or a longer text that begins with it.
        num_tokens: Tokens of the policy.

    Raises:
        PlanError: The text is shorter.
    """

    def __init__(self, tokenizer: PromptTokenizer, text: str, num_tokens: int) -> None:
        ids = tokenizer.encode(text)
        if len(ids) < num_tokens:
            raise PlanError(
                f"a policy of {num_tokens} tokens is asked for, the text has {len(ids)}",
                hint="give more or longer texts with --text, or shorter --lengths",
            )
        self.num_tokens = num_tokens
        self._tokenizer = tokenizer
        self._policy = tokenizer.decode(ids[:num_tokens])
        self._field = f"{FIELD}: {{{{{FIELD}}}}}"
        self._style = ErratumStyle()

    def prompt(self, arm: Arm, ask: Ask) -> Prompt:
        """Return the prompt of a request."""
        value = OLD if arm.layout == "same" else ask.value
        template = self._template(arm, ask)
        values = {FIELD: value}
        rendered = template.render(values, self._tokenizer, add_generation_prompt=True)
        policy = rendered.segments[0]
        return Prompt(rendered.token_ids, policy.start, policy.stop)

    def behind_old(self) -> Prompt:
        """Return what ends in the policy and shows the old value before it."""
        messages = self._head(shown=True, pinned=False)
        template = PromptTemplate.chat(messages, [SegmentText("policy", escape(self._policy))])
        rendered = template.render({FIELD: OLD}, self._tokenizer)
        policy = rendered.segments[0]
        return Prompt(rendered.token_ids[: policy.stop], policy.start, policy.stop)

    def question_tokens(self, ask: Ask) -> int:
        """Return how many tokens a question has."""
        return len(self._tokenizer.encode_untrusted(self._long_enough(ask.question)))

    def _head(self, *, shown: bool, pinned: bool) -> list[Message]:
        """Return header and policy.

        Args:
            shown: Whether the header shows the field.
            pinned: Whether it shows the old value, whatever the field's is.
        """
        header = HEADER.strip() + (f"\n\n{self._field}" if shown else "")
        pins = ((FIELD, OLD),) if pinned else ()
        return [Message("system", header, pinned=pins), Message("system", segment="policy")]

    def _template(self, arm: Arm, ask: Ask) -> PromptTemplate:
        layout, policy = arm.layout, escape(self._policy)
        shown = layout in ("erratum", "same", "refresh+erratum")
        shown = shown or (layout == "prefix" and not arm.place)
        messages = self._head(shown=shown, pinned=layout == "erratum")
        if layout == "prefix" and arm.place:
            policy = self._with_field(arm.place)
        elif layout == "hoist":
            policy += f"\n\n{self._field}"
        elif layout == "late":
            messages.append(Message("system", self._field))
        elif layout in ("erratum", "refresh+erratum"):
            messages.append(self._style.message(FIELD, revision=1, id="erratum"))
        messages.append(Message("user", self._long_enough(ask.question)))
        return PromptTemplate.chat(messages, [SegmentText("policy", policy)])

    def _with_field(self, place: int) -> str:
        """Return the policy with the field's line behind so many percent of its tokens."""
        ids = self._tokenizer.encode(self._policy)
        before = self._tokenizer.decode(ids[: len(ids) * place // 100])
        cut = self._policy.find("\n", len(before))
        cut = len(before) if cut < 0 else cut
        head, tail = escape(self._policy[:cut]), escape(self._policy[cut:])
        return f"{head}\n\n{self._field}\n{tail}"

    def _long_enough(self, question: str) -> str:
        while len(self._tokenizer.encode_untrusted(question)) < MIN_QUESTION_TOKENS:
            question = f"Thank you for your help. {question}"
        return question


def common_prefix(prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Return the tokens with which all prompts begin."""
    first, last = min(p.token_ids for p in prompts), max(p.token_ids for p in prompts)
    number = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:number]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a server can leave out, at most.

    Args:
        cached: Tokens that a prefix cache serves.
        loaded: Tokens of a segment behind them.
        total: Tokens of the prompts.
    """

    cached: int
    loaded: int
    total: int


def ceiling(
    arm: Arm, prompts: Sequence[Prompt], primed: Sequence[Sequence[int]], block_size: int
) -> Ceiling:
    """Return how many tokens need not be computed, from their numbers alone.

    A cache of whole blocks that forgets nothing: each block is named by its tokens and all before
    it, and the last token of a prompt is always computed. From the block on in which a segment
    begins, K/V are kept for the same plan alone, and no other request has it.

    Args:
        arm: The arm.
        prompts: Its requests, in the order in which they come.
        primed: What the server has computed before.
        block_size: Tokens of a block.
    """
    seen: set[tuple[int, tuple[int, ...]]] = set()
    names: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(ids: Sequence[int], stop: int) -> Iterable[tuple[int, tuple[int, ...]]]:
        before = 0
        for start in range(0, stop // block_size * block_size, block_size):
            key = (before, tuple(ids[start : start + block_size]))
            before = names.setdefault(key, len(names) + 1)
            yield key

    for ids in primed:
        seen.update(chain(ids, len(ids)))
    cached = loaded = 0
    for prompt in prompts:
        ids, start = prompt.token_ids, prompt.start + arm.num_seam_tokens
        here = 0
        for key in chain(ids, min(len(ids) - 1, start) if arm.segment else len(ids) - 1):
            if key not in seen:
                break
            here += block_size
        cached += here
        if arm.segment:
            loaded += min(prompt.stop, len(ids) - 1) - start
        seen.update(chain(ids, start if arm.segment else len(ids)))
    return Ceiling(cached, loaded, sum(len(prompt.token_ids) for prompt in prompts))

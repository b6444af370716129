"""Answers: scored choices, generated text, stop strings, streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvnotes.engine.base import Execution, SamplingParams, Stopwatch
from kvnotes.engine.exchange import Exchange
from kvnotes.errors import PlanError
from kvnotes.prompt import Message
from kvnotes.segment import KVCache
from kvnotes.session.loaded import Model
from kvnotes.session.report import Decision, Turn


def told(turn: Turn, exchange: Exchange | None, watch: Stopwatch) -> Turn:
    """Return a turn with what a server has said about it; as it is, where there is no server."""
    if exchange is None or exchange.served is None:
        return turn
    served = exchange.served
    return replace(
        turn,
        served=served,
        ttft_ms=max(turn.ttft_ms or 0.0, watch.ms_at(exchange.told_at)),
        fallback_reason=turn.fallback_reason or served.fallback_reason or None,
        notices=(*turn.notices, *served.notes),
    )


def decide(model: Model, execution: Execution, choices: Sequence[str]) -> Decision:
    """Score choices as the assistant's next words.

    Where one choice's tokens begin another's, an end token is scored with every choice.

    Raises:
        PlanError: Fewer than two choices, an empty one, or the same one twice.
    """
    encoded = encode_choices(model, choices)
    scores = model.engine.score(execution, encoded)
    by_name = dict(zip(choices, scores, strict=True))
    return Decision(by_name, max(by_name, key=lambda name: by_name[name]))


def encode_choices(model: Model, choices: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the tokens of each choice, with an end token where one begins another."""
    if len(choices) < 2 or len(set(choices)) != len(choices) or not all(choices):
        raise PlanError(
            f"choices {list(choices)!r} are no choice", hint="give at least two different texts"
        )
    encoded = [model.tokenizer.encode(choice) for choice in choices]
    begins = any(
        i != j and b[: len(a)] == a for i, a in enumerate(encoded) for j, b in enumerate(encoded)
    )
    if begins:
        end = min(model.tokenizer.eos_ids, default=None)
        if end is None:
            raise PlanError(
                f"one of the choices {list(choices)!r} begins another, and the tokenizer has no "
                "end token",
                hint="make the choices differ in their first words",
            )
        encoded = [(*ids, end) for ids in encoded]
    return encoded


class Reply:
    """A generated message: iterate it for text, then read `message` and `cache`.

    Its tokens come from its own stream, or from whoever generates several at once.
    """

    def __init__(self, model: Model, execution: Execution, params: SamplingParams) -> None:
        self._eos_ids = model.tokenizer.eos_ids
        self._model = model
        self._params = params
        self._decoder = model.tokenizer.stream()
        self._text = ""
        self._num_given = 0
        self._is_cut = False
        self.stream = model.engine.generate(execution, params, self._eos_ids)

    @property
    def text(self) -> str:
        """What was generated so far."""
        return self._text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens, the end token included."""
        return self.stream.token_ids

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and the tokens fed back so far."""
        return self.stream.cache

    def __iter__(self) -> Iterator[str]:
        for token_id in self.stream:
            if piece := self.push(token_id):
                yield piece
        if piece := self.finish():
            yield piece

    def close(self) -> None:
        """Stop here: no further token is generated for it."""
        self.stream.close()

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that no stop string can take back any more.

        A stop string closes the stream.
        """
        if token_id in self._eos_ids or self._is_cut:
            return ""
        self._text += self._decoder.push(token_id)
        if self._cut():
            return self._given(len(self._text))
        longest = max((len(stop) for stop in self._params.stop), default=1)
        return self._given(len(self._text) - longest + 1)

    def finish(self) -> str:
        """Return the rest of the text, when no token comes any more."""
        if not self._is_cut:
            self._text += self._decoder.finish()
            self._cut()
        return self._given(len(self._text))

    def message(self, message_id: str) -> Message:
        """Return the message as generated; its ids are authoritative unless text was cut."""
        ids = self.token_ids
        decoder = self._model.tokenizer.stream()
        text = "".join(decoder.push(i) for i in ids if i not in self._eos_ids)
        text += decoder.finish()
        whole = text == self._text
        return Message(
            "assistant",
            self._text,
            id=message_id,
            trusted=False,
            generated_ids=ids if whole else None,
        )

    def _given(self, stop: int) -> str:
        piece = self._text[self._num_given : stop]
        self._num_given = max(stop, self._num_given)
        return piece

    def _cut(self) -> bool:
        """End the text where the first stop string begins, if one has appeared."""
        found = [self._text.find(stop) for stop in self._params.stop if stop in self._text]
        if found:
            self._text, self._is_cut = self._text[: min(found)], True
            self.stream.close()
        return bool(found)

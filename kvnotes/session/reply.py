"""Answers: scored choices, generated text, stop strings, streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvnotes.engine.base import Execution, SamplingParams
from kvnotes.errors import PlanError
from kvnotes.prompt import Message
from kvnotes.segment import KVCache
from kvnotes.session.loaded import Model
from kvnotes.session.report import Decision


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
    """A generated message: iterate it for text, then read `message` and `cache`."""

    def __init__(self, model: Model, execution: Execution, params: SamplingParams) -> None:
        self._model = model
        self._params = params
        self._stream = model.engine.generate(execution, params, model.tokenizer.eos_ids)
        self._text = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens, the end token included."""
        return self._stream.token_ids

    @property
    def cache(self) -> KVCache:
        """Cache of the prompt and the tokens fed back so far."""
        return self._stream.cache

    def __iter__(self) -> Iterator[str]:
        decoder = self._model.tokenizer.stream()
        longest = max((len(s) for s in self._params.stop), default=0)
        emitted = 0
        for token_id in self._stream:
            if token_id in self._model.tokenizer.eos_ids:
                break
            self._text += decoder.push(token_id)
            cut = self._stop_at()
            if cut is not None:
                yield from self._piece(emitted, cut)
                self._text = self._text[:cut]
                return
            safe = len(self._text) - max(0, longest - 1)
            if safe > emitted:
                yield from self._piece(emitted, safe)
                emitted = safe
        self._text += decoder.finish()
        cut = self._stop_at()
        self._text = self._text if cut is None else self._text[:cut]
        yield from self._piece(emitted, len(self._text))

    def message(self, message_id: str) -> Message:
        """Return the message as generated; its ids are authoritative unless text was cut."""
        ids = self.token_ids
        decoder = self._model.tokenizer.stream()
        text = "".join(decoder.push(i) for i in ids if i not in self._model.tokenizer.eos_ids)
        text += decoder.finish()
        whole = text == self._text
        return Message(
            "assistant",
            self._text,
            id=message_id,
            trusted=False,
            generated_ids=ids if whole else None,
        )

    def _piece(self, start: int, stop: int) -> Iterator[str]:
        if stop > start:
            yield self._text[start:stop]

    def _stop_at(self) -> int | None:
        """Return where the first stop string begins, if one has appeared."""
        found = [self._text.find(s) for s in self._params.stop if s in self._text]
        return min(found) if found else None

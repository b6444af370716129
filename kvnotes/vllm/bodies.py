"""Requests to `/v1/completions`, and what their replies say: JSON in and out.

Owns the mapping of sampling parameters, and reading of token ids, log-probabilities and usage.
Prompts are token ids and so are replies: no text is tokenized again anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvnotes.engine.base import SamplingParams
from kvnotes.engine.exchange import Served
from kvnotes.errors import EngineError, ServerError
from kvnotes.vllm.requests import KEY

PATH = "/v1/completions"

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature to the first without a word in the reply, and refuses a higher
one than the second; 0 is greedy."""

MAX_WANTED = 128
"""Token ids whose log-probability one request may ask for."""

NOT_TOLD = (
    "the server does not say what it had cached: start it with --enable-prompt-tokens-details"
)

_TOKEN = "token_id:"
_FEW = 1e-3

NEUTRAL: dict[str, object] = {
    "n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": [],
    "ignore_eos": True,
}
"""Said in every request: a server that is told nothing takes its model's generation defaults."""

IDS: dict[str, object] = {"return_token_ids": True}
"""Asks for the ids of generated tokens."""

IDS_IN_WORDS: dict[str, object] = {"return_tokens_as_token_ids": True, "logprobs": 0}
"""Asks for them in the log-probabilities, as `token_id:NUMBER`: servers before `IDS` know this."""


def sampled(params: SamplingParams, stop_ids: Collection[int]) -> dict[str, object]:
    """Return the part of a request that says how tokens are chosen.

    Stop strings are not sent: who knows the text, applies them. End tokens are those given and
    no others.

    Raises:
        EngineError: The server would choose otherwise than asked for.
    """
    if params.temperature and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise EngineError(
            f"temperature {params.temperature} is asked for, vLLM samples at {MIN_TEMPERATURE} to "
            f"{MAX_TEMPERATURE}",
            hint="take 0 for the most likely token, or a temperature in that range",
        )
    said = {
        **NEUTRAL,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": sorted(stop_ids),
    }
    if params.temperature:
        said["seed"] = params.seed % (1 << 63)  # -1 would be none
    return said


def scoring(wanted: Sequence[int]) -> dict[str, object]:
    """Return the part of a request that asks for log-probabilities of the next token.

    Raw log-probabilities over the whole vocabulary of exactly these ids, whatever is sampled.
    Those of prompt tokens would do as well, but they switch the server's prefix cache off.
    """
    return {
        **NEUTRAL,
        **IDS_IN_WORDS,
        "max_tokens": 1,
        "logprobs": len(wanted),
        "logprob_token_ids": list(wanted),
    }


def token_ids(choice: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens in a choice of a reply, or in a piece of one.

    Raises:
        ServerError: It has none of the two forms.
    """
    ids = choice.get("token_ids")
    if ids is None:
        words = (choice.get("logprobs") or {}).get("tokens")
        if words is None and not choice.get("text"):
            return []  # the end of a stream
        if words is None or not all(isinstance(w, str) and w.startswith(_TOKEN) for w in words):
            raise ServerError(
                "token ids are asked for, the server answers with text alone",
                hint="kvnotes needs return_token_ids, or return_tokens_as_token_ids with logprobs; "
                "vLLM has both",
            )
        ids = [word[len(_TOKEN) :] for word in words]
    try:
        return [int(i) for i in ids]
    except (TypeError, ValueError) as error:
        raise ServerError(
            f"token ids are asked for, the server answers with {str(ids)[:80]}",
            hint="is this the address of a vLLM server?",
        ) from error


def next_log_probs(choice: Mapping[str, Any], wanted: Sequence[int]) -> dict[int, float]:
    """Return the log-probability of each wanted id as the next token.

    Raises:
        ServerError: They are not there, or are no log-probabilities.
    """
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
    found = {word: value for word, value in tops[0].items() if isinstance(value, (int, float))}
    missing = [i for i in wanted if f"{_TOKEN}{i}" not in found]
    if missing:
        raise ServerError(
            f"log-probabilities of {len(wanted)} tokens are asked for, the server gives none of "
            f"token {missing[0]}",
            hint="choices need logprob_token_ids: use vLLM 0.32 or newer",
        )
    result = {i: float(found[f"{_TOKEN}{i}"]) for i in wanted}
    if any(value > _FEW for value in result.values()):
        raise ServerError(
            "log-probabilities are asked for, the server gives values above 0: logits",
            hint="start it without --logprobs-mode",
        )
    return result


def choices_of(reply: Any, number: int) -> list[Mapping[str, Any]]:
    """Return the choices of a reply, by prompt.

    Raises:
        ServerError: There are more or fewer.
    """
    found = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(found, list) or len(found) != number:
        raise ServerError(
            f"{number} prompts are sent, the server answers with {str(reply)[:80]}",
            hint="is this the address of a vLLM server?",
        )
    return sorted(found, key=lambda choice: int(choice["index"]))


def num_cached(reply: Mapping[str, Any]) -> int | None:
    """Return the tokens that the server's prefix cache had; None if it does not say."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    found = details.get("cached_tokens")
    return found if isinstance(found, int) else None


def served(reply: Mapping[str, Any], ttft_ms: float, names: Sequence[str]) -> Served:
    """Return what a whole reply says about its prompt.

    Args:
        reply: The reply.
        ttft_ms: When it came.
        names: Segments that were to be spliced.
    """
    cached = num_cached(reply)
    notes = () if cached is not None else (NOT_TOLD,)
    said = (reply.get("kv_transfer_params") or {}).get(KEY) or {}
    if not names:
        return Served(ttft_ms, cached, notes=notes)
    reason = str(said.get("fallback_reason") or "")
    titles = [f"{title} " for title in said.get("segments") or ()]
    missing = [name for name in names if not any(t.startswith(f"{name} ") for t in titles)]
    if not said:
        reason = "it says nothing about a splice"
    elif not reason and missing:
        reason = f"no segment {', '.join(missing)}"
    spliced = said.get("spliced_tokens", 0)
    return Served(
        ttft_ms,
        cached,
        spliced if isinstance(spliced, int) else None,
        f"the server computed what was to be spliced: {reason}" if reason else "",
        notes,
    )

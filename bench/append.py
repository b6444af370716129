"""How much of a prompt an engine with a prefix cache reuses when a value changes.

    python bench/append.py --url http://127.0.0.1:8000
    PYTHONPATH=SITE-PACKAGES python bench/append.py --llama-cpp MODEL.gguf

A policy stands behind a value that is another one in every turn: as an erratum at the end
(append mode), or in its place in front. vLLM says what it had cached; of llama.cpp the tokens
that it evaluates are counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import save

import kvnotes
from kvnotes import SamplingParams, Session
from kvnotes.session import Model
from kvnotes.session.dry import dry_run

POLICY = (Path(__file__).resolve().parents[1] / "examples" / "policy.md").read_text()
NUM_NEW = 16
QUESTION = (
    "This is question {number}. I have bought a lamp and two chairs from you last week, and one of "
    "the chairs has a scratch. What can I do about it, and how long will that take?"
)

Ask = Callable[[Session, str], tuple[int, int, float]]
"""Answers a question in a session: tokens of the prompt, those not computed, ms to a token."""


def over_vllm(session: Session, question: str) -> tuple[int, int, float]:
    """Ask a vLLM server."""
    turn = session.user(question, generate=SamplingParams(NUM_NEW))
    if turn.served is None or turn.served.num_cached_tokens is None:
        raise SystemExit("start the server with --enable-prompt-tokens-details")
    return turn.plan.tokens.total, turn.served.num_cached_tokens, turn.ttft_ms or 0.0


class LlamaCpp:
    """The high-level object of llama-cpp-python, which keeps the prefix that stays the same.

    Args:
        gguf: The model.
        threads: CPU threads.
    """

    def __init__(self, gguf: Path, threads: int) -> None:
        from llama_cpp import Llama

        options: dict[str, Any] = {"n_ctx": 8192, "n_threads": threads, "n_threads_batch": threads}
        self._llm = Llama(str(gguf), verbose=False, **options)
        self._evaluated = 0
        evaluate = self._llm.eval

        def counted(tokens: Any) -> Any:
            self._evaluated += len(tokens)
            return evaluate(tokens)

        self._llm.eval = counted

    def generate(self, token_ids: tuple[int, ...]) -> Iterator[int]:
        """Generate greedily behind a prompt."""
        return self._llm.generate(list(token_ids), top_k=1, temp=0.0)

    def ask(self, session: Session, question: str) -> tuple[int, int, float]:
        """Render a turn in a session that computes nothing, and have it answered here."""
        turn = session.user(question, decide=["Yes", "No"])
        assert turn.prompt is not None
        start, self._evaluated = time.perf_counter(), 0
        tokens = self.generate(turn.prompt.token_ids)
        first = next(tokens)
        elapsed, size = (time.perf_counter() - start) * 1e3, turn.prompt.num_tokens
        cached = size - self._evaluated
        reply = [first, *islice(tokens, NUM_NEW - 1)]
        session.add("assistant", session.model.tokenizer.decode(reply))
        return size, cached, elapsed


def run(model: Model, ask: Ask, strategy: str, num_changes: int) -> dict[str, Any]:
    """Hold one conversation, the value another one in each turn."""
    session = Session(
        model,
        messages=[
            {"role": "system", "content": "The customer's level is {{level}}.\n\n" + POLICY},
        ],
        fields={"level": f"level {strategy} 0"},  # no arm finds the prompts of another
        strategy=strategy,
        erratum_mode="append",
    )
    ask(session, QUESTION.format(number=0))
    turns = []
    for number in range(1, num_changes + 1):
        session.edit(level=f"level {strategy} {number}")
        turns.append(ask(session, QUESTION.format(number=number)))
    total, cached, times = (list(column) for column in zip(*turns, strict=True))
    return {
        "arm": strategy,
        "prompt_tokens": total,
        "cached_tokens": cached,
        "hit_rate": round(sum(cached) / sum(total), 4),
        "ttft_ms_median": round(sorted(times)[len(times) // 2], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--changes", type=int, default=4, help="a fifth erratum consolidates")
    parser.add_argument("--out", type=Path, default=None)
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("--url", help="a vLLM server")
    engine.add_argument("--llama-cpp", type=Path, help="a .gguf file")
    args = parser.parse_args()
    ask: Ask
    model: Model
    if args.url:
        from kvnotes.vllm import connect

        model, ask, name = connect(args.url, tokenizer=args.model), over_vllm, "vllm"
    else:
        model = dry_run(kvnotes.load(args.model, verify_model=False))
        ask, name = LlamaCpp(args.llama_cpp, args.threads).ask, "llama-cpp"
    arms = [run(model, ask, strategy, args.changes) for strategy in ("erratum", "suffix")]
    for arm in arms:
        print(
            f"{name}  {arm['arm']:8}  hit rate {arm['hit_rate']:.2%}  "
            f"TTFT {arm['ttft_ms_median']:.0f} ms"
        )
    save(f"append-{name}", args, {"engine": name, "arms": arms})


if __name__ == "__main__":
    main()

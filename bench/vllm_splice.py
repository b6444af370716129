"""Splices in vLLM: time to first token, time of a load, and distance from a full prefill.

Runs in the environment of `make setup-vllm`, on SmolLM2 and the real policy:

    .venv-vllm/bin/python bench/vllm_splice.py --dtype bfloat16

The standard point: 62 header tokens, a segment of 4,000, 32 new ones. Arms in turn: a cold prefill,
vLLM's own prefix hit, a splice behind a header that is not cached and behind one that is, and the
same splice again. Distances are taken apart from times: logits of the whole vocabulary are slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NUM_HEADER, NUM_NEW = 62, 32
SEAMS = (0, 1, 16, 64)
NUM_PROMPTS = 16


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--text", type=Path, default=Path("build/retail.txt"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/vllm"))
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        result = Bench(args, Path(folder)).run()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"splice-{args.dtype}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


class Bench:
    """A model in vLLM with one compiled segment.

    Args:
        args: What was asked for.
        folder: Of the store.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch
        import vllm

        from kvnotes.engine.models import resolve_model
        from kvnotes.session import load
        from kvnotes.store import KVStore
        from kvnotes.store.header import Provenance
        from kvnotes.vllm.scheduler_name import SCHEDULER
        from kvnotes.vllm.served import prepare

        self.args, self.torch, self.vllm = args, torch, vllm
        model = load("smollm2-135m", dtype=args.dtype)
        ids = tuple(model.tokenizer.encode(args.text.read_text(encoding="utf-8")))
        self.body = ids[: args.tokens]
        self.rest = ids[args.tokens :]
        store = KVStore(folder / "store")
        store.put(model.engine.compile(self.body), Provenance(name="policy", version=1))
        extra = {
            "model": str(prepare("smollm2-135m", dtype=args.dtype)),
            "store": str(folder / "store"),
        }
        del model
        self.llm = vllm.LLM(
            str(resolve_model("smollm2-135m").path),
            dtype=args.dtype,
            enforce_eager=True,
            max_model_len=8192,
            block_size=32,
            max_logprobs=-1,
            scheduler_cls=SCHEDULER,
            disable_hybrid_kv_cache_manager=False,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVNotesConnector",
                "kv_connector_module_path": "kvnotes.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            },
        )

    def run(self) -> dict[str, Any]:
        """Measure times, then distances."""
        self._salt = 0
        times = self._times()
        result = {
            "machine": self._machine(),
            "command": " ".join(["python", *sys.argv]),
            "tokens": {"header": NUM_HEADER, "segment": len(self.body), "new": NUM_NEW},
            "ttft_ms": times,
            "ratios": {
                "splice / hit": round(times["splice"]["median"] / times["hit"]["median"], 3),
                "cold / splice": round(times["cold"]["median"] / times["splice"]["median"], 2),
            },
            "load": self._load,
            "distance": self._distances(),
        }
        print(
            json.dumps({k: result[k] for k in ("ttft_ms", "ratios", "load", "distance")}, indent=1)
        )
        return result

    def _times(self) -> dict[str, dict[str, float]]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side = get_kv_transfer_group()._working
        taken: dict[str, list[float]] = {}
        loads: list[float] = []
        put = side._put

        def timed(injection: Any) -> None:
            start = time.perf_counter()
            put(injection)
            loads.append((time.perf_counter() - start) * 1e3)

        side._put = timed
        plain, splice = {"splice": False}, {"num_seam_tokens": 16}
        for _ in range(self.args.runs + 1):
            self._salt += 1
            header, new = self._piece(NUM_HEADER), self._piece(NUM_NEW)
            ids = (*header, *self.body, *new)
            arms: dict[str, Callable[[], float]] = {
                "cold": lambda ids=ids: self._ttft(ids, plain),
                "hit": lambda ids=ids: self._ttft((*ids[:-NUM_NEW], *self._piece(NUM_NEW)), plain),
                "splice": lambda: self._ttft(
                    (*self._piece(NUM_HEADER), *self.body, *self._piece(NUM_NEW)), splice
                ),
                "splice, header cached": lambda: self._warm_splice(splice),
                "splice again": lambda: self._again(splice),
            }
            for name, arm in arms.items():
                taken.setdefault(name, []).append(arm())
        side._put = put
        # the first of each place moves the keys, the others find them moved
        self._load = {"ms": _summary(loads[3:]), "first_ms": round(loads[0], 2)}
        return {name: _summary(values[1:]) for name, values in taken.items()}

    def _warm_splice(self, wish: dict[str, Any]) -> float:
        header = self._piece(NUM_HEADER + 34)  # whole blocks
        self._ttft((*header, 7), {"splice": False})
        self._last = (*header, *self.body)
        return self._ttft((*self._last, *self._piece(NUM_NEW)), wish)

    def _again(self, wish: dict[str, Any]) -> float:
        return self._ttft((*self._last, *self._piece(NUM_NEW)), wish)

    def _piece(self, number: int) -> tuple[int, ...]:
        """Return tokens that no prompt has had."""
        self._salt += 1
        start = (self._salt * 37) % (len(self.rest) - number)
        return (*self.rest[start : start + number - 1], 1000 + self._salt % 40000)

    def _ttft(self, ids: Sequence[int], wish: dict[str, Any]) -> float:
        start = time.perf_counter()
        self._ask(ids, wish, None)
        return (time.perf_counter() - start) * 1e3

    def _ask(self, ids: Sequence[int], wish: dict[str, Any], logprobs: int | None) -> Any:
        params = self.vllm.SamplingParams(
            max_tokens=1,
            temperature=0,
            logprobs=logprobs,
            detokenize=False,
            extra_args={"kv_transfer_params": {"kvnotes": wish}},
        )
        prompt = {"prompt_token_ids": list(ids)}
        return self.llm.generate([prompt], params, use_tqdm=False)[0]

    def _distances(self) -> list[dict[str, Any]]:
        rows: dict[str, list[float]] = {}
        equal: dict[str, int] = {}
        for _ in range(NUM_PROMPTS):
            header, new = self._piece(NUM_HEADER), self._piece(NUM_NEW)
            ids = (*header, *self.body, *new)
            self.llm.reset_prefix_cache()
            full = self._logprobs(ids, {"splice": False})
            found = {"own prefix hit": self._logprobs(ids, {"splice": False})}
            for seam in SEAMS:
                found[f"splice, {seam}"] = self._logprobs(ids, {"num_seam_tokens": seam})
            for name, logprobs in found.items():
                kl = float((full.exp() * (full - logprobs)).sum())
                rows.setdefault(name, []).append(kl)
                equal[name] = equal.get(name, 0) + int(full.argmax() == logprobs.argmax())
        return [
            {
                "what": name,
                "KL mean": float(f"{statistics.fmean(kls):.3g}"),
                "KL max": float(f"{max(kls):.3g}"),
                "top-1 equal": f"{equal[name]} / {len(kls)}",
            }
            for name, kls in rows.items()
        ]

    def _logprobs(self, ids: Sequence[int], wish: dict[str, Any]) -> Any:
        entries = self._ask(ids, wish, -1).outputs[0].logprobs[0]
        result = self.torch.empty(max(entries) + 1, dtype=self.torch.float64)
        for token, entry in entries.items():
            result[token] = entry.logprob
        return result

    def _machine(self) -> dict[str, Any]:
        from kvnotes.bench.result import machine_facts

        return {**machine_facts(), "vllm": self.vllm.__version__, "dtype": self.args.dtype}


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }


if __name__ == "__main__":
    main()

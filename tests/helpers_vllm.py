"""Small models, segments compiled by the embedded engine, and vLLM beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from kvnotes.engine.hf import HFEngine
from kvnotes.engine.weights import weights_digest
from kvnotes.plan import Plan, Splice, plan_compose
from kvnotes.segment import KVSegment
from kvnotes.store import KVStore
from kvnotes.store.header import Provenance
from kvnotes.vllm.scheduler_name import SCHEDULER
from kvnotes.vllm.served import serialized

LOGPROB_TOLERANCE = 1e-4
"""Largest difference of log-probabilities from the embedded engine's: rounding of two
implementations in float32. What is spliced at the wrong place, or not at all, is off by 1e-2."""

BLOCK_SIZE = 32
NUM_LOGPROBS = 20
VOCABULARY = 512


def tokens(start: int, number: int) -> tuple[int, ...]:
    """Return tokens that look like none of another start."""
    random = torch.Generator().manual_seed(start)
    return tuple(torch.randint(5, VOCABULARY, (number,), generator=random).tolist())


def write_model(folder: Path, kind: str) -> None:
    """Write a small random model, large enough for vLLM's kernels."""
    torch.manual_seed(1)
    shapes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.1,
    }
    if kind == "windows":  # windows and all tokens in turn, each with a rotary embedding of its own
        config = Gemma3TextConfig(**shapes, sliding_window=96, query_pre_attn_scalar=64)
        model = Gemma3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**shapes))
    model.eval().save_pretrained(folder)


@dataclass
class Served:
    """A model in both engines.

    Args:
        folder: Of the model, the store and the model file.
        kind: See `write_model`.
    """

    folder: Path
    kind: str = "plain"
    segments: dict[str, KVSegment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.folder / "model"
        write_model(self.model, self.kind)
        loaded = _load(self.model)
        self.engine = HFEngine(loaded, weights_digest(self.model))
        self.model_file = self.folder / "served.safetensors"
        self.model_file.write_bytes(serialized(self.engine.identity, self.engine.rotaries))
        self.store = KVStore(self.folder / "store")

    def compile(
        self,
        name: str,
        ids: Sequence[int],
        preamble: Sequence[int] = (),
        variant: tuple[tuple[str, str], ...] = (),
    ) -> KVSegment:
        """Compile a segment in the embedded engine, into the store."""
        segment = self.engine.compile(ids, preamble)
        self.store.put(segment, Provenance(name=name, version=1, variant=variant))
        self.segments[name + "".join(value for _, value in variant)] = segment
        return segment

    def llm(self, **options: Any) -> LLM:
        """Return vLLM with the plug-in; options of the plug-in under `extra`."""
        extra = {
            "model": str(self.model_file),
            "store": str(self.folder / "store"),
            "allow_compile": True,
            "deadline_seconds": 120.0,  # on a busy machine too, nothing is given up
            **options.pop("extra", {}),
        }
        options = {"scheduler_cls": SCHEDULER, **options}
        return stock_llm(
            self.model,
            kv_transfer_config={
                "kv_connector": "KVNotesConnector",
                "kv_connector_module_path": "kvnotes.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            },
            disable_hybrid_kv_cache_manager=False,
            **options,
        )

    def plan(self, ids: Sequence[int], splices: Sequence[Splice], seam: int) -> Plan:
        """Return the plan of the embedded engine."""
        return plan_compose(ids, splices, num_seam_tokens=seam)

    def splice(self, name: str, start: int) -> Splice:
        """Return a segment at a place."""
        run = self.segments[name].run
        return Splice(name, run, 0, len(run), start)

    def logprobs(self, plan: Plan) -> Tensor:
        """Return log-probabilities of the next token after a plan, by the embedded engine."""
        found = self.engine.execute(plan, segments=self.segments.values())
        return torch.log_softmax(found.last_logits(), -1)

    def full(self, ids: Sequence[int]) -> Tensor:
        """Return them after a full prefill."""
        return torch.log_softmax(self.engine.prefill(ids).last_logits(), -1)


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def stock_llm(model: Path, **options: Any) -> LLM:
    """Return vLLM in this process, float32."""
    options = {
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "disable_log_stats": False,
        **options,
    }
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_logprobs=NUM_LOGPROBS,
        **options,
    )


@dataclass(frozen=True)
class Reply:
    """What vLLM answered.

    Args:
        token_ids: Tokens it generated.
        logprobs: Most likely first tokens, with their log-probabilities.
        cached: Tokens that were not computed.
        said: What the plug-in says of it.
    """

    token_ids: tuple[int, ...]
    logprobs: dict[int, float]
    cached: int
    said: dict[str, Any]

    def gap(self, reference: Tensor) -> float:
        """Return the largest difference from log-probabilities `[vocab]`."""
        return max(abs(value - float(reference[i])) for i, value in self.logprobs.items())


def params(wish: dict[str, Any] | None = None, num_tokens: int = 1) -> SamplingParams:
    """Return greedy sampling with a wish for the plug-in."""
    extra = None if wish is None else {"kv_transfer_params": {"kvnotes": wish}}
    return SamplingParams(
        max_tokens=num_tokens,
        min_tokens=num_tokens,
        temperature=0,
        logprobs=NUM_LOGPROBS,
        detokenize=False,
        extra_args=extra,
    )


def ask(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    wishes: Sequence[dict[str, Any] | None] = (None,),
    num_tokens: int = 1,
) -> list[Reply]:
    """Have vLLM answer prompts, all at once."""
    wishes = list(wishes) * (len(prompts) if len(wishes) == 1 else 1)
    found = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts],
        [params(wish, num_tokens) for wish in wishes],
        use_tqdm=False,
    )
    return [reply_of(item) for item in found]


def reply_of(item: Any) -> Reply:
    """Return what one of vLLM's outputs says."""
    return Reply(
        tuple(item.outputs[0].token_ids),
        {i: entry.logprob for i, entry in item.outputs[0].logprobs[0].items()},
        item.num_cached_tokens or 0,
        (item.kv_transfer_params or {}).get("kvnotes", {}),
    )


def ask_stock(
    model: Path, prompts: Sequence[Sequence[int]], num_tokens: int, options: dict[str, Any]
) -> list[Reply]:
    """Have vLLM without the plug-in answer prompts one by one, in a process of its own."""
    with TemporaryDirectory() as folder:
        task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        task.write_text(json.dumps([str(model), list(map(list, prompts)), num_tokens, options]))
        subprocess.run([sys.executable, __file__, str(task), str(answer)], check=True)
        found = json.loads(answer.read_text())
    return [
        Reply(tuple(ids), {int(i): value for i, value in logprobs.items()}, cached, said)
        for ids, logprobs, cached, said in found
    ]


def _answer(task: Path, answer: Path) -> None:
    model, prompts, num_tokens, options = json.loads(task.read_text())
    llm, found = stock_llm(Path(model), **options), []
    for ids in prompts:
        llm.reset_prefix_cache()
        (reply,) = ask(llm, [ids], [None], num_tokens)
        found.append([reply.token_ids, reply.logprobs, reply.cached, reply.said])
    answer.write_text(json.dumps(found))


def connector(llm: LLM) -> Any:
    """Return the plug-in's half in the scheduler."""
    return scheduler(llm).connector.scheduling


def scheduler(llm: LLM) -> Any:
    """Return vLLM's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))

"""What every benchmark shares: the machine, an idle probe, medians, results on disk."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import kvnotes
from kvnotes.bench.result import machine_facts
from kvnotes.bench.timing import Probe, interleaved, summary

__all__ = ["Probe", "interleaved", "summary"]

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RESULTS = Path(__file__).resolve().parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="JSON file (default: bench/results)")
    return parser


def load(args: argparse.Namespace) -> kvnotes.Model:
    """Load the model with the given number of threads."""
    torch.set_num_threads(args.threads)
    return kvnotes.load(args.model, dtype=args.dtype)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers depend on."""
    facts = machine_facts()
    command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return {**facts, "dtype": args.dtype, "model": args.model, "command": command}


def save(name: str, args: argparse.Namespace, body: dict[str, Any]) -> Path:
    """Write a benchmark's result as JSON and say where."""
    path = args.out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(args), **body}, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)
    return path


def retail_text() -> str:
    """Return the real retail policy, followed by what customers want in its tasks."""
    text = (DATA / "tau2_retail_policy.md").read_text()
    tasks = json.loads((DATA / "tau2_retail_tasks.json").read_text())
    more = "\n".join(task["user_scenario"]["instructions"]["reason_for_call"] for task in tasks)
    return f"{text}\n{more}"


def policy_ids(model: kvnotes.Model, num_tokens: int | None = None) -> tuple[int, ...]:
    """Return tokens of the real retail policy, followed by its tasks where more are asked for."""
    ids = model.tokenizer.encode((DATA / "tau2_retail_policy.md").read_text())
    if num_tokens is not None and num_tokens > len(ids):
        ids = model.tokenizer.encode(retail_text())
    return tuple(ids if num_tokens is None else ids[:num_tokens])


HEADERS = (
    "<|im_start|>system\nYou are the service agent of an online shop. Help the customer with "
    "orders, returns and refunds. Follow the policy below in every reply.\n\n",
    "<|im_start|>system\nYou are a customer service agent that helps the user according to the "
    "policy below. Always follow the policy and be polite and patient to everyone.\n\n",
    "<|im_start|>system\nYou are a helpful assistant of a retail store. Answer the customer in a "
    "friendly and rather short way. The policy of the store follows here.\n\n",
)
"""Ordinary system headers, near the 33 tokens of the standard point; the first has exactly 33."""


def header_ids(model: kvnotes.Model, index: int = 0) -> tuple[int, ...]:
    """Return the tokens of a system header."""
    return model.tokenizer.encode(HEADERS[index])

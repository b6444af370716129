"""Sessions over a tiny random model and a small trained tokenizer: no download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from helpers_models import ROTARIES
from helpers_prompt import family_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kvnotes import SamplingParams, Session
from kvnotes.engine.base import Execution, Stopwatch
from kvnotes.engine.hf import HFEngine
from kvnotes.fidelity import compare, mask_reference
from kvnotes.plan import Layout
from kvnotes.prompt import PromptTokenizer
from kvnotes.session import Model

POLICY = "Never sell below the price. " * 12
FEW = SamplingParams(max_new_tokens=5)


@cache
def _engine(family: str) -> HFEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(family_tokenizer(family)) + 5,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    made = HFEngine(model, "tiny")
    ROTARIES[made.fingerprint] = made.rotaries
    return made


def tiny_model(family: str = "smollm2") -> Model:
    """A model with an empty segment book."""
    return Model(_engine(family), PromptTokenizer(family_tokenizer(family)), "tiny")


def shop(model: Model | None = None, **options: Any) -> Session:
    """A policy as a segment, then two fields."""
    return Session(
        model or tiny_model(),
        messages=[
            {"role": "system", "content": "You help.\n"},
            {"role": "system", "segment": "policy"},
            {"role": "system", "content": "status: {{status}}, tier: {{tier}}\n"},
        ],
        fields={"status": "low", "tier": "gold"},
        segments={"policy": POLICY},
        **options,
    )


def run(session: Session) -> Execution:
    """Compute what waits and return the execution itself."""
    talk = session._talk
    execution, prompt, _ = talk.run((), None, Stopwatch())
    talk.keep(execution, prompt)
    return execution


def gap_to_mask(session: Session) -> float:
    """Gap of the next logits to the masked forward over the cache's lineage."""
    execution = run(session)
    engine = session.model.engine
    reference = mask_reference(engine, execution.cache.layout)
    return compare(execution.last_logits(), reference).max_logit_gap


def statements(session: Session, field: str = "status") -> list[str]:
    """Every value the prompt states for a field, in order."""
    spans = session.render().field_spans(field)
    return [span.value for span in spans]


def rebuilt(session: Session, **options: Any) -> Session:
    """A new session that is given what the session says now, and knows nothing else."""
    state = session.state
    return Session(
        session.model,
        messages=state.template.messages,
        segments={segment.name: segment for segment in state.template.segments},
        fields={name: state.values[name] for name in state.template.field_names},
        **options,
    )


def lineage(session: Session) -> Layout:
    """What the session's cache holds once everything is computed, in its one form."""
    return run(session.fork()).cache.canonical_layout


def tool(name: str, about: str) -> dict[str, Any]:
    """The schema of a tool with one argument."""
    parameter = {"type": "string", "description": f"Which {about}."}
    return {
        "name": name,
        "description": f"Read the {about}.",
        "parameters": {"type": "object", "properties": {"id": parameter}, "required": ["id"]},
    }


TOOLS = [tool("get_order", "order"), tool("get_price", "price"), tool("send_mail", "customer")]


def desk(
    model: Model | None = None, tools: Sequence[dict[str, Any]] = TOOLS, **options: Any
) -> Session:
    """A header, tools, then a field."""
    session = Session(
        model or tiny_model(),
        messages=[
            {"role": "system", "content": "You help. Call a tool.\n"},
            {"role": "system", "content": "status: {{status}}\n", "id": "status"},
        ],
        fields={"status": "low"},
        **options,
    )
    for schema in tools:
        session.add_tool(schema, before="status")
    return session

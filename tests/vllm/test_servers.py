"""Servers as people start them: two replicas, a segment compiled once, one object store."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvnotes.engine.models import load_tokenizer, resolve_model
from kvnotes.store import KVStore
from kvnotes.vllm.launch import Plugin, Server, ServerOptions, plan_launch

POLICY = "".join(
    f"Rule {number}: a parcel of kind {number * 7 % 31} goes by van {number * 5 % 23}.\n"
    for number in range(40)
)
QUESTION = "Which van takes a parcel of kind 21? Answer with the number alone."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with started(folder, "one", allow_compile=True) as found:
        yield found


def started(folder: Path, name: str, **plugin: Any) -> Server:
    return Server(
        plan_launch(
            ServerOptions(
                model="smollm2-135m",
                python=Path(sys.executable),
                cache_gib=1,
                max_model_len=4096,
                plugin=Plugin(store=folder / name, remote=f"file://{folder}/shared", **plugin),
                log=folder / f"{name}.log",
            )
        )
    )


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path,
        json.dumps({"model": "smollm2-135m", "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def chat(server: Server, *contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system",) * (len(contents) - 1) + ("user",)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 8, **more})


def counters(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.findall(r"^(kvnotes:\w+?)_total\{([^}]*)\} ([\d.e+]+)$", text, re.M)
    result: dict[str, float] = {}
    for name, labels, value in found:
        reason = re.search(r'reason="(\w+)"', labels)
        key = name.removeprefix("kvnotes:") + (f"/{reason.group(1)}" if reason else "")
        result[key] = float(value)
    return result


def policy_ids() -> list[int]:
    """Return the policy as it stands in a chat: a system message with its delimiters."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    found = tokenizer.apply_chat_template(
        [{"role": "system", "content": POLICY}], tokenize=False, add_generation_prompt=False
    )
    ids: list[int] = tokenizer.encode(found, add_special_tokens=False)
    return ids


def test_a_server_compiles_a_segment_and_splices_it_into_chats(
    server: Server, folder: Path
) -> None:
    wish = {"kvnotes": {"compile": {"name": "vans", "version": 1}}}
    made = post(
        server,
        "/v1/completions",
        {"prompt": policy_ids(), "max_tokens": 1, "kv_transfer_params": wish},
    )
    key = made["kv_transfer_params"]["kvnotes"]["segment"]
    assert KVStore(folder / "one").get(key) is not None
    plain = {"kv_transfer_params": {"kvnotes": {"splice": False}}}
    before, full = counters(server), chat(server, "Be brief.", POLICY, QUESTION, **plain)
    spliced = chat(server, "Be short.", POLICY, QUESTION)
    after = counters(server)
    said = spliced["kv_transfer_params"]["kvnotes"]
    assert said["segments"] == ["vans@1"] and said["shape"] == "C R' C"
    assert after["plans"] - before.get("plans", 0) == 1
    assert after["loaded_tokens"] - before.get("loaded_tokens", 0) == said["loaded_tokens"] > 500
    assert after["seam_tokens"] >= 1 and after["compiled"] == 1
    assert spliced["usage"]["prompt_tokens_details"]["cached_tokens"] >= said["loaded_tokens"]
    assert full["choices"][0]["message"]["content"]


def test_another_replica_takes_it_from_the_object_store(server: Server, folder: Path) -> None:
    own = KVStore(folder / "one", remote=f"file://{folder}/shared")
    (entry,) = own.entries()
    own.push([entry.key])
    with started(folder, "two") as other:
        assert KVStore(folder / "two", remote=f"file://{folder}/shared").pull(entry.key)
        mine = chat(server, "Be short.", POLICY, QUESTION)
        theirs = chat(other, "Be short.", POLICY, QUESTION)
        said = theirs["kv_transfer_params"]["kvnotes"]
        assert said["segments"] == ["vans@1"] and said["loaded_tokens"] > 500
        assert theirs["choices"] == mine["choices"]
        assert counters(other)["compiled"] == 0
        refused = post(
            other,
            "/v1/completions",
            {
                "prompt": policy_ids(),
                "max_tokens": 1,
                "kv_transfer_params": {"kvnotes": {"compile": {"name": "x"}}},
            },
        )
        reason = refused["kv_transfer_params"]["kvnotes"]["fallback_reason"]
        assert reason == "compile_not_allowed"
        assert counters(other)["refused/compile_not_allowed"] == 1

"""Mutations of segment files: bytes, JSON values, keys and order; repaired so that some get far."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from typing import Any

PAGE = 4096
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.0, 0.5, -0.0, 1e308, 10**12, 2**31, 2**63, 2**64, 10**30,
    "", "x", "0" * 64, "F32", "I8", "int8", "run", "\u20ac", "\ud800", "\x00\x1b[31m", "n" * 2000,
    [], {}, [[]], [0], ["F32"], {"a": 1}, [0, 24], [1, 3, 2],
)  # fmt: skip
ODD_TEXT = (
    b"NaN", b"Infinity", b"1e999", b"-0", b"1E5", b"9" * 5000, b"[" * 3000, b"{}", b",", b'"',
    b'"\\ud800"', b"\\u0000", b"\xff", b"\xed\xa0\x80", b" ", b"\x00",
)  # fmt: skip
ODD_CHARACTERS = ("", "x", "0", "\u00e9", "\x7f", "\ud800")


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def split(content: bytes) -> tuple[Any, bytes] | None:
    """The outer header and the rest, where there still is one."""
    try:
        size = struct.unpack("<Q", content[:8])[0]
        return json.loads(content[8 : 8 + size]), content[8 + size :]
    except (ValueError, struct.error, RecursionError):
        return None


def join(outer: object, data: bytes, chance: random.Random) -> bytes:
    text = json.dumps(outer).encode()
    if chance.random() < 0.02:
        text = odd_bytes(text, chance)
    text += b" " * (-(8 + len(text)) % (PAGE if chance.random() < 0.95 else 8))
    return struct.pack("<Q", len(text)) + text + data


def odd_bytes(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes: flip, overwrite, insert, remove, double, cut off, or a piece of JSON."""
    result = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        start = chance.randrange(len(result) + 1)
        stop = min(len(result), start + chance.choice((0, 1, 1, 2, 8, 40)))
        piece: bytes = chance.choice(
            (
                bytes([chance.randrange(256)]),
                bytes(chance.randrange(256) for _ in range(stop - start)),
                b"",
                bytes(result[start:stop]) * 2,
                chance.choice(ODD_TEXT),
                bytes(byte ^ (1 << chance.randrange(8)) for byte in result[start:stop]),
            )
        )
        result[start:stop] = piece
        if chance.random() < 0.03:
            del result[chance.randrange(len(result) + 1) :]
    return bytes(result)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested JSON."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        keys: Any = part if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], (dict, list)):
                waiting.append(part[key])
    return found


def odd_json(value: Any, chance: random.Random) -> None:
    """Change one place in nested JSON."""
    found = places(value)
    if not found:
        return
    part, key = chance.choice(found)
    old = part[key]
    action = chance.randrange(7)
    if action == 0:
        part[key] = copy.deepcopy(chance.choice(ODD_VALUES))
    elif action == 1:
        del part[key]
    elif action == 2 and isinstance(part, dict):
        part[chance.choice(("unknown", "", "\x1b", "n" * 500, str(key) + "x"))] = part.pop(key)
    elif action == 2:
        part.insert(key, copy.deepcopy(old))
    elif action == 3:
        part[key] = [old] if chance.random() < 0.5 else {"x": old}
    elif action == 4:
        other, name = chance.choice(found)
        part[key], other[name] = other[name], copy.deepcopy(old)
    elif isinstance(old, bool) or old is None or isinstance(old, (dict, list)):
        part[key] = str(old)
    elif isinstance(old, str):
        cut = chance.randrange(len(old) + 1)
        part[key] = old[:cut] + chance.choice(ODD_CHARACTERS) + old[cut + 1 :]
    else:
        part[key] = chance.choice((old + 1, -old, old * 2, float(old), str(old), old + 2**31))


def odd_header(outer: Any, chance: random.Random) -> None:
    """Change the inner header, and repair what would be noticed first."""
    metadata = outer["__metadata__"]
    header = json.loads(metadata["kvnotes"])
    for _ in range(chance.choice((1, 1, 2, 3))):
        odd_json(header, chance)
    if chance.random() < 0.5:
        repair(header)
    text = canonical(header)
    if chance.random() < 0.1:
        text = odd_bytes(text.encode(), chance).decode("utf-8", "replace")
    if chance.random() < 0.02:
        text = "".join(random.Random(text).sample(text, len(text)))
    metadata["kvnotes"] = text
    if chance.random() < 0.95:
        metadata["sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if chance.random() < 0.8:
        metadata.pop("signature", None)


def repair(header: Any) -> None:
    """Make a changed identity fit its fingerprint, and a changed text its digest."""
    try:
        spec = dict(header["identity"]["spec"])
        spec.pop("num_parameters", None)
        names = {"weights": "weights_digest", "adapter": "adapter", "quantization": "quantization"}
        facts = {**spec, **{name: header["identity"][key] for name, key in names.items()}}
        header["fingerprint"] = hashlib.sha256(canonical(facts).encode()).hexdigest()
        header["layer_kinds"] = [layer["kind"] for layer in spec["layers"]]
        source = header["provenance"]
        text = source["text"].encode()
        source["text_sha256"] = hashlib.sha256(text).hexdigest() if text else ""
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError):
        return


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a file that is a little, or quite, different."""
    if chance.random() < 0.2:
        return odd_bytes(content, chance)
    parts = split(content)
    if parts is None or not isinstance(parts[0], dict):
        return odd_bytes(content, chance)
    outer, data = parts
    try:
        action = chance.randrange(10)
        if action < 7 and "kvnotes" in outer["__metadata__"]:
            odd_header(outer, chance)
        elif action < 9:
            name = chance.choice(sorted(outer["__metadata__"]))
            entry = json.loads(outer["__metadata__"][name])
            odd_json(entry, chance)
            outer["__metadata__"][name] = canonical(entry)
        else:
            odd_json(outer, chance)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        odd_json(outer, chance)
    if data and chance.random() < 0.05:
        data = odd_bytes(data, chance)
    return join(outer, data, chance)

"""Keeping spliced K/V out of vLLM's prefix cache for plain requests.

vLLM names a block by the hash of its tokens and of all before them. Spliced K/V are not what
these tokens alone give, so from the first spliced block on the hash says the plan as well: plain
requests never find them, requests with the same plan do, and the blocks before stay shared.

Uses two private attributes of vLLM's requests, `block_hashes` and `_block_hasher`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

Hasher = Callable[[Any], list[Any]]
"""A request to the hashes of its full blocks that have none yet."""


def salt_request(request: Any, salts: Mapping[int, bytes], block_size: int) -> None:
    """Give the blocks of a request other names, from the first salted one on.

    Args:
        request: A request of vLLM's scheduler, before any block of it was looked up.
        salts: What enters the hashes, by block.
        block_size: Tokens for each hash.
    """
    inner = request._block_hasher
    if inner is None:  # the prefix cache is off
        return
    del request.block_hashes[min(salts) :]
    request._block_hasher = _Salted(inner, salts, block_size)
    request.update_block_hashes()


def unsalt_request(request: Any) -> None:
    """Give the blocks of a request their plain names again: all of it is computed."""
    salted = request._block_hasher
    if isinstance(salted, _Salted):
        del request.block_hashes[min(salted.salts) :]
        request._block_hasher = salted.inner
        request.update_block_hashes()


def hashes_of(request: Any, token_ids: Sequence[int]) -> list[Any]:
    """Return the plain names of the blocks that a request would have with other tokens."""
    hasher = request._block_hasher
    inner = hasher.inner if isinstance(hasher, _Salted) else hasher
    return [] if inner is None else inner(_With(request, list(token_ids)))


class _With:
    """A request with other tokens, none of them hashed yet."""

    def __init__(self, request: Any, all_token_ids: list[int]) -> None:
        self._request = request
        self.all_token_ids = all_token_ids
        self.num_tokens = len(all_token_ids)
        self.block_hashes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Salted:
    """Hashes blocks as vLLM does, and mixes salts in."""

    def __init__(self, inner: Hasher, salts: Mapping[int, bytes], block_size: int) -> None:
        self.inner, self.salts, self._block_size = inner, dict(salts), block_size

    def __call__(self, request: Any) -> list[Any]:
        known = len(request.block_hashes)
        hashes = list(request.block_hashes)
        ends = sorted(block + 1 for block in self.salts if block >= known)
        for end in ends:
            hashes += self.inner(_Until(request, hashes, end * self._block_size))
            if len(hashes) < end:
                return hashes[known:]
            hashes[-1] = type(hashes[-1])(sha256(hashes[-1] + self.salts[end - 1]).digest())
        hashes += self.inner(_Until(request, hashes, request.num_tokens))
        return hashes[known:]


class _Until:
    """A request as it was with fewer tokens, its blocks hashed so far given."""

    def __init__(self, request: Any, block_hashes: list[Any], num_tokens: int) -> None:
        self._request = request
        self.block_hashes = block_hashes
        self.num_tokens = min(num_tokens, request.num_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

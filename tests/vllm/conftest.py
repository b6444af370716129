"""vLLM in this process, with the plug-in; run by `make test-vllm` in an environment of its own.

One engine for each file: `make test-vllm` gives every file a process.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# left alone, vLLM takes another number of threads with a connector: nothing is bit-equal then
CPUS = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CPUS)))

import pytest  # noqa: E402

pytest.importorskip("vllm")

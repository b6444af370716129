"""llama.cpp as a peer: a sequence evaluated apart, shifted behind a header, shared with another.

Through the low-level functions of llama-cpp-python; only for models that are GGUF files.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_HEADER, _TEXT = 0, 1


class LlamaPeer:
    """A context of llama.cpp with a text that is evaluated once.

    Weights and cache are float32, as they are for the others; the file is converted once.

    Args:
        gguf: The model.
        scratch: Folder for the converted file.
        threads: CPU threads.
        text: Tokens of the text.

    Raises:
        ImportError: llama-cpp-python is not installed.
    """

    def __init__(self, gguf: Path, scratch: Path, threads: int, text: Sequence[int]) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        lib = self._lib
        self._log = lib.llama_log_callback(lambda level, message, data: None)
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        whole = scratch / f"{gguf.stem}-float32.gguf"
        if not whole.exists():
            settings = lib.llama_model_quantize_default_params()
            settings.ftype, settings.allow_requantize = lib.LLAMA_FTYPE_ALL_F32, True
            settings.nthread = threads
            lib.llama_model_quantize(str(gguf).encode(), str(whole).encode(), settings)
        weights = lib.llama_model_default_params()
        weights.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(whole).encode(), weights)
        self._num_logits = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 8192, 2048, 512, 4
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True  # else a copy of a sequence copies its cells
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # slower for short passes
        options.type_k = options.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(self._model, options)
        self._memory = lib.llama_get_memory(self._context)
        self._size = len(text)
        self._decode(text, 0, _TEXT)
        num_bytes = lib.llama_state_seq_get_size(self._context, _TEXT)
        self._state = (ctypes.c_uint8 * num_bytes)()
        lib.llama_state_seq_get_data(self._context, self._state, num_bytes, _TEXT)

    def run(self, header: Sequence[int], request: Sequence[int]) -> tuple[float, Any]:
        """Splice the text behind a cached header; return the time and the logits.

        The shift is done inside the pass over the request, so both are timed together; putting
        the text back afterwards is not timed.
        """
        lib, memory = self._lib, self._memory
        lib.llama_memory_clear(memory, True)
        lib.llama_state_seq_set_data(self._context, self._state, len(self._state), _TEXT)
        self._decode(header, 0, _HEADER)
        start = time.perf_counter()
        lib.llama_memory_seq_add(memory, _TEXT, 0, -1, len(header))
        stop = len(header) + self._size
        lib.llama_memory_seq_cp(memory, _TEXT, _HEADER, len(header), stop)
        logits = self._decode(request, stop, _HEADER)
        return (time.perf_counter() - start) * 1e3, logits

    def full(self, token_ids: Sequence[int]) -> tuple[float, Any]:
        """Evaluate a whole prompt; return the time and the logits."""
        self._lib.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        logits = self._decode(token_ids, 0, _HEADER)
        return (time.perf_counter() - start) * 1e3, logits

    def _decode(self, token_ids: Sequence[int], position: int, sequence: int) -> Any:
        lib, logits = self._lib, None
        for first in range(0, len(token_ids), 2048):
            part = token_ids[first : first + 2048]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token_id in enumerate(part):
                batch.token[i], batch.pos[i] = token_id, position + first + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, 0
            batch.logits[len(part) - 1] = 1
            failed = lib.llama_decode(self._context, batch)
            lib.llama_batch_free(batch)
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
            found = lib.llama_get_logits_ith(self._context, -1)
            logits = np.ctypeslib.as_array(found, (self._num_logits,)).copy()
        return logits

"""The two implementations behind one interface: numpy in, numpy out, one sequence state inside.

An arm holds the state of one batch. Tokens are i64 or i32 [R, T], logits f32[R, V].
"""

import copy
import pathlib
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

import models
from hetero_kv.params import Params
from hetero_kv.state import Cache


class Arm(Protocol):
    """What is timed."""

    def reset(self, batch: int, capacity: int) -> None:
        """Forgets the state; there is room for so many tokens."""

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Runs the tokens; logits at the last one."""

    def step(self, token: np.ndarray) -> np.ndarray:
        """Runs one token i32[R] per row; logits after it."""

    def save(self) -> None:
        """Keeps a copy of the state."""

    def restore(self) -> None:
        """Goes back to the copy."""


class Ours:
    """This project's decoder. The cache is donated to every call."""

    def __init__(self, model: models.Decoder, params: Params):
        self.model, self.params = model, model.prepare(params)
        self._cache: Cache | None = None
        self._saved: Cache | None = None

    def reset(self, batch: int, capacity: int) -> None:
        self.use(self.model.init_cache(batch, capacity))

    def use(self, cache: Cache) -> None:
        """Takes over a cache."""
        self._cache = jax.block_until_ready(cache)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        logits, self._cache = self.model.prefill(self.params, tokens, self._cache, logits="last")
        jax.block_until_ready(self._cache)
        return np.asarray(logits)

    def step(self, token: np.ndarray) -> np.ndarray:
        logits, self._cache = self.model.decode_step(self.params, token, self._cache)
        return np.asarray(logits)

    def scan(self, token: np.ndarray, steps: int) -> np.ndarray:
        """Greedy tokens i32[R, steps] after `token`, chosen inside one compiled call."""
        tokens, self._cache = self.model.decode_many(self.params, token, self._cache, steps)
        jax.block_until_ready(self._cache)
        return np.asarray(tokens)

    def save(self) -> None:
        self._saved = jax.tree.map(jnp.copy, self._cache)

    def restore(self) -> None:
        self.use(jax.tree.map(jnp.copy, self._saved))


class Reference:
    """`DeepseekV4ForCausalLM` of transformers: eager, float32, a dynamic cache, all cores."""

    def __init__(self, directory: str | pathlib.Path, threads: int):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self._torch, self._new_cache = torch, transformers.DynamicCache
        self._model = transformers.DeepseekV4ForCausalLM.from_pretrained(
            str(directory), attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.experts = self._model.config._experts_implementation
        self.call_tokens = 0  # per prefill call; 0: all in one
        self._cache = self._saved = None

    def use_experts(self, name: str) -> None:
        """Chooses how the library runs experts, such as "eager" or "grouped_mm"."""
        self._model.set_experts_implementation(name)
        self.experts = name

    def reset(self, batch: int, capacity: int) -> None:
        del batch, capacity  # it grows
        self._cache = self._new_cache(config=self._model.config)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        size = self.call_tokens or tokens.shape[1]
        for start in range(0, tokens.shape[1], size):
            logits = self._call(tokens[:, start : start + size])
        return logits

    def step(self, token: np.ndarray) -> np.ndarray:
        return self._call(token[:, None])

    def _call(self, tokens: np.ndarray) -> np.ndarray:
        ids = self._torch.from_numpy(tokens).long()
        with self._torch.inference_mode():
            out = self._model(ids, cache=self._cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].numpy()

    def save(self) -> None:
        self._saved = self._copy(self._cache)

    def restore(self) -> None:
        self._cache = self._copy(self._saved)

    def _copy(self, cache: object) -> object:
        with self._torch.inference_mode():
            return copy.deepcopy(cache)

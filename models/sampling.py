"""Choosing the next token: greedy, temperature, top-p (nucleus, arXiv 1904.09751)."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampler:
    """temperature 0: greedy. top_p: keep the smallest set of tokens with that probability."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"need temperature >= 0 and 0 < top_p <= 1, got {self}")

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """logits f32[R, V] to tokens i32[R]. Ties: the lowest token."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_p < 1:
            order = jnp.sort(logits, axis=-1)[..., ::-1]
            mass = jnp.cumsum(jax.nn.softmax(order, axis=-1), axis=-1)
            inside = mass - jax.nn.softmax(order, axis=-1) < self.top_p
            floor = jnp.min(jnp.where(inside, order, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits >= floor, logits, -jnp.inf)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)

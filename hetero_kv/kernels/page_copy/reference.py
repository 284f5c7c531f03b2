"""The reference of page copies, in plain jnp: oracle of the kernels, and the path on CPUs.

Pages are [L, P, e, w]; `target` i32[k] are ids of pages, P: no page (refused). See `api`.
"""

import jax
import jax.numpy as jnp

from hetero_kv.kernels.page_copy import checksum


def gather(pages: jax.Array, target: jax.Array, salt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Staged pages [L, k, e, w], zero where refused, and their checksums u32[k]."""
    staged = pages.at[:, target].get(mode="fill", fill_value=0)
    return staged, _sums(staged, salt)


def scatter(
    pages: jax.Array, staged: jax.Array, target: jax.Array, salt: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The pages with those staged written, and the checksums u32[k] of what was staged."""
    return pages.at[:, target].set(staged, mode="drop"), _sums(staged, salt)


def verify(pages: jax.Array, target: jax.Array, salt: jax.Array) -> jax.Array:
    """Checksums u32[k], a layer at a time; of zeros where refused."""
    total = jnp.zeros(target.shape, jnp.uint32)
    for layer in range(pages.shape[0]):
        rows = pages.at[layer, target].get(mode="fill", fill_value=0)
        total = checksum.add(total, rows, salt + jnp.uint32(layer))
    return total


def _sums(staged: jax.Array, salt: jax.Array) -> jax.Array:
    total = jnp.zeros(staged.shape[1], jnp.uint32)
    for layer in range(staged.shape[0]):
        total = checksum.add(total, staged[layer], salt + jnp.uint32(layer))
    return total

"""Checksums of pages notice single words and their order, in every dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.kernels.page_copy import checksum


def of(rows: np.ndarray, salt: int = 0) -> int:
    rows = jnp.asarray(rows)[None]
    return int(checksum.add(jnp.zeros(1, jnp.uint32), rows, salt)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool"])
def test_every_change_and_exchange(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 100, (5, 3)).astype(jnp.dtype(dtype))
    base, seen = of(rows), set()
    for i in range(15):
        changed = rows.copy()
        changed.flat[i] = 0 if changed.flat[i] else 1
        seen.add(of(changed))
    assert len(seen) == 15 and base not in seen
    for i in range(15):
        for j in range(i):
            changed = rows.copy()
            changed.flat[i], changed.flat[j] = rows.flat[j], rows.flat[i]
            assert (of(changed) == base) == (rows.flat[i] == rows.flat[j])


def test_parts_and_signs_count() -> None:
    rows = np.zeros((2, 2), np.float32)
    assert len({of(rows), of(rows, 1), of(rows, 1 << 16), of(-rows), of(rows * np.nan)}) == 5
    with pytest.raises(ValueError, match="4 bytes"):
        checksum.words(jnp.zeros((1, 2), jnp.complex64))

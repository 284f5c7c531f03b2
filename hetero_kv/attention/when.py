"""A conditional that copies nothing."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def when(condition: jax.Array, run: Callable[[], T], otherwise: T) -> T:
    """`run()` where bool[] `condition` holds, else `otherwise` (a pytree of the same shapes).

    A loop of zero or one trips: XLA's conditional would copy every buffer that `run` reads and the
    caller updates in place, for example a whole ring of raw rows per layer and step.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, __: run(), otherwise)

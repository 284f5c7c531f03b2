"""A conditional that copies nothing."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def when(condition: jax.Array, run: Callable[..., T], otherwise: T, *operands: jax.Array) -> T:
    """`run(*operands)` where bool[] `condition` holds, else `otherwise` (of the same shapes).

    A loop of zero or one trips: XLA's conditional would copy every buffer that `run` reads and the
    caller updates in place, for example a whole ring of raw rows per layer and step.

    operands: what the work is done on, cached arrays as they are held: of a part that is taken out
    before, XLA makes copies. What `run` makes of anything else, XLA may do always: in a loop it
    does not change.
    """

    def body(trip: jax.Array, _: T) -> T:
        # To XLA they change with the trip, so the work cannot be moved out in front of the loop.
        _, held = jax.lax.optimization_barrier((trip, operands))
        return run(*held)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, otherwise)

"""Work under a condition is done under it alone, and its result is the one or the other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetero_kv.attention.when import when


def _conditional(x: jax.Array, condition: jax.Array) -> jax.Array:
    """As decoding does it: in a loop over steps, each of which writes a row first."""
    nothing = jnp.zeros(x.shape[1:])

    def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple:
        total, x = carry
        x = x.at[row].set(total)
        return (total + when(condition, lambda x: jnp.sum(jnp.sin(x), 0), nothing, x), x), None

    return jax.lax.scan(step, (nothing, x), jnp.arange(3))[0][0]


def _always(text: str) -> str:
    """The computations of an HLO module that run whatever a loop of zero or one trips decides."""
    bodies = {}
    for part in re.split(r"\n(?=\S)", text):
        name = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", part)
        if name:
            bodies[name.group(1)] = part
    entry = next(name for name, part in bodies.items() if part.startswith("ENTRY"))
    seen, left, loops = [], [(entry, 0)], 0
    while left:
        name, depth = left.pop()
        seen.append(name)
        for line in bodies[name].splitlines()[1:]:
            if " while(" in line:
                loops += 1
                body = re.search(r"body=%?([\w.\-]+)", line).group(1)
                if depth == 0:  # the steps themselves
                    left.append((body, 1))
                continue
            called = re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line)
            left += [(x, depth) for x in called if x in bodies]
    assert loops >= 2, "the steps and the condition are loops"
    return "\n".join(bodies[name] for name in seen)


def test_the_work_is_not_moved_out() -> None:
    x, no = jnp.ones((64, 8)), jnp.array(False)
    text = jax.jit(_conditional).lower(x, no).compile().as_text()
    assert re.search(r" sine\(", text)
    assert not re.search(r" sine\(", _always(text))


@pytest.mark.parametrize("holds", [False, True])
def test_results(holds: bool) -> None:
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    want, held = np.zeros(8), x.astype(float)
    for row in range(3):
        held[row] = want
        want = want + np.sin(held).sum(axis=0) * holds
    found = jax.jit(_conditional)(x, jnp.array(holds))
    np.testing.assert_allclose(found, want, atol=1e-4, rtol=0)

"""Which implementation of an op runs: by name, or by the platform that it is lowered for.

The platform is that of the lowering, never that of the devices at hand, so that a CPU host can
lower for accelerators. Two errors, with two meanings: ValueError, the arguments are wrong;
NotImplementedError, they are right and this backend cannot take them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from hetero_kv.kernels import platform
from hetero_kv.packing import Packed

Implementation = Literal["auto", "reference", "pallas_tpu", "pallas_gpu", "interpret"]
IMPLEMENTATIONS = ("auto", "reference", "pallas_tpu", "pallas_gpu", "interpret")

# What "auto" takes on a platform; the reference on every other. Mosaic GPU needs Hopper or later,
# which a lowering does not know, so there a kernel runs only by its name.
AUTO = {"tpu": "pallas_tpu"}
PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}  # that a kernel can be lowered for


def _anything(*arrays: Any) -> None:
    """Accepts every argument."""


class Backend(NamedTuple):
    """One implementation: both functions take the op's arrays (pytrees).

    check looks at shapes and dtypes only, and raises NotImplementedError where `run` could not;
    prefer does so where it could, and yet "auto" had better not take it.
    packed: whether it takes rows that are `Packed`; without it `check` never sees any.
    """

    run: Callable
    check: Callable[..., None] = _anything
    prefer: Callable[..., None] = _anything
    packed: bool = False

    def accept(self, arrays: tuple) -> None:
        """Raises NotImplementedError where `run` could not take the arrays."""
        if not self.packed and (found := sorted(_packings(arrays))):
            raise NotImplementedError(
                f"this implementation does not read packed rows ({', '.join(found)}); "
                "implementation='reference' does, and 'auto' takes it"
            )
        self.check(*arrays)


def _packings(arrays: tuple) -> set[str]:
    leaves = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, Packed))
    return {x.packing.kind for x in leaves if isinstance(x, Packed)}


def call(op: str, backends: Mapping[str, Backend], implementation: str, *arrays: Any) -> Any:
    """Runs an op.

    Args:
        op: its name, for messages.
        backends: by name, all of IMPLEMENTATIONS but "auto" that the op has.
        implementation: one of IMPLEMENTATIONS. "auto" takes the kernel of the lowering platform
            where there is one that can, else the reference. Any other name runs that or raises.
        *arrays: what the backends take.

    Raises:
        ValueError: there is no implementation of that name.
        NotImplementedError: the named one cannot take these shapes or dtypes, or is for another
            platform. The latter is known when the program is lowered, and raised then.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: {implementation=}; use one of {IMPLEMENTATIONS}")
    if implementation != "auto":
        if implementation not in backends:
            raise NotImplementedError(f"{op} has no implementation {implementation!r}")
        backend = backends[implementation]
        backend.accept(arrays)
        if implementation in PLATFORM:
            arrays = platform.only_on(PLATFORM[implementation], f"{op}/{implementation}", arrays)
        return backend.run(*arrays)
    usable = {
        where: backends[name].run
        for where, name in AUTO.items()
        if name in backends and _can(backends[name], arrays)
    }
    reference = backends["reference"].run
    if not usable:
        return reference(*arrays)
    return jax.lax.platform_dependent(*arrays, **usable, default=reference)


def _can(backend: Backend, arrays: tuple) -> bool:
    try:
        backend.accept(arrays)
        backend.prefer(*arrays)
    except NotImplementedError:
        return False
    return True

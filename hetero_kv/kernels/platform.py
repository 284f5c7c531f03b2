"""A mark in a program: what follows can be lowered for one platform only.

Without it a kernel that is lowered for another platform fails with a message about interpreters, or
about a module that is not there.
"""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")

_mark = Primitive("only_on")
_mark.def_impl(lambda x, **params: jax.jit(lambda y: _mark.bind(y, **params))(x))
_mark.def_abstract_eval(lambda x, **_: x)
batching.defvectorized(_mark)
ad.deflinear2(_mark, lambda cotangent, *_, **__: [cotangent])


def only_on(platform: str, what: str, tree: Tree) -> Tree:
    """The same arrays. Lowering for a platform other than "tpu" or "cuda" fails.

    Args:
        platform: that of the lowering.
        what: of which kernel, for the message.

    Raises:
        NotImplementedError: when the program is lowered for another platform.
    """
    leaves, form = jax.tree.flatten(tree)
    smallest = min((i for i, x in enumerate(leaves) if isinstance(x, jax.Array)), key=_size(leaves))
    leaves[smallest] = _mark.bind(leaves[smallest], platform=platform, what=what)
    return jax.tree.unflatten(form, leaves)


def _size(leaves: list) -> Any:
    return lambda i: leaves[i].size


def _lower(context: Any, x: Any, *, platform: str, what: str) -> list:
    names = context.module_context.platforms
    if tuple(names) != (platform,):
        raise NotImplementedError(
            f"{what} is a kernel for {platform!r}, and this program is lowered for "
            f"{', '.join(map(repr, names))}; use implementation='auto', or 'interpret' on a CPU"
        )
    return [x]


mlir.register_lowering(_mark, _lower)

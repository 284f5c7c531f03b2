"""Random weights of any model."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.params import Params, ParamSpec
from models.decoder import Decoder


def random_params(made: Decoder, seed: int = 0) -> Params:
    """Weights in which nothing is constant, and logits of magnitude about 8.

    Made by numpy: `init` would compile a program for every shape.
    """

    def draw(path: tuple, value: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        spec = made.param_specs()
        for entry in path:
            spec = spec[entry.key]
        return jnp.asarray(_draw(rng, spec, value.shape, name), value.dtype)

    return jax.tree_util.tree_map_with_path(draw, made.abstract_params())


def _draw(
    rng: np.random.Generator, spec: ParamSpec, shape: tuple[int, ...], name: str
) -> np.ndarray:
    if spec.init == "expert_table":
        rows = np.prod(shape[:-1])
        picks = [rng.permutation(int(spec.scale))[: shape[-1]] for _ in range(rows)]
        return np.reshape(picks, shape)
    noise = rng.normal(size=shape)
    if spec.init in ("ones", "zeros"):
        return 0.4 * noise + (spec.init == "ones")
    gain = 2.0 if name == "['head']" else 1.0
    return noise * spec.scale * (gain / math.sqrt(spec.shape[-2]) if spec.init == "fan_in" else 1)

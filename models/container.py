"""A Flax NNX module around a decoder's weights, for users of NNX optimisers and filters.

The library itself passes plain nested dicts; NNX is a container only, with nothing stateful but the
weights. Split it once, outside of jit (`nnx.split`), and pass the pure dict to compiled functions.
"""

import jax
from flax import nnx

from hetero_kv.params import Params
from models.decoder import Decoder


class Weights(nnx.Module):
    """A nested dict of arrays as nested modules of `nnx.Param`."""

    def __init__(self, params: Params):
        for name, value in params.items():
            setattr(self, name, Weights(value) if isinstance(value, dict) else nnx.Param(value))


class DecoderModule(nnx.Module):
    """A decoder with its weights: `module(tokens)` is `model.forward(params, tokens)`."""

    def __init__(self, model: Decoder, params: Params):
        self.model = model
        self.weights = Weights(params)

    def params(self) -> Params:
        """The weights as the plain nested dict that every other function takes."""
        return nnx.to_pure_dict(nnx.state(self.weights))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens i32[B, T] to logits f32[B, T, V]."""
        return self.model.forward(self.params(), tokens)

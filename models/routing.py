"""Which experts a token goes to, and with what weights.

DeepSeek-V4: sqrt(softplus) scores, a bias that acts on the choice only, normalised weights.
DeepSeek-V3: sigmoid scores, and only experts of the best groups. gpt-oss: a softmax over the logits
that were picked.
"""

import dataclasses

import jax
import jax.numpy as jnp

from hetero_kv.attention.fields import Fields
from hetero_kv.params import Params, ParamSpec, ParamTree

SCORES = {
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
    "sigmoid": jax.nn.sigmoid,
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "logits": lambda logits: logits,  # weights are the softmax over those picked
}
GROUP_BEST = 2  # a group is as good as the sum of its best two


@dataclasses.dataclass(frozen=True)
class Router:
    """score: one of SCORES. With `groups` > 1 experts of the best `groups_kept` groups count."""

    score: str = "sqrt_softplus"
    groups: int = 1
    groups_kept: int = 1
    normalise: bool = True  # weights of a token add up to 1 (before the model's factor)
    choice_bias: bool = True  # a learned bias that acts on the choice only
    logit_bias: bool = False

    @classmethod
    def of(cls, fields: Fields) -> "Router":
        """From an MLP type's own fields: router_score, router_groups, router_groups_kept,
        router_normalise, router_choice_bias, router_logit_bias."""
        default = {field.name: field.default for field in dataclasses.fields(cls)}
        return cls(**{name: fields.get(f"router_{name}", x) for name, x in default.items()})

    def check(self, experts: int, picks: int) -> None:
        """Raises ValueError where experts cannot be chosen so."""
        if self.score not in SCORES:
            raise ValueError(f"unknown router_score {self.score!r}; use one of {tuple(SCORES)}")
        if self.groups == 1:
            return
        size, rest = divmod(experts, self.groups)
        if rest or size < GROUP_BEST or not 1 <= self.groups_kept <= self.groups:
            raise ValueError(
                f"{self.groups=} must divide {experts=} into groups of {GROUP_BEST} or more, and "
                f"{self.groups_kept=} be one of 1..{self.groups}"
            )
        if picks > size * self.groups_kept:
            raise ValueError(
                f"{picks=} experts of {self.groups_kept} groups of {size} are too many"
            )

    def params(self, experts: int) -> ParamTree:
        """The biases."""
        names = {"bias": self.choice_bias, "logit_bias": self.logit_bias}
        spec = ParamSpec((experts,), "zeros", dtype="float32")
        return {name: spec for name, there in names.items() if there}

    def pick(
        self, params: Params, logits: jax.Array, picks: int, chosen: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Experts i32[n, k] and their weights f32[n, k] for logits f32[n, E].

        chosen: i32[n, k], experts that are fixed already, or None.
        """
        if self.logit_bias:
            logits = logits + params["logit_bias"]
        scores = SCORES[self.score](logits)
        index = chosen
        if index is None:
            ranked = scores + params["bias"] if self.choice_bias else scores
            _, index = jax.lax.top_k(self._within_groups(ranked), picks)
        weights = jnp.take_along_axis(scores, index, axis=-1)
        if self.score == "logits":
            return index, jax.nn.softmax(weights, axis=-1)
        if self.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return index, weights

    def _within_groups(self, ranked: jax.Array) -> jax.Array:
        """f32[n, E] with the experts of all but the best groups at -inf."""
        if self.groups == 1:
            return ranked
        grouped = ranked.reshape(ranked.shape[0], self.groups, -1)
        worth = jnp.sum(jax.lax.top_k(grouped, GROUP_BEST)[0], axis=-1)
        _, kept = jax.lax.top_k(worth, self.groups_kept)
        keep = jnp.any(kept[..., None] == jnp.arange(self.groups), axis=1)
        return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(ranked.shape)


ROUTER = Router()

"""What a model's weights and cached state take, by shapes alone: nothing is allocated.

python -m experiments.geometry --config=configs/geometry.py:v4_pro
"""

import math

import jax

import models
from experiments import cli
from experiments.geometry_config import GeometryConfig
from hetero_kv.contract import CacheSpec
from hetero_kv.prefix.policy import Policy

GIB = 1 << 30


def by_component(spec: CacheSpec, context: int) -> dict[str, int]:
    """Bytes of one sequence of `context` tokens."""
    found: dict[str, int] = {}
    for slot in spec.slots():
        leaf = slot.leaf
        size = slot.repeats * max(leaf.row_count(context), 1) * leaf.row_bytes
        found[leaf.component] = found.get(leaf.component, 0) + size
    return found


def describe(config: GeometryConfig) -> dict[str, object]:
    """Sizes in bytes, lengths in tokens.

    "checkpoint_bytes" is what a store keeps at one position under the policy: nothing where it
    takes no checkpoints. "replay" is what then runs again at a hit; -1: everything.
    """
    config.check()
    model = models.build(config.model)
    spec, policy = model.cache_spec, Policy.named(config.policy)
    cache = jax.eval_shape(lambda: model.init_cache(1, config.context))
    weights = jax.tree.leaves(model.abstract_params())
    replays = policy.checkpoints.replay
    exact = spec.replay_tokens(round_up=False)
    bound = policy.checkpoints.bound
    replay = (bound or exact) if replays else 0
    keeps = bool(policy.checkpoints.points(config.context, spec))
    return {
        "name": config.name,
        "layers": len(config.model.layer_types),
        "parameters": sum(math.prod(x.shape) for x in weights),
        "weight_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in weights),
        "context": config.context,
        "cache_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
        "cache_bytes_by_component": by_component(spec, config.context),
        "history_bytes_per_token": spec.history_bytes_per_token(),
        "block_bytes": spec.block_bytes(),
        "granularity": spec.granularity,
        "policy": config.policy,
        "checkpoint_bytes": spec.checkpoint_bytes() if keeps else 0,
        "replay": -1 if math.isinf(replay) else int(replay),
        "exact_replay": -1 if math.isinf(exact) else int(exact),
    }


def text(found: dict[str, object]) -> str:
    """The same for humans."""
    lines = [
        f"{found['name']}: {found['layers']} layers, {found['parameters'] / 1e9:.1f}B parameters",
        f"cache at {found['context']:,} tokens: {found['cache_bytes'] / GIB:.2f} GiB",
        *(
            f"  {name}: {size / GIB:.3f} GiB"
            for name, size in found["cache_bytes_by_component"].items()
        ),
        f"history per token: {found['history_bytes_per_token']:,.1f} bytes",
        f"history group of a block: {found['block_bytes']:,} bytes; G = {found['granularity']}",
        f"policy {found['policy']}: {found['checkpoint_bytes']:,} bytes a checkpoint, "
        f"{found['replay']:,} tokens replayed at a hit (exact: {found['exact_replay']:,})",
    ]
    return "\n".join(lines)


def main(config: GeometryConfig) -> None:
    """Prints the sizes."""
    print(text(describe(config)))


if __name__ == "__main__":
    cli.run(main, default="configs/geometry.py")

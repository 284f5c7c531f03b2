"""What bounded replay costs in accuracy: an approximate resume against the cold run."""

from collections.abc import Sequence

import jax
import numpy as np

from hetero_kv.contract import Evidence
from hetero_kv.params import Params
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.state import Cache
from models import Decoder

HOST_BYTES = 1 << 32  # more than the history of any prompt that is compared here


def replay_errors(
    model: Decoder, params: Params, tokens: np.ndarray, bounds: Sequence[int]
) -> list[dict]:
    """Resumes the prompt i32[n] once per bound, at the largest length that it can be resumed at.

    Returns a row per bound:
        bound, replayed: tokens asked for, and run. resumed: tokens. approximate: bool.
        max_logit_difference: largest absolute difference of the logits after the resumed tokens
            to those of the cold run.
        live_rows: per component that the replay rebuilds, the largest absolute difference of a
            live row at the resumed length to the cold run's.

    Raises ValueError where the prompt is too short for a replay.
    """
    tokens, spec = np.asarray(tokens, np.int32), model.cache_spec
    top = spec.largest_boundary(len(tokens))
    identity = Identity.of(spec, params, model.config, batch=1)
    cold = model.init_cache(batch=1, capacity=len(tokens))
    if top:
        _, cold = model.prefill(params, tokens[None, :top], cold, logits="none")
    stores = []
    for bound in bounds:
        policy = f"bounded:{bound}"
        store = PrefixStore(spec, identity, host_bytes=HOST_BYTES, policy=policy)
        store.publish(tokens, cold)
        stores.append(store)
    reference = jax.device_get(cold)
    want = np.asarray(model.prefill(params, tokens[None, top:], cold)[0])
    rows = []
    for bound, store in zip(bounds, stores, strict=True):
        cache = model.init_cache(batch=1, capacity=len(tokens))
        with store.lookup(tokens) as lease:
            if lease.replay is None:
                raise ValueError(
                    f"a prompt of {len(tokens)} tokens does not resume by a replay of {bound}; "
                    f"use one of more than {store.minimum_resumable}"
                )
            start, stop = lease.replay
            cache = store.restore(lease, cache)
        cache = model.replay(params, tokens[None], cache, start, stop)
        differences = _live_differences(model, jax.device_get(cache), reference, stop)
        got = np.asarray(model.prefill(params, tokens[None, stop:], cache)[0])
        rows.append(
            {
                "bound": bound,
                "replayed": stop - start,
                "resumed": stop,
                "approximate": lease.approximate,
                "max_logit_difference": float(np.max(np.abs(got - want))),
                "live_rows": differences,
            }
        )
        store.close()
    return rows


def _live_differences(
    model: Decoder, cache: Cache, reference: Cache, length: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for slot in model.cache_spec.slots():
        is_state = model.cache_spec.group_of(slot) == "checkpoint"
        if not is_state or isinstance(slot.leaf.contract, Evidence):
            continue
        a, b = (np.asarray(x.leaf(slot), np.float32)[:, 0] for x in (cache, reference))
        if slot.leaf.rows:
            live = slot.leaf.live_rows(length)
            a, b = a[:, live], b[:, live]
        component = slot.leaf.component
        worst = float(np.max(np.abs(a - b), initial=0.0))
        found[component] = max(found.get(component, 0.0), worst)
    return found

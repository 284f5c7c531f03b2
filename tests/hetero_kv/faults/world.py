"""A prefix of the synthetic cache, and the faults that are put into it."""

import dataclasses
import functools

import numpy as np

from hetero_kv.faults.forge import Held, Material
from hetero_kv.faults.inject import Injector
from hetero_kv.prefix.keys import block_keys
from tests.hetero_kv.prefix import world
from tests.hetero_kv.prefix.world import IDENTITY, PROMPTS, SPEC, WHO

A, OTHER, _ = WHO
STEM, DONOR = PROMPTS[0], PROMPTS[2] + 7000
LENGTH = 2 * SPEC.granularity


@functools.cache
def injector() -> Injector:
    """Faults of the first LENGTH tokens of STEM, of tenant A."""

    def held(who, tokens: np.ndarray, length: int) -> Held:
        return Held.of(SPEC, world.cold(who, tokens, length))

    return Injector(
        SPEC,
        Material(
            target=held(A, STEM, LENGTH),
            before=held(A, STEM, LENGTH - SPEC.granularity),
            donor=held(A, DONOR, LENGTH),
            donor_end=held(A, DONOR, LENGTH + 5),
            other=held(OTHER, STEM, LENGTH),
        ),
        keys=block_keys(IDENTITY, STEM, A.tenant),
        donor=block_keys(IDENTITY, DONOR, A.tenant),
        foreign=block_keys(IDENTITY, STEM, OTHER.tenant),
        old=block_keys(dataclasses.replace(IDENTITY, weight_epoch=1), STEM, A.tenant),
    )

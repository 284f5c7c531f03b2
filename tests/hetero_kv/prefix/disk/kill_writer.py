"""A process that writes until it is killed, and tells what it has been promised."""

import numpy as np

from hetero_kv.prefix.disk.lock import LockedError
from tests.hetero_kv.prefix.disk import objects

NUMBERS = 150
CAPACITY = 1 << 18


def work(pipe, directory, seed, background):
    """Sends ("put", i) and ("drop", i) before doing it, ("held", numbers) after a flush."""
    random = np.random.default_rng(seed)
    try:
        rows = int(random.choice([1, 6, 512]))  # how far the index may be behind
        tier = objects.make(directory, capacity=CAPACITY, background=background, index_rows=rows)
    except LockedError as error:  # the lock must not outlive its process
        pipe.send(("failed", str(error)))
        return
    pipe.send(("open", objects.held(tier)))
    while True:
        i = int(random.integers(NUMBERS))
        ticket = tier.find(objects.kind_of(i), objects.key(i))
        if ticket is None:
            pipe.send(("put", i))
            objects.put(tier, i)
        elif random.random() < 0.7:
            pipe.send(("drop", i))
            tier.drop(ticket)
        elif objects.read(tier, i) is not True:
            pipe.send(("failed", f"object {i}"))
        if random.random() < 0.1:
            flushed = tier.flush()
            if not flushed.ok:
                pipe.send(("failed", flushed.failure))
            pipe.send(("held", objects.held(tier)))

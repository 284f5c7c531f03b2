"""Pallas kernels of the attention core, each beside a reference in plain jnp.

One package per op: `reference.py` (oracle and CPU path), `pallas_tpu.py` (Mosaic TPU),
`pallas_gpu.py` (Mosaic GPU, Hopper and later), `api.py` (documentation, validation, dispatch).
Shared: `dispatch` (which of them runs), `tuning` (tile sizes per device kind), `interpret`.
"""

"""Switching off one check at a time, by exchanging the one function that makes it.

For experiments and tests only: nothing here is reached by a program that does not import it. The
exchange holds in the whole process while the context is open.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv import rows as rows_module
from hetero_kv import validate
from hetero_kv.contract import CacheSpec
from hetero_kv.faults import kinds
from hetero_kv.prefix import plan as plan_module
from hetero_kv.prefix import store as store_module
from hetero_kv.prefix import upkeep as upkeep_module
from hetero_kv.prefix.disk import tier as disk_module
from hetero_kv.prefix.disk.record import Header
from hetero_kv.prefix.host import CORRUPT, STALE, Fetched, HostTier, Ticket
from hetero_kv.prefix.identity import Identity
from hetero_kv.prefix.lease import Lease
from hetero_kv.prefix.payload import ArrayPayload
from hetero_kv.prefix.plan import HOST, Plan
from hetero_kv.prefix.restore import Delivered, Fetcher
from hetero_kv.prefix.transfer import Transfer
from hetero_kv.state import Cache

Seals = dict[tuple[int, ...], bytes]  # checksums of a payload -> the label it was sealed under


@contextlib.contextmanager
def switched_off(names: Iterable[str], identity: Identity) -> Iterator[None]:
    """Inside, the checks of these names (see `kinds.CHECKS`) let everything pass.

    All that a store does in a trial has to be inside, publishing included. EVIDENCE takes effect
    for functions that are traced inside; AUDIT is a mode of the engine, so nothing is done here.

    identity: the one that keys are made of while IDENTITY is off, whoever asks.
    """
    off = frozenset(names)
    unknown = off - set(kinds.CHECKS)
    if unknown:
        raise ValueError(f"no such checks: {sorted(unknown)}; there are {kinds.CHECKS}")
    with contextlib.ExitStack() as stack:
        seals: Seals = {}
        for owner, name, make in _exchanges(off, seals, identity):
            stack.enter_context(_exchanged(owner, name, make))
        yield


def _exchanges(off: frozenset[str], seals: Seals, identity: Identity) -> Iterator[tuple]:
    """(owner, name, original -> stand-in)."""
    if off & {kinds.CHECKSUM, kinds.LABEL}:
        yield ArrayPayload, "seal", lambda real: _recording(real, seals)
        passes = _passes(off, seals)
        yield ArrayPayload, "damaged", lambda real: _payload_damaged(real, passes)
        yield Header, "damaged", lambda real: _header_damaged(real, passes)
    if kinds.TICKET in off:
        yield HostTier, "read", lambda real: read_whatever_is_there
        yield disk_module, "fetched", lambda real: _any_generation(real)
    if kinds.EVIDENCE in off:
        yield rows_module, "validate", lambda real: _Blind()
        yield rows_module, "_wrong_length", lambda real: lambda wrong: jnp.uint32(0)
    if kinds.LAYOUT in off:
        yield Transfer, "wrong_layout", lambda real: lambda self, payload, expected: ""
    if kinds.POSITIONS in off:
        yield Transfer, "wrong_positions", lambda real: lambda self, payload, length: ""
    if kinds.RESTORED in off:
        yield Lease, "brought", lambda real: property(lambda self: None, lambda self, value: None)
    if kinds.IDENTITY in off:
        yield upkeep_module, "block_keys", lambda real: _one_for_all(real, identity)
        yield Fetcher, "_is_old", lambda real: lambda self, lease: False
    if kinds.JOINT in off:
        yield store_module, "plan", lambda real: _as_far_as_keys_match(real)
    if kinds.DELIVERED in off:
        yield Fetcher, "_read_into", lambda real: _short_read_ignored


@contextlib.contextmanager
def _exchanged(owner: Any, name: str, make: Callable) -> Iterator[None]:
    real = owner.__dict__[name]
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


# -- checksum and label ----------------------------------------------------------------------------
#
# One checksum covers bytes and label. To switch off either alone, every seal is recorded: the label
# that a checksum was made with can be told without the bytes.


def _recording(real: classmethod, seals: Seals) -> classmethod:
    @classmethod
    def seal(cls, layout, label: bytes, buffer: np.ndarray) -> ArrayPayload:
        payload = real.__get__(None, cls)(layout, label, buffer)
        seals[payload.checksums] = label
        return payload

    return seal


def _passes(off: frozenset[str], seals: Seals) -> Callable[..., bool]:
    """(checksums, label asked for, label -> "" or the damaged component) -> whether it passes."""

    def passes(checksums: tuple, label: bytes, real: Callable[[bytes], str]) -> bool:
        of = seals.get(checksums)
        bytes_pass = kinds.CHECKSUM in off or (of is not None and not real(of))
        label_passes = kinds.LABEL in off or of == label
        return bytes_pass and label_passes

    return passes


def _payload_damaged(real: Callable, passes: Callable) -> Callable:
    def damaged(self: ArrayPayload, label: bytes) -> str:
        if passes(self.checksums, label, lambda x: real(self, x)):
            return ""
        return real(self, label) or self.layout.components[0][0]

    return damaged


def _header_damaged(real: Callable, passes: Callable) -> Callable:
    def damaged(self: Header, payload: np.ndarray, label: bytes | None = None) -> str:
        checksums = tuple(x.checksum for x in self.components)
        name = self.label if label is None else label
        if passes(checksums, name, lambda x: real(self, payload, x)):
            return ""
        return real(self, payload, label) or self.components[0].name

    return damaged


# -- generation ------------------------------------------------------------------------------------


def read_whatever_is_there(self: HostTier, ticket: Ticket, label: bytes) -> Fetched:
    """`HostTier.read` without its look at the generation."""
    payload = self._payloads[ticket.slot]
    if payload is None:
        return Fetched(None, STALE)
    copy = payload.copy()
    component = copy.damaged(label)
    return Fetched(None, CORRUPT, component) if component else Fetched(copy)


def _any_generation(real: Callable) -> Callable:
    def fetched(got, layout, generation: int) -> Fetched:
        return real(got, layout, got.header.generation if got.header else generation)

    return fetched


# -- evidence --------------------------------------------------------------------------------------


class _Blind:
    """Stands in for the module `validate` within `rows`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(validate, name)

    @staticmethod
    def evidence(
        spec: CacheSpec, cache: Cache, rows: jax.Array | None = None, finite: bool = False
    ) -> validate.Verdict:
        """Nothing is wrong."""
        shape = (cache.batch, len(validate.components(spec)))
        return validate.Verdict(jnp.zeros(shape, jnp.uint32), jnp.ones(cache.batch, bool))


# -- keys, plan, fetch -----------------------------------------------------------------------------


def _one_for_all(real: Callable, identity: Identity) -> Callable:
    def block_keys(theirs, tokens, tenant="", extra=None, digest=None):
        return real(identity, tokens, "", None, digest)

    return block_keys


def _as_far_as_keys_match(real: Callable) -> Callable:
    def plan(geometry, prompt_length, presence, **options) -> Plan:
        found = real(geometry, prompt_length, presence, **options)
        limit = options.get("limit")
        blind = plan_module.plan_hash_only(geometry, prompt_length, presence)
        top = blind.resumable_length if limit is None else min(limit, blind.resumable_length)
        top = top // geometry.granularity * geometry.granularity
        if top <= found.resumable_length:
            return found
        routes = {**blind.routes, **dict.fromkeys(geometry.checkpoint, HOST)}
        return found._replace(resumable_length=top, routes=routes, reasons=(), replay=None)

    return plan


def _short_read_ignored(self: Fetcher, got: list, groups: list, length: int):
    """What could not be read counts as read: its place holds zeros."""
    for group in groups:
        fetched, tier = self.read_group(group)
        payload = fetched.payload
        if payload is None:
            layout = self._transfer.layout_of(group.kind, group.node.depth)
            buffer = np.zeros(layout.nbytes, np.uint8)
            payload = ArrayPayload.seal(layout, group.label, buffer)
            tier = HOST
        failure, component = self.wrong(group, payload, length)
        if failure:
            self.drop(group, failure, component)
            return component, failure
        got.append(Delivered(payload, tier))
    return None

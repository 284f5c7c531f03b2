"""Splits a prefill into calls of a few fixed sizes that end on the absolute chunk grid."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from hetero_kv.pages import views
from hetero_kv.state import Cache

Run = Callable[..., tuple[jax.Array, Cache]]


def plan(length: np.ndarray, valid: np.ndarray, chunk: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(offset into the tokens, tokens that run) of every call, i64[R] each.

    A row's call ends at the next multiple of `chunk` or at its last token.
    """
    done, calls = np.zeros_like(valid), []
    while (done < valid).any():
        room = chunk - (length + done) % chunk
        count = np.minimum(room, valid - done)
        calls.append((done, count))
        done = done + count
    return calls


def by_size(count: np.ndarray, sizes: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """(columns, tokens that run i64[R]) of the calls for one step of a plan, smallest first.

    A row runs in the smallest call that fits it, whatever its batch mates need: the size of a call
    decides the last bits of its result.
    """
    fits = np.searchsorted(sizes, count)
    wanted = {int(i) for i in fits[count > 0]}
    return [(sizes[i], np.where(fits == i, count, 0)) for i in sorted(wanted)]


def drive(
    run: Run,
    tokens: jax.Array | np.ndarray,
    valid: jax.Array | np.ndarray | None,
    cache: Cache,
    chunk: int,
    sizes: tuple[int, ...],
    logits: str,
    refuse: bool = True,
) -> tuple[jax.Array, Cache]:
    """Runs `run(tokens, count, cache, first, logits=…)` over all pieces; see `Decoder.prefill`.

    refuse: refuse rows whose pages do not suffice; False: `run` or the caller sees to them.
    """
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits must be 'all', 'last' or 'none', got {logits!r}")
    if any(isinstance(x, jax.core.Tracer) for x in (tokens, valid, cache.length)):
        return _traced(run, tokens, valid, cache, chunk, logits, refuse)
    tokens = np.asarray(tokens, np.int32)
    rows, size = tokens.shape
    valid = np.full(rows, size) if valid is None else np.asarray(valid, np.int64)
    length = np.asarray(cache.length).astype(np.int64)
    if valid.shape != (rows,) or (valid < 0).any() or (valid > size).any():
        raise ValueError(f"valid must be {rows} numbers in 0..{size}, got {valid}")
    if (length + valid > cache.capacity).any():
        raise ValueError(
            f"prefill would not fit: length {length} + {valid} tokens > capacity "
            f"{cache.capacity}; make the cache larger"
        )
    if refuse:
        views.check_suffices(cache, valid)
    out = _Logits(rows, size, logits)
    first = np.zeros(rows, np.int32)
    calls = plan(length, valid, chunk)
    if not calls:
        one = tokens[:, :1], valid.astype(np.int32), cache, first
        return _no_logits(run, *one, logits, size), cache
    for offset, count in calls:
        for columns, some in by_size(count, sizes):
            index = np.minimum(offset[:, None] + np.arange(columns), size - 1)
            part = np.take_along_axis(tokens, index, axis=1)
            got, cache = run(part, some.astype(np.int32), cache, first, logits=logits)
            out.add(got, offset, some)
    return out.result(), cache


class _Logits:
    """Collects the logits of the calls on the device."""

    def __init__(self, rows: int, size: int, kind: str):
        self.rows, self.size, self.kind = rows, size, kind
        self.parts: list[tuple[jax.Array, np.ndarray, np.ndarray]] = []
        self.last: jax.Array | None = None

    def add(self, got: jax.Array, offset: np.ndarray, count: np.ndarray) -> None:
        if self.kind == "all":
            self.parts.append((got, offset, count))
        elif self.last is None or (count > 0).all():
            moved = (count > 0)[:, None]
            self.last = got if moved.all() else jnp.where(moved, got, 0.0)
        else:
            self.last = jnp.where((count > 0)[:, None], got, self.last)

    def result(self) -> jax.Array:
        if self.kind != "all":
            return self.last
        arrays = [got for got, _, _ in self.parts]
        if (
            len(arrays) == 1
            and (self.parts[0][2] == self.size).all()
            and arrays[0].shape[1] == self.size
        ):
            return arrays[0]
        return _picked(arrays, self._columns())

    def _columns(self) -> np.ndarray:
        """i32[R, S]: the column, of all calls' side by side, that has a token's logits."""
        widths = [got.shape[1] for got, _, _ in self.parts]
        index = np.full((self.rows, self.size), sum(widths), np.int32)
        starts = np.cumsum([0, *widths])
        for start, (_, offset, count) in zip(starts, self.parts, strict=False):
            for r in np.flatnonzero(count):
                index[r, offset[r] : offset[r] + count[r]] = start + np.arange(count[r])
        return index


@jax.jit  # one program: a token's logits are in another place for every split
def _picked(parts: list[jax.Array], index: np.ndarray) -> jax.Array:
    """Columns of f32[R, c, V] side by side at i32[R, S]; 0 where there is none."""
    columns = jnp.concatenate(parts, axis=1)
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=0))(columns, index)


def _traced(
    run: Run,
    tokens: jax.Array,
    valid: jax.Array | None,
    cache: Cache,
    chunk: int,
    logits: str,
    refuse: bool,
) -> tuple[jax.Array, Cache]:
    """The same split inside a trace, where lengths are unknown: as many calls as can be needed."""
    rows, size = tokens.shape
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.full(rows, size, jnp.int32) if valid is None else jnp.asarray(valid, jnp.int32)
    fits = cache.length + valid <= cache.capacity
    if refuse:
        fits &= views.suffices(cache, cache.length, cache.length + valid)
    valid = jnp.where(fits, valid, 0)
    first, batch = jnp.zeros(rows, jnp.int32), jnp.arange(rows)[:, None]
    column = jnp.arange(chunk, dtype=jnp.int32)

    def piece(cache: Cache, done: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next tokens of every row, and how many of them run."""
        count = jnp.minimum(chunk - cache.length % chunk, valid - done)
        index = jnp.minimum(done[:, None] + column, size - 1)
        return jnp.take_along_axis(tokens, index, axis=1), count

    def body(carry: tuple, _: None) -> tuple:
        done, cache, out = carry
        part, count = piece(cache, done)
        got, cache = run(part, count, cache, first, logits=logits)
        if logits == "all":
            place = jnp.where(column < count[:, None], done[:, None] + column, size)
            out = out.at[batch, place].set(got, mode="drop")
        else:
            out = jnp.where((count > 0)[:, None], got, out)
        return (done + count, cache, out), None

    done = jnp.zeros(rows, jnp.int32)
    empty = _no_logits(run, *piece(cache, done), cache, first, logits, size)
    most = (size - 1) // chunk + 2 if size > 1 else 1
    (_, cache, out), _ = jax.lax.scan(body, (done, cache, empty), None, length=most)
    return out, cache


def _no_logits(run: Run, part, count, cache, first, logits: str, size: int) -> jax.Array:
    """Zeros in the shape of a prefill's logits; nothing runs."""
    got, _ = jax.eval_shape(lambda *args: run(*args, logits=logits), part, count, cache, first)
    shape = (got.shape[0], size, got.shape[-1]) if logits == "all" else got.shape
    return jnp.zeros(shape, got.dtype)

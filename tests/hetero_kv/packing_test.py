"""Packed rows equal an oracle written from the formats' tables, and come back to the same bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_kv.packing import LOWEST, POISON, Packing
from tests import variants
from tests.oracle import packing as reference
from tests.oracle.packing import E2M1, E4M3

# By name: a published row and rows of other sizes, one with several groups each.
PACKINGS = {
    "v4 entry": Packing("fp8_rope", 512, 64),
    "small entry": Packing("fp8_rope", 12, 8),
    "entry without rope": Packing("fp8_rope", 128),
    "v3.2 latent": Packing("fp8_f32", 576, 64),
    "v3.2 index key": Packing("fp8_f32", 128),
    "several heads": Packing("fp8_f32", 48, group=12),
    "v4 index key": Packing("fp4", 128),
    "small index key": Packing("fp4", 6),
    "window": Packing("int8", 512),
    "window of heads": Packing("int8", 21, group=7),
}
each = pytest.mark.parametrize("name", PACKINGS)


@functools.cache
def compiled(packing: Packing):
    return jax.jit(packing.pack), jax.jit(packing.unpack)


def pack(packing: Packing, rows: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(packing)[0](np.asarray(rows, np.float32)))


def unpack(packing: Packing, packed: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(packing)[1](packed))


def oracle(packing: Packing, row: np.ndarray) -> np.ndarray:
    """The bytes u8[bytes] of one row."""
    return reference.pack(packing.kind, row, packing.rope, packing.group)


def various(packing: Packing, count: int, seed: int = 0) -> np.ndarray:
    """Rows of all magnitudes, with zeros, ties, subnormals, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    shape = (count, packing.width)
    power = rng.integers(-140, 126, (count, 1)) + rng.integers(-14, 2, shape)
    rows = np.ldexp(rng.normal(size=shape), power).astype(np.float32)
    coarse = np.rint(rng.normal(size=shape) * 64) / 16  # many are halfway between two codes
    rows = np.where(np.arange(count)[:, None] % 3 == 0, coarse, rows)
    rows[rng.random(shape) < 0.1] = 0.0
    odd = np.array([np.nan, np.inf, -np.inf, 2.0**127, 1e-40, -0.0])
    at = rng.random(shape) < 0.3 / packing.width
    return np.where(at, rng.choice(odd, shape), rows).astype(np.float32)


@pytest.mark.parametrize(
    "name, size",
    [("v4 entry", 584), ("v3.2 latent", 656), ("v3.2 index key", 132), ("v4 index key", 68)],
)
def test_published_rows_have_the_published_bytes(name: str, size: int) -> None:
    assert PACKINGS[name].bytes == size


def test_a_published_row_by_hand() -> None:
    row = np.zeros(512)
    row[0], row[1], row[64] = 448, -1, 2.0**-6  # in the first group, and alone in the second
    row[448], row[511] = 1.0, -2.0
    packed = pack(Packing("fp8_rope", 512, 64), row)
    want = np.zeros(584, np.uint8)
    want[0], want[1], want[64] = 0x7E, 0xB8, 0x78  # 448 and -1 at scale 1; 256 * 2^-14
    want[448:450], want[574:576] = (0x80, 0x3F), (0x00, 0xC0)
    want[576:583] = [127, 127 - 14, *[127 + LOWEST] * 5]
    np.testing.assert_array_equal(packed, want)


@each
def test_bytes_are_the_oracles(name: str) -> None:
    packing = PACKINGS[name]
    rows = various(packing, 60)
    got = pack(packing, rows)
    assert got.shape == (60, packing.bytes)
    read = unpack(packing, got)
    for row, found, values in zip(rows, got, read, strict=True):
        np.testing.assert_array_equal(found, oracle(packing, row))
        want = reference.read(packing.kind, row, packing.rope, packing.group)
        np.testing.assert_array_equal(values, want.astype(np.float32))


@each
def test_what_is_read_packs_to_the_same_bytes(name: str) -> None:
    packing = PACKINGS[name]
    once = pack(packing, various(packing, 500, seed=1))
    rows = unpack(packing, once)
    np.testing.assert_array_equal(pack(packing, rows), once)
    if packing.kind != "int8":  # codes times scales have at most four significant bits
        read = Packing(packing.kind, packing.width, packing.rope, packing.group, "bfloat16")
        half = unpack(read, once)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half.astype(np.float32), rows)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_floats_at_all(data: st.DataObject) -> None:
    packing = PACKINGS[data.draw(st.sampled_from(["small entry", "small index key"]))]
    numbers = st.floats(width=32) | st.integers(0, 2**32 - 1).map(
        lambda x: np.array(x, np.uint32).view(np.float32).item()
    )
    row = data.draw(st.lists(numbers, min_size=packing.width, max_size=packing.width))
    once = pack(packing, np.array(row, np.float32))
    np.testing.assert_array_equal(once, oracle(packing, np.array(row, np.float32)))
    np.testing.assert_array_equal(pack(packing, unpack(packing, once)), once)


@pytest.mark.parametrize("scale", [127 + LOWEST, 100, 127, 200, 245])
@pytest.mark.parametrize("kind", ["fp8_rope", "fp4"])
def test_every_code_under_a_scale(kind: str, scale: int) -> None:
    table = E2M1 if kind == "fp4" else E4M3
    packing = Packing(kind, 256, group=256)
    codes = np.arange(256, dtype=np.uint8)
    packed = codes % 16 if kind == "fp4" else codes
    packed = packed[::2] + 16 * packed[1::2] if kind == "fp4" else packed
    row = np.zeros(packing.bytes, np.uint8)
    row[: packed.size], row[packed.size] = packed, scale
    got = unpack(packing, row)
    want = table[np.arange(256) % len(table)] * 2.0 ** (scale - 127)
    np.testing.assert_array_equal(got.astype(np.float64), want)
    # Without the codes of NaN and of -0 these are the bytes that the values pack to.
    plain = np.isfinite(want) & (want != 0)
    again = pack(packing, np.where(plain, want, 0))
    np.testing.assert_array_equal(again[packed.size :], row[packed.size :])
    np.testing.assert_array_equal(unpack(packing, again), np.where(plain, want, 0))


def test_every_int8_code_under_every_scale() -> None:
    packing = Packing("int8", 255)
    scales = np.arange(0x80, 0x7F80) << 16  # all of eight significant bits
    scales = scales.astype(np.uint32).view(np.float32)
    scales = scales[(scales >= 2.0**LOWEST) & (scales < 2.0**119)][::7]
    rows = np.arange(-127, 128, dtype=np.float32) * scales[:, None]
    packed = pack(packing, rows)
    codes = packed[:, :255].view(np.int8)
    np.testing.assert_array_equal(codes, np.broadcast_to(np.arange(-127, 128), codes.shape))
    np.testing.assert_array_equal(unpack(packing, packed), rows)


@each
def test_poison_survives(name: str) -> None:
    packing = PACKINGS[name]
    nobodys = np.full((3, packing.bytes), POISON, np.uint8)
    assert np.isnan(unpack(packing, nobodys)).all()
    read = Packing(packing.kind, packing.width, packing.rope, packing.group, "bfloat16")
    assert np.isnan(unpack(read, nobodys).astype(np.float32)).all()
    again = pack(packing, np.full(packing.width, np.nan))
    assert (again[: packing.bytes - packing.sections["zeros"]] == POISON).all()
    whole = 127.0 if packing.kind == "int8" else 1.0  # a code at scale 1
    for bad in (np.nan, np.inf, -np.inf):
        row = np.full(packing.width, whole, np.float32)
        row[0] = bad
        got = unpack(packing, pack(packing, row))
        assert np.isnan(got[: packing.group]).all()
        np.testing.assert_array_equal(got[packing.group :], whole)


@each
def test_errors_are_those_of_the_format(name: str) -> None:
    packing = PACKINGS[name]
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(500, packing.width)) * np.exp2(rng.integers(-20, 20, (500, 1)))
    got = unpack(packing, pack(packing, rows))
    body = rows[:, : packing.coded].reshape(500, -1, packing.group)
    error = np.abs(got[:, : packing.coded].reshape(body.shape) - body)
    top = np.abs(body).max(axis=-1, keepdims=True)
    # Half a unit in the last place of the value, or of the smallest code under the largest value.
    half = {"fp4": (2.0**-2, 1 / 12), "int8": (0.0, 0.504 / 127)}
    relative, absolute = half.get(packing.kind, (2.0**-4, 2.0**-10 / 224))
    assert (error <= np.maximum(relative * np.abs(body), absolute * top * 1.34)).all()
    rope = rows[:, packing.coded :]
    assert (np.abs(got[:, packing.coded :] - rope) <= 2.0**-8 * np.abs(rope)).all()


@each
def test_the_sign_of_every_value(name: str) -> None:
    packing = PACKINGS[name]
    row = np.linspace(1, 2, packing.width, dtype=np.float32)
    packed, number = pack(packing, row), np.arange(packing.width)
    turned = np.tile(packed, (packing.width, 1))
    for value in number:
        byte, bit = packing.sign(value)
        turned[value, byte] ^= np.uint8(1 << bit)
    got = unpack(packing, turned)
    assert (np.signbit(got) == (number[:, None] == number)).all()
    others = got[~np.eye(packing.width, dtype=bool)].reshape(packing.width, -1)
    same = np.tile(unpack(packing, packed), (packing.width, 1))
    np.testing.assert_array_equal(
        others, same[~np.eye(packing.width, dtype=bool)].reshape(others.shape)
    )
    with pytest.raises(ValueError, match="values 0"):
        packing.sign(packing.width)


@pytest.mark.parametrize(
    "name", variants.some(["small entry", "small index key", "window of heads"], ["small entry"])
)
def test_transformations_change_no_bit(name: str) -> None:
    packing = PACKINGS[name]
    rows = various(packing, 6, seed=3).reshape(2, 3, -1)
    want = pack(packing, rows)
    np.testing.assert_array_equal(packing.pack(jnp.asarray(rows)), want)
    settled, again = jax.jit(lambda x: (packing.settled(x), jax.vmap(packing.pack)(x)))(rows)
    np.testing.assert_array_equal(again, want)
    for got in (settled, packing.unpack(jnp.asarray(want))):
        bits = np.asarray(got).view(np.uint32), unpack(packing, want).view(np.uint32)
        np.testing.assert_array_equal(*bits)


def test_gradients_pass_as_if_nothing_were_packed() -> None:
    packing = Packing("fp4", 8)
    rows = jnp.linspace(-1, 1, 8)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(packing.settled(x) ** 2)))(rows)
    np.testing.assert_array_equal(slope, 2 * packing.settled(rows))


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Packing("fp5", 8), "no row layout 'fp5'; use one of fp8_rope, fp8_f32, fp4, int8"),
        (lambda: Packing("fp8_rope", 100), "100 values do not divide into groups of 64"),
        (lambda: Packing("fp8_rope", 164, 64), "100 values do not divide into groups of 64"),
        (lambda: Packing("fp4", 7), "in pairs, got 7"),
        (lambda: Packing("fp4", 8, 2), "fp4 keeps no bfloat16 values, got rope=2"),
        (lambda: Packing("fp8_rope", 8, 8), "need 0 <= rope < width, got 8, 8"),
        (lambda: Packing("int8", 8, dtype="float16"), "not 'float16'"),
        (lambda: Packing("int8", 8).pack(jnp.zeros(7)), r"rows of 8 values, got \[7\]"),
        (lambda: Packing("int8", 8).unpack(jnp.zeros(12)), r"rows of u8\[12\], got float32"),
    ],
)
def test_bad_sizes_are_named(make, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()

"""What of the kernels decides the last bits of results: which of them run, and in which tiles."""

from typing import NamedTuple

from hetero_kv.kernels import dispatch, tuning

# Raise it where a kernel, or the heuristic of its tiles, is changed so that results may differ in
# their last bits: state that was made before is then not taken for what would be computed now.
REVISION = 1


class Regime(NamedTuple):
    """implementation: of both kinds of calls; tiles: sizes that the tuning table sets, by name."""

    implementation: str
    tiles: tuple[tuple[str, int], ...]


def regime(
    named: str, platform: str, device_kind: str, table: tuning.Table | None = None
) -> Regime:
    """The regime of a model whose decode step takes the implementation `named`.

    Prefill's ops are always "auto". Sizes that no table sets are the heuristics', a function of
    shapes and of REVISION; the references have none that a table changes.

    Args:
        named: one of `dispatch.IMPLEMENTATIONS`.
        platform, device_kind: of the device that computes, as `jax.Device` has them.
        table: default the one in the package.

    Raises:
        ValueError: there is no implementation of that name.
    """
    if named not in dispatch.IMPLEMENTATIONS:
        raise ValueError(f"kernels={named!r}: use one of {dispatch.IMPLEMENTATIONS}")
    auto = dispatch.AUTO.get(platform, "reference")
    decode = auto if named == "auto" else named
    if {auto, decode} == {"reference"}:
        return Regime("reference", ())
    kernels = {"pallas_tpu" if x == "interpret" else x for x in (auto, decode)}
    entries = (tuning.load() if table is None else table).get(device_kind, {})
    tiles = {
        (f"{op}[{key}].{field}", value)
        for op, buckets in entries.items()
        if op.rpartition("/")[2] in kernels
        for key, fields in buckets.items()
        for field, value in fields.items()
    }
    name = f"prefill {auto}, decode {decode}, revision {REVISION}"
    return Regime(name, tuple(sorted(tiles)))

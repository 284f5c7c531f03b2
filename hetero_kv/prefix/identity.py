"""Identity: everything that must be equal for cached bytes to mean the same (DESIGN rule 9)."""

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping

import jax
import numpy as np

from hetero_kv.contract import LAYOUT_VERSION, CacheSpec
from hetero_kv.kernels import regime as kernel_regime
from hetero_kv.prefix.encoding import digest, encode

REGIMES = ("exact", "numeric")

# What decides the last bits of a result but not its meaning: compared in the exact regime only.
NUMERIC_FIELDS = (
    "chunk",
    "batch",
    "tiles",
    "implementation",
    "backend",
    "device_kind",
    "precision",
    "jax_version",
)


def weights_digest(params: object) -> str:
    """sha256 over path, dtype, shape and bytes of every leaf of a parameter pytree, in hex."""
    total = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    named = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    for path, leaf in sorted(named, key=lambda x: x[0]):
        array = np.asarray(leaf)
        total.update(encode((path, array.dtype.name, array.shape)))
        # The header fixes the number of bytes that follow, so no frame is needed around them.
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return total.hexdigest()


def config_digest(config: object) -> str:
    """sha256 of a configuration: a dataclass, a mapping, or plain values (see `encode`)."""
    return digest(config)


def describe_leaves(spec: CacheSpec) -> tuple:
    """Shape, effective dtype and layout, alignment and contract of every leaf, as plain values."""
    return tuple(
        (
            slot.path,
            slot.repeats,
            type(slot.leaf.contract).__name__,
            slot.leaf.contract,
            slot.leaf.component,
            slot.leaf.rows,
            slot.leaf.width,
            np.dtype(jax.numpy.dtype(slot.leaf.dtype)).name,
            slot.leaf.align,
            slot.leaf.packing,
        )
        for slot in spec.slots()
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """What a prefix key vouches for besides its tokens. Change any field, change every key.

    regime: "exact": bytes are reused only where they would be recomputed bit by bit, so the
    numeric fields count; "numeric": they are shared across chunk sizes, batches, devices and
    versions, and equal only up to rounding.
    """

    weights: str  # weights_digest
    config: str  # config_digest
    leaves: tuple  # describe_leaves: effective dtypes and shapes, not configured names
    block: int  # B, tokens
    adapter: str = ""  # digest of an adapter merged into the weights; per request: `extra`
    layout_version: int = LAYOUT_VERSION
    position_scheme: str = "absolute"
    tokenizer: str = ""  # digest
    placeholders: tuple[int, ...] = ()  # token ids that stand for media; see keys.block_keys
    weight_epoch: int = 0  # bump on every in-place weight update
    regime: str = "exact"

    chunk: int = 0  # C, tokens per prefill call
    batch: int = 0  # batch bucket of those calls, rows
    # Rows per tile by component, and what the tuning table sets for kernels on this device.
    tiles: tuple[tuple[str, int], ...] = ()
    implementation: str = "reference"  # of the kernels' ops: see `kernels.regime`
    backend: str = ""
    device_kind: str = ""
    precision: str = ""
    jax_version: str = ""

    def __post_init__(self):
        if self.regime not in REGIMES:
            raise ValueError(f"regime must be one of {REGIMES}, got {self.regime!r}")
        if self.regime == "exact" and (self.chunk < 1 or self.batch < 1 or not self.backend):
            raise ValueError(
                "the exact regime needs chunk >= 1, batch >= 1 and a backend, got "
                f"{self.chunk=}, {self.batch=}, {self.backend=}; use Identity.of"
            )

    @functools.cached_property
    def digest(self) -> bytes:
        """sha256 over the fields that count in this regime (32 bytes)."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        if self.regime == "numeric":
            fields = {k: v for k, v in fields.items() if k not in NUMERIC_FIELDS}
        return hashlib.sha256(encode(fields)).digest()

    @functools.cached_property
    def family(self) -> bytes:
        """The digest of what stays the same when weights are updated (32 bytes).

        Stored bytes of one family have one layout. They mean the same only within one identity.
        """
        return dataclasses.replace(self, weights="", adapter="", weight_epoch=0).digest

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        params: object,
        config: object,
        *,
        batch: int,
        kernels: str | None = None,
        **fields,
    ):
        """The identity of a model as it stands: read off its leaves, weights and devices.

        Args:
            spec: the model's cache spec.
            params: the weights in use; their bytes are hashed (about 1.5 GB/s).
            config: the model's configuration (see `config_digest`).
            batch: rows of the prefill calls that make publishable state.
            kernels: the implementation of the decode step's ops. Default: what the configuration
                says in its field `kernels`, else "auto".
            **fields: adapter, tokenizer, position_scheme, placeholders, weight_epoch, regime, or
                anything else to be set by hand.
        """
        device = _device(params)
        named = _kernels(config) if kernels is None else kernels
        ops = kernel_regime.regime(named, device.platform, device.device_kind)
        tiles = {(x.leaf.component, x.leaf.tile) for x in spec.slots() if x.leaf.tile > 1}
        found = dict(
            weights=weights_digest(params),
            config=config_digest(config),
            leaves=describe_leaves(spec),
            block=spec.block,
            chunk=spec.chunk,
            batch=batch,
            tiles=tuple(sorted(tiles)) + ops.tiles,
            implementation=ops.implementation,
            backend=device.platform,
            device_kind=device.device_kind,
            precision=_precision(),
            jax_version=f"{jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}",
        )
        return cls(**{**found, **fields})


def _device(params: object) -> jax.Device:
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array):
            return min(leaf.devices(), key=lambda x: x.id)
    return jax.devices()[0]


def _kernels(config: object) -> str:
    """What a configuration (a mapping or an object) says of the decode step's ops."""
    if isinstance(config, Mapping):
        return config.get("kernels", "auto")
    return getattr(config, "kernels", "auto")


def _precision() -> str:
    matmul = jax.config.jax_default_matmul_precision
    return f"matmul={matmul} x64={jax.config.jax_enable_x64}"

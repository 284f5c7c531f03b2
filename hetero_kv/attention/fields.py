"""The fields that a mechanism is built from."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetero_kv.attention.rope import Rope, Yarn
from hetero_kv.packing import KINDS, Packing

_NONE: Mapping[str, Any] = MappingProxyType({})


class Fields:
    """The fields of a model's configuration, with those of one layer type in front of them.

    kind: the layer type's name. Attributes are fields; `get` is for those that a configuration may
    lack. `unused` are the layer type's own fields that nobody has asked for.
    """

    def __init__(self, config: object, kind: str, own: Mapping[str, Any] = _NONE):
        self.kind = kind
        self._config, self._own, self._asked = config, dict(own), set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._own:
            self._asked.add(name)
            return self._own[name]
        if not hasattr(self._config, name):
            raise ValueError(f"layer type {self.kind!r} needs a field {name!r}; add it")
        return getattr(self._config, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where there is none."""
        there = name in self._own or hasattr(self._config, name)
        return getattr(self, name) if there else default

    def rope_of(self, theta: float, yarn: Yarn | None = None) -> Rope:
        """The layer type's `rope`, a mapping of fields of `Rope` (its yarn: a mapping of `Yarn`'s).

        What is not in it: dim is `rope_dim`, base and YaRN are those given here.
        """
        own = dict(self.get("rope") or {})
        if own.get("yarn"):
            own["yarn"] = Yarn(**own["yarn"])
        return Rope(**({"dim": self.rope_dim, "theta": theta, "yarn": yarn} | own))

    def packing(self, leaf: str, width: int, rope: int = 0, group: int = 0) -> Packing | None:
        """How `cache_layouts` stores the leaf's rows of `width` values; None: as they are.

        rope: rotated channels, the last ones of a row: layouts that may keep bfloat16 values keep
        these. group: values per scale, where a row is several vectors.

        Raises ValueError, naming the leaf, for a layout that its rows cannot have.
        """
        kind = (self.get("cache_layouts") or {}).get(leaf)
        if kind is None:
            return None
        about = f"layer type {self.kind!r}: cache_layouts[{leaf!r}]={kind!r}"
        usable = [name for name in KINDS if rope or name != "fp8_rope"]
        if kind not in usable:
            raise ValueError(f"{about} is no layout of its rows; use one of {', '.join(usable)}")
        try:
            rope = rope if KINDS[kind].rope else 0
            return Packing(kind, width, rope, group, self.cache_dtype)
        except ValueError as error:
            raise ValueError(f"{about}: {error}") from None

    @property
    def unused(self) -> list[str]:
        """Own fields that were not read."""
        return sorted(set(self._own) - self._asked)

"""What `tables` counts: lengths, a convention, request lengths, prices."""

import dataclasses

from experiments import config_checks

CONVENTIONS = ("plain", "fp4_half")


@dataclasses.dataclass(frozen=True)
class Price:
    """Of a million prompt tokens, in dollars. as_of: when it was read; prices change."""

    name: str
    miss: float
    hit: float
    as_of: str


@dataclasses.dataclass(kw_only=True)
class TablesConfig:
    """context: tokens of A1-A3 and A7. convention: how operations count in the claims of A3.

    A6: requests of lognormal lengths (median and sigma, from `shortest` to `longest` tokens), in
    the bytes that `concurrent` of them take with one block table for all layers.
    A8: prices, and the share of prompt tokens that hit.
    """

    context: int = 1 << 20
    convention: str = "plain"
    contexts: tuple[int, ...] = (4_096, 16_384, 65_536, 131_072, 262_144, 1_048_576)
    ratio_context: int = 131_072
    ratio_layers: int = 48
    block: int = 128
    requests: int = 1_000
    median: float = 16_384.0
    sigma: float = 0.6
    shortest: int = 4_096
    longest: int = 65_536
    concurrent: int = 20
    hit: float = 0.374
    anatomy_length: int = 61  # tokens of the small model whose cache is drawn
    prices: tuple[Price, ...] = (
        Price("V4-Flash", 0.14, 0.0028, "April 2026, secondary page"),
        Price("V4-Pro, for a time", 0.435, 0.003625, "April 2026, secondary page"),
        Price("V2", 0.14, 0.014, "2024, secondary page"),
    )
    dollars_per_gb_hour: float = 0.0001  # a disk's rent; an assumption, not a quotation
    seed: int = 0
    workdir: str = "runs/tables"

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention={self.convention!r} must be one of {CONVENTIONS}")
        if self.ratio_layers % 24 or self.ratio_layers < 24:
            raise ValueError(f"ratio_layers={self.ratio_layers} must be a multiple of 24, so that "
                             "1:1, 3:1, 5:1 and 7:1 come out even")  # fmt: skip
        config_checks.not_empty(self, "contexts")
        config_checks.at_least(self, 1, "context", "contexts", "ratio_context", "block", "requests")
        config_checks.at_least(self, 1, "concurrent", "anatomy_length")
        config_checks.above(self, 0, "median")
        config_checks.at_least(self, 0, "sigma", "seed", "dollars_per_gb_hour")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"need 1 <= {self.shortest=} <= {self.longest=}")
        if not 0 <= self.hit <= 1:
            raise ValueError(f"hit={self.hit} is a share within 0 .. 1")
        if any(not 0 <= x.hit < x.miss for x in self.prices):
            raise ValueError(f"a hit costs from 0 to less than what a miss costs: {self.prices}")
        config_checks.check_workdir(self)

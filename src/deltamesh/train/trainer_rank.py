"""`TrainerRank`: one rank of a training job. All ranks make the same calls with the same arguments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn

from deltamesh.distributed.agreement import agree
from deltamesh.distributed.collectives import all_reduce
from deltamesh.distributed.launch import init_worker, is_worker
from deltamesh.distributed.mesh import Mesh, build_mesh, world_group
from deltamesh.models import HybridCausalLM
from deltamesh.models.lora_targets import LoraTargets
from deltamesh.ops.context import SliceContext
from deltamesh.ops.gated_delta_rule.context import wanted_carrier
from deltamesh.plan.carrier import CarrierName
from deltamesh.plan.plan import CutRule, MicroBatchPlan, plan_micro_batch
from deltamesh.topology import Topology
from deltamesh.train import saving
from deltamesh.train.micro_batches import CheckedInput, Deal, Item, MicroBatch, check_inputs, deal
from deltamesh.train.optim import AdamParams, ShardedAdamW, StepResult
from deltamesh.train.outputs import source_order_outputs
from deltamesh.train.setup import ModelSettings, build_model, cost_model, rule_shape


class TrainerRank:
    """Forward passes, gradients and optimizer steps of one rank of a dp x cp x tp mesh.

    Made with `from_pretrained`. Sums, not means: outputs are per input, the caller makes the loss, and `optim_step`
    adds up what all ranks owe. Outputs are the same on every cp and tp rank of a dp coordinate; compute the same loss
    on each of them.

    Example:
        >>> rank = TrainerRank.from_pretrained("tiny", topology=Topology())
        >>> from deltamesh.train.micro_batches import ForwardInput
        >>> for batch in rank.forward_micro_batches([ForwardInput(input_tokens=[1, 2], target_tokens=[2, 3])]):
        ...     (-sum(out.target_logprobs.sum() for out in batch.outputs)).backward()
        >>> rank.optim_step(AdamParams(learning_rate=1e-3)).skipped
        False
    """

    def __init__(
        self, model: HybridCausalLM, mesh: Mesh, settings: ModelSettings, lora_targets: LoraTargets | None = None
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.settings = settings
        self.lora_targets = lora_targets
        self._cost = cost_model(model.config)
        self._optimizer = ShardedAdamW(self.trainable_parameters(), model.specs, mesh, sp=mesh.topology.sp)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        topology: Topology | None = None,
        lora: LoraConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        recompute: str = "none",
        max_rows: int = 16384,
        seed: int = 0,
        backend: str = "torch",
        cuts: CutRule | None = None,
        carrier: CarrierName = "auto",
    ) -> "TrainerRank":
        """Builds this rank's part of a model and loads its weights.

        Under torchrun (or `deltamesh.distributed.launch`) torch.distributed is initialised here if it is not yet.

        Args:
            name_or_path: "tiny", a Hugging Face directory, or a Hub id.
            topology: sizes of the mesh; by default from DELTAMESH_* variables and the world size.
            lora: train only this adapter; None trains every parameter.
            dtype: torch.float64, float32 or bfloat16.
            device: by default the current CUDA device where there is one, else the CPU.
            recompute: "none", "selective" or "full".
            max_rows: token budget of a micro-batch, shared prefixes counted once.
            seed: of random weights and of the adapter.
            backend: of the ops.
            cuts: places the cuts of a tree, given (tree, cp); by default they balance the cost.
            carrier: how states go from slice to slice, "auto", "scan" or "pipeline"; see `ops.context_parallel`.

        Raises:
            ValueError: a topology that fits neither the world nor the model, an unsupported configuration or adapter,
                missing or extra weights. The same on every rank.
            RankDisagreement: ranks gave other settings, or only some of them failed.
        """
        if is_worker() and not torch.distributed.is_initialized():
            on = None if device is None else torch.device(device).type
            init_worker(device=None if on is None else "cpu" if on == "cpu" else "cuda")
        world = world_group()
        settings = ModelSettings(
            name_or_path=str(name_or_path), lora=lora, dtype=dtype, device=device, recompute=recompute,
            max_rows=max_rows, seed=seed, backend=backend, cuts=cuts, carrier=carrier,
        )  # fmt: skip
        resolved = agree(
            lambda: _resolved(topology, world.size),
            lambda sizes: {"topology": str(sizes), "sp": sizes.sp, **settings.shared()},
            world,
            what="the settings of the run",
        )
        mesh = build_mesh(resolved)
        model, targets = agree(
            lambda: build_model(settings, mesh),
            lambda built: saving.shape_digest(built[0]),
            mesh.world,
            what="the model",
        )
        return cls(model, mesh, settings, targets)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.model.norm.weight.device

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parts of what is trained, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward_micro_batches(self, inputs: Sequence[Item]) -> Iterator[MicroBatch]:
        """Runs the inputs of this dp rank, a micro-batch at a time.

        Items are dealt to dp ranks by cost and packed by `max_rows`; a nested sequence of inputs stays together. Call
        backward on each micro-batch before taking the next, or keep the outputs and pay for their memory.

        Args:
            inputs: the same on every rank of the mesh.

        Raises:
            ValueError, TypeError: bad inputs.
            RankDisagreement: ranks were given different inputs, or one failed; the same text on every rank.
        """
        dealt = agree(lambda: self._deal(inputs), lambda d: d.digest, self.mesh.world, what="the batch of inputs")
        mine = dealt.by_dp[self.mesh.dp.rank]
        for number, checked in enumerate(mine):
            yield self._forward(checked, f"the plan of micro-batch {number}")

    def reduce(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Sums named numbers over dp (cp and tp ranks hold the same ones already).

        Example:
            >>> TrainerRank.from_pretrained("tiny", topology=Topology()).reduce({"loss": 2.0})
            {'loss': 2.0}
        """
        names = agree(lambda: sorted(values), repr, self.mesh.world, what="the names to reduce")
        local = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=self.device)
        return dict(zip(names, all_reduce(local, self.mesh.dp).tolist(), strict=True))

    def optim_step(self, params: AdamParams, scale_grads: float = 1.0) -> StepResult:
        """Sums gradients over the mesh, clips by the global norm and takes one AdamW step.

        Gradients that are not finite leave parameters and optimizer state as they were; the result says so. A parameter
        that no backward reached has a gradient of zero, on which AdamW steps all the same (weight decay, momentum).

        Args:
            params: settings of the step.
            scale_grads: factor on the summed gradients, for example 1 / number of trained tokens.

        Raises:
            RankDisagreement: ranks gave other arguments, or one of them is elsewhere in its program.
        """
        agree(
            lambda: float(scale_grads),
            lambda scale: {"scale_grads": scale, **asdict(params)},
            self.mesh.world,
            what="the optimizer step",
        )
        return self._optimizer.step(params, scale_grads)

    def reduced_gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the summed gradients, before scaling; for inspection and tests."""
        return self._optimizer.reduced_gradients()

    def global_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The L2 norm of the whole gradient of which `gradients` are this rank's parts."""
        return self._optimizer.global_norm(gradients)

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors from this rank's parts (parameters or gradients), one at a time, on every rank."""
        return saving.full_tensors(tensors, self.model.specs, self.mesh.tp)

    def export_lora(self, path: str | Path) -> None:
        """Writes the adapter in PEFT's format, from one rank; the directory must not exist."""
        saving.export_lora(self.model, self.lora_targets, self.settings, self.mesh, Path(path))

    def save_pretrained(self, path: str | Path) -> None:
        """Writes the base weights as a Hugging Face directory, from one rank; the directory must not exist."""
        saving.save_pretrained(self.model, self.mesh, Path(path))

    def _deal(self, inputs: Sequence[Item]) -> Deal:
        checked = check_inputs(inputs, self.model.config.vocab_size)
        return deal(checked, dp=self.mesh.dp.size, max_rows=self.settings.max_rows, cost=self._cost)

    def _forward(self, checked: list[CheckedInput], what: str) -> MicroBatch:
        plan = agree(lambda: self._plan(checked), lambda plan: plan.digest, self.mesh.cp_tp, what=what)
        own = plan.slices[self.mesh.cp.rank]
        context = SliceContext.from_plan(
            own, cp=self.mesh.cp, tp=self.mesh.tp, sp=self.mesh.topology.sp, device=self.device
        )
        tokens = torch.from_numpy(own.tokens).to(self.device)
        hidden = self.model(tokens, context)
        return MicroBatch(
            inputs=[x.source for x in checked],
            outputs=source_order_outputs(self.model, hidden, plan, context, checked),
            indices=[x.index for x in checked],
            stats=self._stats(plan),
        )

    def _plan(self, checked: list[CheckedInput]) -> MicroBatchPlan:
        return plan_micro_batch(
            [x.tokens for x in checked],
            [x.targets for x in checked],
            num_slices=self.mesh.cp.size,
            conv_width=self.model.config.linear_conv_kernel_dim,
            cost=self._cost,
            hidden_wanted=[x.source.hidden_states for x in checked],
            cuts=self.settings.cuts,
            carrier=self._carrier(),
            shape=rule_shape(self.model.config, self.mesh.tp.size),
        )

    def _carrier(self) -> CarrierName:
        """What is asked for; the kernels of "fla" are driven by the scan."""
        return "scan" if self.settings.backend == "fla" else wanted_carrier(self.settings.carrier, self.device)

    @staticmethod
    def _stats(plan: MicroBatchPlan) -> dict[str, float]:
        return {
            "rows": plan.tree.num_rows,
            "tokens": plan.tree.num_source_tokens,
            "sequences": plan.tree.num_sequences,
            "edges": plan.edges.num_edges,
            "busiest_over_mean": plan.busiest_over_mean,
        }


def _resolved(topology: Topology | None, world_size: int) -> Topology:
    """The topology of the run; that a single process needs torch.distributed for several ranks, `build_mesh` says."""
    resolved = topology or Topology.from_env(world_size=world_size)
    if torch.distributed.is_initialized():
        resolved.check_world(world_size)
    return resolved

"""The oracle: transformers' own model, one unshared sequence at a time, with its reference rule.

With flash-linear-attention installed, transformers dispatches its rule and convolution to kernels that need a GPU; the
oracle runs the plain functions underneath.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from deltamesh.train.micro_batches import IGNORE_INDEX

_DISPATCHED = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@contextmanager
def reference_functions() -> Iterator[None]:
    """Inside the block, transformers' Qwen3.5 uses its plain PyTorch functions whatever is installed."""
    with ExitStack() as stack:
        for name in _DISPATCHED:
            plain = inspect.unwrap(getattr(modeling_qwen3_5, name))
            stack.enter_context(mock.patch.object(modeling_qwen3_5, name, _tolerant(plain)))
        yield


def _tolerant(function):  # type: ignore[no-untyped-def]
    """Drops the keyword arguments that only the dispatched kernels take, as transformers' own dispatcher does."""
    known = set(inspect.signature(function).parameters)

    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call


def hugging_face_model(
    config: Qwen3_5TextConfig, state: Mapping[str, Tensor], dtype: torch.dtype
) -> Qwen3_5ForCausalLM:
    """A `Qwen3_5ForCausalLM` with the given full weights and eager attention."""
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager", dtype=dtype)
    model.to_empty(device="cpu")
    full = dict(state)
    if config.tie_word_embeddings:
        full["lm_head.weight"] = full["model.embed_tokens.weight"]
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in full.items()}, assign=True, strict=True)
    rotary = model.model.rotary_emb
    inv_freq, _ = rotary.compute_default_rope_parameters(config)
    rotary.inv_freq, rotary.original_inv_freq = inv_freq, inv_freq.clone()
    return model.train()


def hugging_face_outputs(
    model: torch.nn.Module, sequences: Sequence[Tensor], targets: Sequence[Tensor | None]
) -> list[tuple[Tensor | None, Tensor]]:
    """Per sequence (target log-probabilities [n] or None, final hidden states [n, D]), each sequence run alone.

    Args:
        model: a `Qwen3_5ForCausalLM`, or a PEFT model around one.
        sequences: int64 [n] each.
        targets: int64 [n] each (-100 gives 0), or None.
    """
    outputs: list[tuple[Tensor | None, Tensor]] = []
    with reference_functions():
        for tokens, target in zip(sequences, targets, strict=True):
            out = model(tokens[None], output_hidden_states=True, use_cache=False)
            hidden = out.hidden_states[-1][0]
            logprobs = None
            if target is not None:
                every = torch.log_softmax(out.logits[0], dim=-1)
                picked = every.gather(1, target.clamp_min(0)[:, None])[:, 0]
                logprobs = torch.where(target == IGNORE_INDEX, torch.zeros_like(picked), picked)
            outputs.append((logprobs, hidden))
    return outputs

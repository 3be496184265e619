"""Small dense doubles of the ops, and Hugging Face's model on a CPU, for tests of the model code alone.

The doubles know one unshared sequence and no ranks, so a difference from Hugging Face is a fault of the model code.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from deltamesh.distributed.collectives import Group
from deltamesh.models import HybridCausalLM, blocks, tiny_config
from deltamesh.models.tiny import random_state


def _conv(x_TD: Tensor, weight_DW: Tensor, *, context: Any, activation: str, backend: str) -> Tensor:
    assert activation == "silu"
    width = weight_DW.shape[1]
    y = F.conv1d(x_TD.T[None], weight_DW[:, None], padding=width - 1, groups=weight_DW.shape[0])
    return F.silu(y[0, :, : x_TD.shape[0]].T)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    assert kwargs["use_qk_l2norm"]
    group = v.shape[2] // k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (t[0].to(dtype) for t in (q, k, v, g, beta))
    q, k = (x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    state = v.new_zeros((v.shape[1], k.shape[2], v.shape[2]))
    out = []
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * delta[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, context: Any, backend: str) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.fixture
def dense_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model code on dense doubles of its ops."""
    monkeypatch.setattr(blocks, "causal_conv1d", _conv)
    monkeypatch.setattr(blocks, "gated_delta_rule", _delta_rule)
    monkeypatch.setattr(blocks, "tree_attention", _attention)


@pytest.fixture
def hf_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's functions without their dispatch to CUDA kernels."""
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(hf, name, inspect.unwrap(getattr(hf, name)))


def one_sequence(num_rows: int, *, sp: bool = False) -> Any:
    """Context of one process and one sequence for the dense doubles."""
    return SimpleNamespace(
        cp=Group.single(),
        tp=Group.single(),
        sp=sp,
        num_rows=num_rows,
        positions_T=torch.arange(num_rows),
        scan=None,
        conv=None,
        attention=None,
    )


def hf_model(state: dict[str, Tensor], config: Qwen3_5TextConfig, dtype: torch.dtype) -> Qwen3_5ForCausalLM:
    """Hugging Face's model of the given full tensors."""
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.to(dtype)


def tiny_state(seed: int = 0) -> dict[str, Tensor]:
    """Full random tensors of the tiny model."""
    return random_state(HybridCausalLM(tiny_config()).base_specs, seed)


def tokens(num_rows: int, seed: int = 0) -> Tensor:
    """Random byte tokens."""
    return torch.randint(0, 256, (num_rows,), generator=torch.Generator().manual_seed(seed))


def logprobs(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """[T, V] log-probabilities."""
    return torch.log_softmax(F.linear(hidden_TD, weight_VD), dim=-1)

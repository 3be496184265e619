"""Layers that make their input again give autograd's gradients to the bit, and keep nothing in its place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deltamesh.models import HybridCausalLM, add_lora, random_weights, tiny_config
from deltamesh.models import layers as model_layers
from deltamesh.models.layers import Linear, project
from deltamesh.models.pointwise import gated_rms_norm, rms_norm, sigmoid_gate, swiglu
from deltamesh.models.projection import Derived
from tests.unit.models_common import dense_ops, one_sequence, tokens  # noqa: F401 - fixture

N, D = 6, 8
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


DERIVED: dict[str, Callable[[list[Tensor], torch.dtype], Derived]] = {
    "itself": lambda x, wide: Derived.kept(x[0] * 1.0),
    "swiglu": lambda x, wide: swiglu(x[0], x[1]),
    "sigmoid gate": lambda x, wide: sigmoid_gate(x[0], x[1]),
    "rms norm": lambda x, wide: rms_norm(x[0], x[2], 1e-6, wide),
    "gated rms norm": lambda x, wide: gated_rms_norm(x[0], x[1], x[2], 1e-6, wide),
}


def _plain(x: Tensor, layer: Linear) -> Tensor:
    """What `Linear` computes, under autograd."""
    y = F.linear(x, layer.weight)
    if layer.lora_A is None or layer.lora_B is None:
        return y
    a, b = layer.lora_A.weight, layer.lora_B.weight
    inner = F.linear(x.to(a.dtype), a) * layer.scaling
    return torch.addmm(y, inner, b.T) if y.dtype == b.dtype else (y + F.linear(inner, b)).to(y.dtype)


def _layers(dtype: torch.dtype, *, train_weights: bool) -> list[Linear]:
    """Three layers of one input; the second has no LoRA."""
    made = []
    for out, rank in ((5, 2), (7, 0), (3, 1)):
        layer = Linear(nn.Parameter(torch.randn(out, D).to(dtype), requires_grad=train_weights))
        if rank:
            a, b = (nn.Parameter(torch.randn(shape, dtype=_wide(dtype))) for shape in ((rank, D), (out, rank)))
            layer.add_lora(a, b, 0.3)
        made.append(layer)
    return made


def _gradients(outs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    torch.manual_seed(1)
    dys = [torch.randn(y.shape).to(y.dtype) for y in outs]
    return list(torch.autograd.grad(outs, leaves, dys, allow_unused=True))


@contextmanager
def _saved() -> Iterator[dict[int, Tensor]]:
    """Tensors that autograd saves, one for each memory."""
    held: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield held


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("train_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DERIVED)
def test_gradients_are_autograds_to_the_bit(
    name: str, dtype: torch.dtype, train_weights: bool, checkpointed: bool
) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((N, D), (N, D), (D,))]
    layers = _layers(dtype, train_weights=train_weights)
    trained = [*leaves, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]

    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        return project(DERIVED[name](list(x), _wide(dtype)), *layers)

    outs = checkpoint(ours, *leaves, use_reentrant=False) if checkpointed else ours(*leaves)
    rows = DERIVED[name](leaves, _wide(dtype)).rows
    plain = tuple(_plain(rows, layer) for layer in layers)
    for y, expected in zip(outs, plain, strict=True):
        assert torch.equal(y, expected)
    for mine, expected in zip(_gradients(outs, trained), _gradients(plain, trained), strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None and expected is not None:
            assert mine.dtype == expected.dtype and mine.abs().sum() > 0
            assert torch.equal(mine, expected)


def test_the_rows_are_made_again_once_for_all_layers_and_only_where_a_gradient_needs_them() -> None:
    calls = []

    def make(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    for train in (True, False):
        calls.clear()
        x = torch.randn(N, D, requires_grad=True)
        layers = _layers(torch.float32, train_weights=False)
        for layer in layers:
            layer.requires_grad_(train)
        with _saved() as held:
            outs = project(Derived(rows=x * 2, make=make, sources=(x.detach(),)), *layers)
        assert (x.untyped_storage().data_ptr() in held) == train
        _gradients(outs, [x])
        assert len(calls) == int(train)


def test_inference_and_two_uses_of_the_same_rows_work() -> None:
    x = torch.randn(N, 2 * D)
    gate, up = x.chunk(2, dim=-1)
    layer = _layers(torch.float32, train_weights=True)[0]
    with torch.inference_mode():
        (y,) = project(swiglu(gate, up), layer)
    gate, up = (t.clone().requires_grad_() for t in (gate, up))
    product = swiglu(gate, up)
    outs = (*project(product, layer), *project(product, layer))
    assert torch.equal(outs[0], y) and torch.equal(outs[1], y)
    plain = (_plain(F.silu(gate) * up, layer), _plain(F.silu(gate) * up, layer))
    trained = [gate, up, *layer.parameters()]
    for mine, expected in zip(_gradients(outs, trained), _gradients(plain, trained), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_bf16_layer_keeps_no_fp32_copy_of_its_input() -> None:
    x = torch.randn(N, D).bfloat16().requires_grad_()
    layer = _layers(torch.bfloat16, train_weights=False)[0]
    with _saved() as held:
        layer(x)
    assert not [t for t in held.values() if t.dtype == torch.float32 and t.shape == (N, D)]


def test_rows_gathered_over_tp_are_kept_and_others_are_not() -> None:
    x = torch.randn(N, D, requires_grad=True)
    h = rms_norm(x, torch.zeros(D), 1e-6, torch.float32)
    without, with_sp = (model_layers.enter_tp_derived(h, one_sequence(N, sp=sp)) for sp in (False, True))
    assert without.sources[0].data_ptr() == x.data_ptr()
    assert [s.data_ptr() for s in with_sp.sources] == [with_sp.rows.data_ptr()]


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all trained"])
def test_a_layer_keeps_its_projections_and_residuals_but_no_norms_and_gates(lora: bool) -> None:
    config = tiny_config()
    model = HybridCausalLM(config)
    random_weights(model, seed=0)
    if lora:
        add_lora(model, LoraConfig(r=1, target_modules="all-linear"), seed=0)
    rows = 31
    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        x = torch.randn(rows, config.hidden_size, requires_grad=True)
        tables = model.model.rotary.tables(torch.arange(rows), x.dtype)
        mixer = layer.linear_attn if layer.is_linear else layer.self_attn
        core = mixer.core

        def uncounted(*args: object, core: Callable[..., Tensor] = core) -> Tensor:
            with _saved():  # the innermost hooks see it: what the ops keep is theirs
                return core(*args)

        mixer.core = uncounted
        with _saved() as held:
            y = layer(x, tables, one_sequence(rows))
        weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        floats = sum(t.untyped_storage().nbytes() // 4 for at, t in held.items() if at not in weights)
        del y
        D2, F2 = 2 * config.hidden_size, 2 * config.intermediate_size
        if kind == "linear_attention":
            gated = 2 * config.linear_num_value_heads * config.linear_value_head_dim  # outputs and their gate
        else:
            gated = 3 * config.num_attention_heads * config.head_dim  # outputs; queries lie beside their gate
        small = 2 + config.linear_num_value_heads + 8  # 1 / rms of rows and heads, and ranks of LoRAs
        assert floats <= rows * (D2 + F2 + gated + small), (kind, floats / rows)
        assert floats >= rows * (D2 + F2), "the hooks see what is saved"


def test_a_single_row_without_a_row_dimension_passes_a_layer() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    x = torch.randn(3, requires_grad=True)
    y = Linear(weight)(x)
    y.sum().backward()
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
    assert x.grad is not None
    assert x.grad.shape == (3,)

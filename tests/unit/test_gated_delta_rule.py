"""One process: the chunked op, the token by token one and Hugging Face's agree, in values and gradients."""

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from deltamesh.ops.gated_delta_rule import gated_delta_rule
from deltamesh.ops.gated_delta_rule.chunk_math import unit_lower_inverse
from tests.unit.gated_delta_rule_common import Inputs, assert_close, make_inputs, nan_in_fresh_memory

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
__all__ = ["nan_in_fresh_memory"]

LENGTHS = [1, 2, 3, 63, 64, 65, 129, 200]
REGIMES = ["plain", "retention", "decay"]
NAMES = ["o", "final", "q", "k", "v", "g", "beta", "initial_state"]

Run = Callable[[Inputs, Tensor | None], tuple[Tensor, Tensor]]


def _run(backend: str, **options: object) -> Run:
    def run(x: Inputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        o, final = gated_delta_rule(
            *x.leaves(), initial_state=initial_state, output_final_state=True, backend=backend, **options
        )
        assert final is not None
        return o, final

    return run


def _run_transformers(x: Inputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = inspect.unwrap(torch_chunk_gated_delta_rule)(
        *x.leaves(), initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return result


def _values_and_gradients(run: Run, x: Inputs, initial_state: Tensor | None) -> list[Tensor]:
    o, final = run(x, initial_state)
    rng = torch.Generator().manual_seed(7)
    loss = (o * torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o.dtype)).sum()
    loss = loss + (final * torch.randn(final.shape, generator=rng, dtype=torch.float64).to(final.dtype)).sum()
    leaves = x.leaves() + ([] if initial_state is None else [initial_state])
    return [o.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


def _state(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype).requires_grad_()
    )


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_chunked_equals_naive_in_fp64(num_rows: int, regime: str) -> None:
    x, s = make_inputs(num_rows, regime=regime), _state(1, 6, 7, 5)
    want = _values_and_gradients(_run("naive", use_qk_l2norm=True), x, s)
    have = _values_and_gradients(_run("torch", use_qk_l2norm=True), x, s)
    assert_close(NAMES, have, want, 1e-10)


@pytest.mark.parametrize("num_rows", [3, 65, 200])
def test_chunked_equals_naive_without_norm_and_initial_state(num_rows: int) -> None:
    x = make_inputs(num_rows, Hk=3, H=3, K=5, V=11)
    want = _values_and_gradients(_run("naive", scale=0.3), x, None)
    have = _values_and_gradients(_run("torch", scale=0.3), x, None)
    assert_close(NAMES[:-1], have, want, 1e-10)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_scales_whose_square_leaves_fp32_have_gradients(scale: float) -> None:
    x = make_inputs(70, dtype=torch.float64).to(torch.float32)
    ones, scaled = (
        _values_and_gradients(_run("torch", use_qk_l2norm=True, scale=factor), x, None) for factor in (1.0, scale)
    )
    assert_close(["q"], [scaled[2] / scale], [ones[2]], 1e-5)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_fp32_equals_transformers_and_fp64_naive(num_rows: int, regime: str) -> None:
    double, s = make_inputs(num_rows, regime=regime), _state(1, 6, 7, 5)
    x, s32 = double.to(torch.float32), _state(1, 6, 7, 5, dtype=torch.float32)
    have = _values_and_gradients(_run("torch", use_qk_l2norm=True), x, s32)
    assert_close(NAMES, have, _values_and_gradients(_run_transformers, x, s32), 2e-5)
    assert_close(NAMES, have, _values_and_gradients(_run("naive", use_qk_l2norm=True), double, s), 2e-5)


def test_batch_rows_are_separate_sequences() -> None:
    x = make_inputs(140)
    batch = Inputs(**{n: t.detach().view(2, 70, *t.shape[2:]).requires_grad_() for n, t in vars(x).items()})
    s = _state(2, 6, 7, 5)
    have = _values_and_gradients(_run("torch", use_qk_l2norm=True), batch, s)
    for b in range(2):
        row = Inputs(**{n: t.detach()[b : b + 1].requires_grad_() for n, t in vars(batch).items()})
        s_row = s.detach()[b : b + 1].requires_grad_()
        o, final = _run("naive", use_qk_l2norm=True)(row, s_row)
        assert_close(["o", "final"], [have[0][b : b + 1], have[1][b : b + 1]], [o, final], 1e-10)


def test_packed_equals_separate_and_nothing_leaks() -> None:
    cu = [0, 5, 5, 90, 91, 160, 164]
    x, s = make_inputs(164), _state(6, 6, 7, 5)
    o, final = _run("torch", cu_seqlens=cu)(x, s)
    for i, (a, b) in enumerate(itertools.pairwise(cu)):
        part = Inputs(**{n: t[:, a:b] for n, t in vars(x).items()})
        if a == b:
            assert torch.equal(final[i], s[i])
            continue
        o_part, final_part = _run("naive")(part, s[i : i + 1])
        assert_close(["o", "final"], [o[:, a:b], final[i : i + 1]], [o_part, final_part], 1e-10)
    grads = torch.autograd.grad(o[:, 5:90].sum(), [*x.leaves(), s])
    for grad in grads[:5]:
        assert grad[:, :5].count_nonzero() == 0
        assert grad[:, 90:].count_nonzero() == 0
    assert grads[5][[0, 1, 3, 4, 5]].count_nonzero() == 0


def test_fork_state_matches_unshared_rows() -> None:
    cu, parents = [0, 70, 90, 93, 93, 130, 230], [-1, 0, 1, 0, 3, 0]
    x = make_inputs(230, regime="retention")
    names = NAMES[:-1]
    want = _values_and_gradients(_run("naive", cu_seqlens=cu, parents=parents), x, None)
    have = _values_and_gradients(_run("torch", cu_seqlens=cu, parents=parents), x, None)
    assert_close(names, have, want, 1e-10)
    path = [*range(93)]  # segments 0, 1, 2 unshared
    row = Inputs(**{n: t[:, path] for n, t in vars(x).items()})
    o, final = _run("naive")(row, None)
    assert_close(["o", "final"], [have[0][:, path], have[1][2:3]], [o, final], 1e-10)


def test_backends_agree_on_five_thousand_one_token_nodes() -> None:
    rng = torch.Generator().manual_seed(5)
    parents = [-1] + [int(torch.randint(max(0, i - 40), i, (1,), generator=rng)) for i in range(1, 5000)]
    x = make_inputs(5000, Hk=1, H=1, K=3, V=2)
    runs = [_run(b, cu_seqlens=range(5001), parents=parents) for b in ("torch", "naive")]
    have, want = (_values_and_gradients(run, x, None) for run in runs)
    assert_close(NAMES[:-1], have, want, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_cast_at_the_edges_only(dtype: torch.dtype) -> None:
    low = make_inputs(150).to(dtype)
    exact = low.to(torch.float32)
    have = _values_and_gradients(_run("torch", use_qk_l2norm=True), low, None)
    want = _values_and_gradients(_run("torch", use_qk_l2norm=True), exact, None)
    assert [t.dtype for t in have] == [dtype, torch.float32, *[dtype] * 5]
    assert torch.equal(have[0], want[0].to(dtype))
    assert torch.equal(have[1], want[1])
    assert_close(NAMES[2:-1], have[2:], want[2:], 2 * torch.finfo(dtype).eps)


def test_gates_may_be_more_precise_than_the_rest() -> None:
    x = make_inputs(70)
    mixed = Inputs(**{n: t.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, t in vars(x).items()})
    o, final = _run("torch")(mixed, None)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_gradient_of_beta_is_exact_at_zero() -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        double = make_inputs(100, regime="retention")
        double.beta.data[:, ::3] = 0
        double.beta.data[:, 1::5] = 1e-30
        want = _values_and_gradients(_run("naive"), double, None)
        have = _values_and_gradients(_run("torch"), double.to(dtype), None)
        assert_close(NAMES[:-1], have, want, tolerance)


def test_inverse_stays_accurate_for_coherent_keys() -> None:
    rng = torch.Generator().manual_seed(0)
    for C in (16, 40, 48, 64):
        base, noise = (torch.randn(n, 64, generator=rng, dtype=torch.float64) for n in (1, C))
        k = torch.nn.functional.normalize(0.99**0.5 * base / base.norm() + 0.01**0.5 * noise / 8, dim=-1)
        A = (k @ k.T).tril(-1)[None]
        want = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + A)
        assert_close(["fp64"], [unit_lower_inverse(A)], [want], 1e-13)
        assert_close(["fp32"], [unit_lower_inverse(A.float())], [want], 2e-6)


def test_coherent_keys_with_full_writes_match_naive() -> None:
    x = make_inputs(200, Hk=1, H=2, K=13, V=5, regime="retention")
    rng = torch.Generator().manual_seed(1)
    base, noise = (torch.randn(1, n, 1, 13, generator=rng, dtype=torch.float64) for n in (1, 200))
    x.k.data = torch.nn.functional.normalize(0.99**0.5 * base / base.norm() + 0.01**0.5 * noise / 13**0.5, dim=-1)
    x.beta.data.fill_(1)
    want = _values_and_gradients(_run("naive"), x, None)
    assert_close(NAMES[:-1], _values_and_gradients(_run("torch"), x, None), want, 1e-10)
    assert_close(NAMES[:-1], _values_and_gradients(_run("torch"), x.to(torch.float32), None), want, 2e-5)


def test_gate_gradients_keep_their_precision_under_strong_decay_everywhere() -> None:
    double = make_inputs(130)
    double.g.data.uniform_(-20, -10, generator=torch.Generator().manual_seed(0))
    s = _state(1, 6, 7, 5)
    want = _values_and_gradients(_run("naive"), double, s)
    have = _values_and_gradients(_run("torch"), double.to(torch.float32), s.detach().float().requires_grad_())
    assert want[5].abs().max() < 1e-3  # what must not cancel: terms of order one that do not depend on g
    assert_close(NAMES, have, want, 2e-5)


def test_empty_input_has_values_and_an_edge_to_every_input() -> None:
    x, s = make_inputs(0), _state(1, 6, 7, 5)
    o, final = _run("torch")(x, s)
    assert o.shape == (1, 0, 6, 5)
    assert torch.equal(final, s)
    grads = torch.autograd.grad(o.sum() + final.sum(), [*x.leaves(), s])
    assert [g.shape for g in grads] == [t.shape for t in [*x.leaves(), s]]
    assert torch.equal(grads[5], torch.ones_like(s))


def test_backward_may_run_twice_and_inputs_stay_untouched() -> None:
    x = make_inputs(150)
    before = [t.detach().clone() for t in x.leaves()]
    o, _ = _run("torch", use_qk_l2norm=True)(x, None)
    first = torch.autograd.grad(o.square().sum(), x.leaves(), retain_graph=True)
    second = torch.autograd.grad(o.square().sum(), x.leaves())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, x.leaves(), strict=True))


def test_same_values_without_gradients_and_from_strided_rows() -> None:
    x = make_inputs(150)
    o, final = _run("torch")(x, None)
    with torch.no_grad():
        strided = Inputs(**{n: torch.cat((t, t), 2)[:, :, : t.shape[2]] for n, t in vars(x).items()})
        o2, final2 = _run("torch")(strided, None)
    assert torch.equal(o, o2)
    assert torch.equal(final, final2)


def test_gradcheck_on_a_small_tree() -> None:
    x = make_inputs(9, Hk=1, H=2, K=3, V=2)

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
        return gated_delta_rule(
            *leaves, use_qk_l2norm=True, output_final_state=True, cu_seqlens=[0, 4, 6, 9], parents=[-1, 0, 0]
        )

    assert torch.autograd.gradcheck(run, x.leaves())

"""The gated delta rule token by token: slow, differentiable by autograd, and obviously right.

Letters: T rows, H value heads, Hk key heads, K key dim, V value dim, N given states.

Source of the rule: "Gated Delta Networks" (Yang et al., 2024), equation 10, in the orientation S [K, V]:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_pred(t) + beta_t k_t v_t^T        o_t = scale S_t^T q_t
"""

from collections.abc import Sequence

import torch
from torch import Tensor

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last dim, the normalisation of Hugging Face's Qwen3-Next and Qwen3.5."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def naive_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    predecessor: Sequence[int],
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Runs the recurrence along any path structure.

    Args:
        q, k: [T, Hk, K]; value head h reads key head h // (H // Hk).
        v: [T, H, V].
        g, beta: [T, H], log decay and write strength.
        predecessor: for every row the earlier row that it continues, -1 for the zero state, -2 - i for
            `initial_state[i]`.
        scale: factor on q, K**-0.5 unless given.
        use_qk_l2norm: normalise q and k first.
        initial_state: [N, H, K, V].

    Returns:
        o [T, H, V] and the state [H, K, V] after every row. Everything is computed in fp32, or fp64 if v is fp64.

    Example:
        >>> q, k, v = (torch.randn(3, 2, 4) for _ in range(3))
        >>> o, states = naive_gated_delta_rule(q, k, v, -torch.rand(3, 2), torch.rand(3, 2), predecessor=[-1, 0, 0])
        >>> o.shape, len(states)
        (torch.Size([3, 2, 4]), 3)
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    num_rows, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    if len(predecessor) != num_rows:
        raise ValueError(f"{len(predecessor)} predecessors for {num_rows} rows; give one per row")
    out_dtype = q.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * (key_dim**-0.5 if scale is None else scale)
    group = num_heads // k.shape[1]
    zero = v.new_zeros(num_heads, key_dim, value_dim)
    states: list[Tensor] = []
    out: list[Tensor] = []
    for t in range(num_rows):
        p = predecessor[t]
        if p >= t:
            raise ValueError(f"row {t} continues row {p}, which does not stand before it; order rows along their paths")
        if p >= 0:
            s_HKV = states[p]
        elif p == -1:
            s_HKV = zero
        else:
            assert initial_state is not None
            s_HKV = initial_state[-2 - p].to(dtype)
        q_HK, k_HK = (x[t].repeat_interleave(group, dim=0) for x in (q, k))
        s_HKV = g[t].exp()[:, None, None] * s_HKV
        read_HV = torch.einsum("hk,hkv->hv", k_HK, s_HKV)
        s_HKV = s_HKV + torch.einsum("hk,hv->hkv", k_HK, beta[t][:, None] * (v[t] - read_HV))
        states.append(s_HKV)
        out.append(torch.einsum("hk,hkv->hv", q_HK, s_HKV))
    o = torch.stack(out) if out else v * q.sum()  # no rows: still an edge to every input
    return o.to(out_dtype), states

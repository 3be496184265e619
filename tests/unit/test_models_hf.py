"""The model code gives Hugging Face's numbers, on dense doubles of the ops."""

from copy import deepcopy

import pytest
import torch

from deltamesh.models import HybridCausalLM, random_weights, tiny_config
from tests.unit.models_common import (  # noqa: F401 - fixtures
    dense_ops,
    hf_model,
    hf_on_cpu,
    logprobs,
    one_sequence,
    tiny_state,
    tokens,
)

pytestmark = pytest.mark.usefixtures("dense_ops", "hf_on_cpu")


def test_hidden_states_and_logprobs_are_hugging_faces() -> None:
    config = tiny_config()
    model = HybridCausalLM(config)
    random_weights(model, seed=0)
    reference = hf_model(tiny_state(0), deepcopy(config), torch.float32)
    x = tokens(37)
    ours = model(x, one_sequence(37))
    theirs = reference.model(input_ids=x[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    logits = reference(input_ids=x[None], use_cache=False).logits[0]
    torch.testing.assert_close(logprobs(ours, model.head_weight), logits.log_softmax(-1), rtol=2e-5, atol=2e-5)


def test_every_parameter_gradient_is_hugging_faces() -> None:
    config = tiny_config()
    model = HybridCausalLM(config)
    random_weights(model, seed=1)
    reference = hf_model(tiny_state(1), deepcopy(config), torch.float32)
    x, y = tokens(29, seed=1), tokens(29, seed=2)
    x[7] = 258  # the padding token: its embedding row takes no gradient
    logprobs(model(x, one_sequence(29)), model.head_weight)[torch.arange(29), y].sum().backward()
    logits = reference(input_ids=x[None], use_cache=False).logits[0]
    logits.log_softmax(-1)[torch.arange(29), y].sum().backward()
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        scale = theirs[name].grad.abs().max().item()
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-4, atol=2e-5 * scale, msg=lambda m, n=name: n + m)
        assert scale > 0, name


def test_fp64_is_fp64_throughout() -> None:
    model = HybridCausalLM(tiny_config(), dtype=torch.float64)
    random_weights(model, seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    x, y = tokens(23), tokens(23, seed=1)

    def loss() -> torch.Tensor:
        return logprobs(model(x, one_sequence(23)), model.head_weight)[torch.arange(23), y].mean()

    loss().backward()
    direction = {n: torch.randn(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
    slope = sum((p.grad * direction[n]).sum().item() for n, p in model.named_parameters())

    def moved(step: float) -> float:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.add_(direction[n], alpha=step)
            value = loss().item()
            for n, p in model.named_parameters():
                p.sub_(direction[n], alpha=step)
        return value

    # a single rounding to fp32 anywhere would put noise of about 1e-8 / 1e-7 on the difference quotient
    quotient = (moved(1e-7) - moved(-1e-7)) / 2e-7
    assert abs(quotient - slope) < 1e-6 * abs(slope)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute: str) -> None:
    x, y = tokens(19), tokens(19, seed=3)
    grads = []
    for mode in ("none", recompute):
        model = HybridCausalLM(tiny_config(), recompute=mode)
        random_weights(model, seed=0)
        logprobs(model(x, one_sequence(19)), model.head_weight)[torch.arange(19), y].sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_recomputation_keeps_fewer_bytes_between_passes() -> None:
    saved = {}
    for mode in ("none", "selective", "full"):
        model = HybridCausalLM(tiny_config(), recompute=mode)
        random_weights(model, seed=0)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held: dict[int, int] = {}

        def pack(t: torch.Tensor, held: dict[int, int] = held, weights: set[int] = weights) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(tokens(31), one_sequence(31))
        saved[mode] = sum(held.values())
        del out
    assert saved["full"] < saved["selective"] < saved["none"]


def test_tied_embeddings_share_one_parameter_and_sum_its_gradients() -> None:
    config = tiny_config()
    config.tie_word_embeddings = True
    model = HybridCausalLM(config)
    random_weights(model, seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.base_specs
    state = {name: p.detach() for name, p in model.named_parameters()}
    reference = hf_model({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, config, torch.float32)
    x = tokens(11)
    logprobs(model(x, one_sequence(11)), model.head_weight)[:, 5].sum().backward()
    reference(input_ids=x[None], use_cache=False).logits[0].log_softmax(-1)[:, 5].sum().backward()
    torch.testing.assert_close(
        model.lm_head.weight.grad, reference.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-4
    )


def test_the_tiny_models_loss_falls() -> None:
    model = HybridCausalLM(tiny_config())
    random_weights(model, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.tensor(list(b"the quick brown fox jumps over the lazy dog"))
    losses = []
    for _ in range(20):
        lp = logprobs(model(x[:-1], one_sequence(len(x) - 1)), model.head_weight)
        loss = -lp[torch.arange(len(x) - 1), x[1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses

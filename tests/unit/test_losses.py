"""Losses: sums per sequence, with gradients that match the formulas."""

import math

import pytest
import torch

from deltamesh.train.losses import LOSSES, cross_entropy, importance_sampling, loss_function, ppo


def _logprobs() -> torch.Tensor:
    return torch.tensor([-0.3, -1.2, -2.5, -0.7], dtype=torch.float64, requires_grad=True)


def test_cross_entropy_weighs_every_token_and_does_not_average() -> None:
    lp = _logprobs()
    weights = torch.tensor([0.0, 1.0, -0.5, 2.0], dtype=torch.float64)
    loss = cross_entropy(lp, weights=weights)
    loss.backward()
    assert loss.item() == pytest.approx(1.2 - 0.5 * 2.5 + 2 * 0.7)
    assert lp.grad is not None
    assert lp.grad.tolist() == (-weights).tolist()


def test_cross_entropy_without_weights_is_the_negative_sum() -> None:
    assert cross_entropy(_logprobs()).item() == pytest.approx(4.7)


def test_the_sum_over_parts_is_the_sum_of_the_whole() -> None:
    lp = _logprobs()
    adv = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    old = lp.detach() + torch.tensor([0.1, -0.4, 0.3, 0.0], dtype=torch.float64)
    for loss in (importance_sampling, ppo):
        whole = loss(lp, old_logprobs=old, advantages=adv)
        parts = [loss(lp[s], old_logprobs=old[s], advantages=adv[s]) for s in (slice(0, 1), slice(1, 4))]
        assert whole.item() == pytest.approx(sum(part.item() for part in parts))


def test_importance_sampling_on_policy_has_the_gradient_of_weighted_cross_entropy() -> None:
    lp = _logprobs()
    adv = torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
    importance_sampling(lp, old_logprobs=lp.detach(), advantages=adv).backward()
    assert lp.grad is not None
    assert torch.allclose(lp.grad, -adv)


def test_importance_sampling_weighs_by_the_ratio_of_probabilities() -> None:
    lp = _logprobs()
    old = lp.detach() - math.log(1.5)
    loss = importance_sampling(lp, old_logprobs=old, advantages=torch.ones(4, dtype=torch.float64))
    assert loss.item() == pytest.approx(-6.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the interval: the plain ratio
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier: clipped, no push
        (0.5, 2.0, -1.0, -1.0),  # good but less likely: pushed up
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: clipped
        (1.5, -2.0, 3.0, 3.0),  # bad but likelier: pushed down
    ],
)
def test_ppo_clips_only_what_would_go_further(ratio: float, advantage: float, value: float, slope: float) -> None:
    lp = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss = ppo(
        lp,
        old_logprobs=torch.tensor([-1.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
    )
    loss.backward()
    assert lp.grad is not None
    assert loss.item() == pytest.approx(value)
    assert lp.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("loss", [importance_sampling, ppo])
def test_a_token_without_advantage_may_have_any_old_logprob(loss) -> None:  # type: ignore[no-untyped-def]
    lp = _logprobs()
    old = torch.tensor([-math.inf, -1.2, math.nan, -0.7], dtype=torch.float64)
    value = loss(lp, old_logprobs=old, advantages=torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    value.backward()
    assert value.item() == pytest.approx(-2.0)
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([0.0, -1.0, 0.0, -1.0])


@pytest.mark.parametrize("name", LOSSES)
def test_tensors_of_another_length_are_refused(name: str) -> None:
    fields = ("weights",) if name == "cross_entropy" else ("old_logprobs", "advantages")
    with pytest.raises(ValueError, match=r"has shape \(3,\), logprobs has \(4,\)"):
        loss_function(name)(_logprobs(), **{field: torch.zeros(3, dtype=torch.float64) for field in fields})


def test_an_unknown_loss_is_refused_with_the_closest() -> None:
    with pytest.raises(ValueError, match="did you mean 'cross_entropy'"):
        loss_function("cross_entrophy")

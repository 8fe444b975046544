"""What a step does to gradients, against the same operations of torch's, one after the other."""

from __future__ import annotations

import torch

from lightning_elixir.optim.gradient_change import GradientChange, Transform


def test_the_loss_scale_goes_first_and_clips_follow_in_order() -> None:
    grad = torch.tensor([-800.0, 3.0, 700.0])
    change = GradientChange(0.125, (Transform("clamp", 50.0), Transform("factor", 0.5), Transform("clamp", 20.0)))
    expected = ((grad * 0.125).clamp(-50.0, 50.0) * 0.5).clamp(-20.0, 20.0)
    assert torch.equal(change.applied(grad), expected)
    assert torch.equal(grad, torch.tensor([-800.0, 3.0, 700.0]))
    change.apply_(grad)
    assert torch.equal(grad, expected)


def test_factors_alone_are_left_to_the_update() -> None:
    change = GradientChange(0.25, (Transform("factor", 0.5), Transform("factor", 0.1)))
    assert change.is_factor
    assert change.grad_factor == 0.25 * 0.5 * 0.1
    assert change.change_grad is None


def test_a_clamp_is_not_left_to_the_update_as_a_factor() -> None:
    change = GradientChange(0.25, (Transform("clamp", 1.0),))
    assert (change.is_factor, change.grad_factor) == (False, 1.0)
    grad = torch.tensor([8.0, 2.0])
    assert change.change_grad is not None
    change.change_grad(grad)
    assert torch.equal(grad, torch.tensor([1.0, 0.5]))


def test_nothing_to_do_copies_nothing() -> None:
    grad = torch.ones(3)
    assert GradientChange().applied(grad) is grad
    assert not GradientChange(1.0).is_nothing  # a loss scale of 1 is one all the same
    assert GradientChange().grad_factor == 1.0

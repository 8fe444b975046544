"""Optimizers as users write them, which nobody here knows: element-wise ones, and such that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675): the sign of a momentum."""

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": wd})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["num"] = torch.zeros(())
                state["num"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024 (arXiv 2405.15682), SGD: the parameters are y to train with, and the average x to evaluate.
    Counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9, warmup: int = 3) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "total": 0.0, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before the first step")
            lr = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup"])
            group["total"] += lr**2
            ck, beta = lr**2 / group["total"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, ck)
                p.add_(p.grad, alpha=lr * (beta * (1 - ck) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        self._set(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._set(True, lambda beta: 1 - beta)

    def _set(self, mode: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))


class _Plain(torch.optim.Optimizer):
    """Gradient descent, with a twist."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad)  # type: ignore[operator]


class ByNorm(_Plain):
    """Divides by the norm of the whole gradient."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad / p.grad.norm())  # type: ignore[operator,union-attr]


class ByLargeNorm(_Plain):
    """Divides by the norm of the whole gradient where that is large."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * p.grad / max(float(p.grad.norm()) / 1000.0, 1.0))  # type: ignore[operator,union-attr]


class ByNumber(_Plain):
    """Has another learning rate for each parameter of a group."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        number = next(i for i, other in enumerate(group["params"]) if other is p)
        p.sub_(group["lr"] / (number + 1) * p.grad)  # type: ignore[operator]


class Listing(_Plain):
    """Keeps its last gradients in a list."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p].setdefault("history", []).append(p.grad.clone())  # type: ignore[union-attr]
        super().update(p, group)


class ByRank(_Plain):
    """Decays matrices only, which a slice is not."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.dim() > 1:
            p.mul_(0.9)
        super().update(p, group)


class ByRow(_Plain):
    """Keeps a number for each row."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        self.state[p]["rows"] = p.grad.reshape(p.shape[0], -1).sum(1)  # type: ignore[union-attr]
        super().update(p, group)


class Noisy(_Plain):
    """Draws random numbers."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        p.add_(torch.randn_like(p))


class InBlocks(_Plain):
    """Divides by the largest gradient of each block, in the larger tensors."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        grad: Tensor = p.grad  # type: ignore[assignment]
        if p.numel() >= 4096:
            blocks = grad.reshape(-1, 256)
            grad = (blocks / blocks.abs().amax(1, keepdim=True)).view_as(grad)
        p.sub_(group["lr"] * grad)


class Counting(_Plain):
    """Keeps its step count on itself."""

    num = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num += 1
        super().step()


class ByNormInGroup(_Plain):
    """Keeps a number that depends on gradients in its groups."""

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0.0) + float(p.grad.sum())  # type: ignore[union-attr]
        super().update(p, group)


class Closing(_Plain):
    """Cannot do without a closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


REFUSED = {
    ByNorm: "is not element-wise: after step 1, a tensor of shape .* hold other values",
    ByLargeNorm: "is not element-wise: after step 4, a tensor of shape",
    ByNumber: "is not element-wise: after step 1, a tensor of shape",
    Listing: "its state history is a list with tensors in it, which is neither one number",
    ByRank: "is not element-wise: after step 1, a tensor of shape",
    ByRow: "its state rows of a tensor of shape .* neither one number nor one for each element",
    InBlocks: "is not element-wise: after step 1, a tensor of shape",
    Noisy: "so it draws random numbers",
    Counting: "a step changes its attribute num",
    ByNormInGroup: "the setting seen of its group",
    Closing: "failed when it was tried on small tensors.*, or use HybridAdam",
}

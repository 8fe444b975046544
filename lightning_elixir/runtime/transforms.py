"""Refuses what keeps parameters in ways of its own, of which nothing tells, where their storage comes and goes.

Backward reads what autograd has saved through our hooks, which bring the chunk again. `torch.func`'s derivatives know
no such hooks, and a tracer (`make_fx`, `torch.export`, `torch.jit.trace`) keeps the parameter itself in its graph, and
would read storage that has been released. Batching (`torch.func.vmap`) keeps nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch._dynamo.exc import Unsupported

from lightning_elixir.errors import StateError

_CURES = (
    'keep everything on the compute device (placement_policy="cuda"), or take copy.deepcopy(model), whose parameters '
    "are plain ones"
)

_functorch = torch._C._functorch
interpreters = _functorch.get_interpreter_stack
"""The transforms of `torch.func` that are under way; None: there are none."""
tracer = torch._C._get_tracing_state
"""What `torch.jit.trace` records with; None where it does not run."""
num_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are on."""
_modes = torch._C._TorchDispatchModeKey
_DERIVATIVES = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def check_untransformed() -> None:
    """Call before parameters that may go again are used.

    Raises:
        StateError: A derivative of `torch.func` is being taken, or a tracer is at work.
    """
    for level in interpreters() or ():
        if level.key() in _DERIVATIVES:
            raise _no_derivative()
    if tracer() is not None:
        raise _no_tracing("torch.jit.trace")
    if num_modes():  # which counts these as well
        for key in (_modes.PROXY, _modes.FAKE):
            if torch._C._get_dispatch_mode(key) is not None:
                raise _no_tracing("torch.export, torch.func.linearize or make_fx")


def explained(error: BaseException) -> StateError | None:
    """What to raise for an error of torch's that says that `torch.func`, or the compiler where it may not leave its
    graph, has met our hooks; None for any other."""
    text = str(error)
    if isinstance(error, Unsupported) and str(Path(__file__).parent) in text:
        return _no_full_graph(error)
    if isinstance(error, RuntimeError) and "torch.func" in text and "saved tensor hooks" in text:
        return _no_derivative()
    return None


def _no_full_graph(error: Unsupported) -> StateError:
    stack = getattr(error, "real_stack", None)
    name = f"'{stack[0].name}'" if stack else "a function"
    return StateError(
        f"{name} was compiled with fullgraph=True, and calls modules or is given parameters that move between memories:"
        " what brings them runs between graphs. Compile the modules that it calls instead (block.compile(), which takes"
        " fullgraph=True), or compile the function without fullgraph=True"
    )


def _no_derivative() -> StateError:
    return StateError(
        "torch.func's grad, vjp, jacrev, hessian, jvp and jacfwd are not possible through parameters that move between "
        "memories: what they keep for later would be gone then. Use torch.autograd.grad or "
        "torch.autograd.functional.jacobian and hessian (create_graph=True to go on differentiating), for forward mode "
        f"torch.autograd.forward_ad; or {_CURES}"
    )


def _no_tracing(tracer: str) -> StateError:
    return StateError(
        f"a model whose parameters move between memories cannot be traced ({tracer}): the graph would keep parameters "
        f"whose values are gone later. To trace, {_CURES}"
    )

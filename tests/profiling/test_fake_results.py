"""Results that are made from what is remembered are those that torch makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir.profiling.fake_results import FakeResults


class Remembering(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = FakeResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.run(func, types, args, kwargs or {})


def looks(values: Any) -> list[Any]:
    """What can be told of tensors without values, and which of them share memory."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [
        (
            type(t),
            t.shape,
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_inference(),
            t.untyped_storage().nbytes(),
            storages.index(storage),
            str(torch._C._dispatch_key_set(t)),
            sorted(vars(t)) if isinstance(t, FakeTensor) else None,
        )
        for t, storage in zip(tensors, storages, strict=True)
    ]


def square(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape or (4, 4), **options)


def trained(function: Callable[[Tensor], Tensor]) -> Any:
    x = square(requires_grad=True)
    y = function(x)
    y.sum().backward()
    return x, y, x.grad


def grown() -> Any:
    """The second time `out` has another size than at first; both times it changes."""
    x, out = square(), square(0)
    torch.add(x, x, out=out)
    return x, out


def reshaped_in_place() -> Any:
    x = square(2, 8)
    x.t_()
    x.unsqueeze_(0)
    return x


def parts_of_different_memory() -> Any:
    """Operands that look alike, of memories of different sizes."""
    whole = square(8, 4)
    return whole, whole[:4].t(), square().t(), whole[:4] + square(), torch.cat([whole[:4], square()])


CASES: dict[str, Callable[[], Any]] = {
    "views": lambda: (x := square(), x.t(), x[1:], x.view(2, 8), x.expand(3, 4, 4), x.detach(), x.unfold(0, 2, 1)),
    "many views": lambda: (x := square(), x.split(1), x.unbind(), x.chunk(2)),
    "in place": lambda: (x := square(), x.add_(1), x.mul_(x), x.copy_(square()), x[1:].zero_()),
    "named tuples": lambda: (x := square(), x.max(0), x.sort(), torch.native_dropout(x, 0.5, True)),
    "numbers": lambda: (x := square(dtype=torch.int64), x + 1, x + 1.0, x + True, x * 2.5),
    "dtypes": lambda: [square(dtype=d) + 1 for d in (torch.bfloat16, torch.float16, torch.float64, torch.int8)],
    "layouts": lambda: (
        x := square(2, 3, 4, 5),
        x.to(memory_format=torch.channels_last) * 2,
        x.permute(3, 1, 0, 2) + 1,
    ),
    "complex": lambda: (x := square(dtype=torch.complex64), x.conj(), x.conj() * 2, x.imag, x.conj().imag),
    "convolution": lambda: F.conv2d(square(1, 2, 8, 8), square(3, 2, 3, 3), padding=1),
    "norm": lambda: trained(lambda x: F.layer_norm(x, (4,), square(4, requires_grad=True))),
    "trained": lambda: trained(lambda x: F.softmax(x @ x.t(), -1).relu()[1:]),
    "strided gradient": lambda: trained(lambda x: torch.as_strided(x, (2, 2), (4, 2), 1)),
    "out": grown,
    "shape in place": reshaped_in_place,
    "memories": parts_of_different_memory,
    "meta": lambda: (square(device="meta") + 1, square() + 1),
}


@pytest.mark.parametrize("case", CASES)
def test_remembered_results_look_like_torchs(case: str) -> None:
    with FakeTensorMode():
        expected = looks(CASES[case]())
        with Remembering():
            assert looks(CASES[case]()) == expected
            assert looks(CASES[case]()) == expected


def test_inference_mode_makes_other_results() -> None:
    with FakeTensorMode(), Remembering():
        plain = looks(CASES["numbers"]())
        with torch.inference_mode():
            inference = looks(CASES["numbers"]())
        assert looks(CASES["numbers"]()) == plain
    with FakeTensorMode(), torch.inference_mode():
        assert looks(CASES["numbers"]()) == inference
    assert inference != plain


def test_results_are_remembered_and_let_go() -> None:
    asked: list[str] = []

    class Mode(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "aten":
                asked.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    with Mode(), Remembering():
        x = square()
        references = [weakref.ref(one) for one in (x + 1, x + 1, x.t(), x.t())]
        assert asked == ["aten.empty.memory_format", "aten.add.Tensor", "aten.t.default"]
        gc.collect()
        assert [one() for one in references] == [None] * 4


def test_another_default_dtype_is_another_result() -> None:
    with FakeTensorMode(), Remembering():
        x = square(dtype=torch.int64)
        assert (x * 1.5).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (x * 1.5).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

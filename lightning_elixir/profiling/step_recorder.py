"""Watches one step on fake tensors: every byte by what it is for, every access of a parameter, every operator."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_elixir.core.attention import can_stand_in, is_attention
from lightning_elixir.plan.profile import AttentionCall, Moment, ProfileInterval
from lightning_elixir.profiling.allocator import Block, CachingAllocator
from lightning_elixir.profiling.fake_results import FakeResults
from lightning_elixir.profiling.known_values import run
from lightning_elixir.profiling.workspaces import (
    BIASED_MATMUL_WORKSPACE_BYTES,
    BIASED_MATMULS,
    MATMUL_WORKSPACE_BYTES,
    MATMULS,
    workspace_bytes,
)

aten = torch.ops.aten
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # None: there are no hooks

AroundOperator = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]
"""Gets an operator, its positional operands, and what runs it; gives its result."""

_PARAMETER, _GRADIENT, _ACTIVATION = range(3)

# How C++ asks a fake tensor for its device: two thirds of all that is dispatched.
_DEVICE = torch.ops.prim.device.default

# An operator reads element by element what does not lie as its result does: a transposed or cut tensor, one repeated
# within rows. Seen on an H200, of 2.9 to 4.3 TB/s otherwise: products 1.7 (2.5 times as long), negations 1.5 (3.0),
# concatenations of halves 0.9 (4.9), masks 1.5 (2.9); 2.8 over all.
_SCATTERED = 2.8

# These make tensors without filling them.
_EMPTY = frozenset((aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided))


@dataclass(slots=True)
class _Held:
    """A living storage."""

    block: Block | None
    role: int
    born: int
    """Interval in which it came."""
    reference: weakref.ref[torch.UntypedStorage]


@dataclass(slots=True)
class _Frame:
    """A module whose forward runs."""

    module: nn.Module
    name: str
    fqns: tuple[str, ...]
    """Its own parameters, if it is one that holds them during its forward."""


@dataclass(slots=True)
class _Interval:
    fqns: tuple[str, ...]
    is_pinned: bool
    dropped: tuple[tuple[str, ...], ...]
    module: str
    is_backward: bool
    activation_bytes: int
    total_bytes: int
    grad_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    num_ops: int = 0
    grads: list[str] = field(default_factory=list)
    workspace_bytes: int = 0
    held: tuple[str, ...] = ()
    is_compiled: bool = False


class StepRecorder(TorchDispatchMode):
    """Enter around a step on a model of fake tensors; `watch` the model before.

    Memory is that of torch's CUDA allocator, workspaces included. Intervals and accesses are those of
    `lightning_elixir.runtime.engine`: modules with parameters of their own and none below hold them for their forward;
    what else is touched is needed at that moment.

    Args:
        around: Called for each operator.
    """

    def __init__(self, around: AroundOperator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around
        self._results = FakeResults()
        self.peak_bytes = 0
        self.peak_module = ""
        self.written: dict[str, None] = {}
        """Names of parameters that operators have written to, in the order of the first."""
        self._allocator = CachingAllocator()
        self._held: dict[int, _Held] = {}  # by storage address
        self._bytes = [0, 0, 0]  # by role, as allocated
        self._fqn_of: dict[int, str] = {}  # of parameters, by storage address
        self._fqn_by_id: dict[int, str] = {}
        self._frames: list[_Frame] = []
        self._pinned: Counter[str] = Counter()
        self._needed_with: dict[str, tuple[str, ...]] = {}  # all that a compiled module's backward needs, by each name
        self._drops: list[tuple[str, ...]] = []
        self._aliases: dict[int, weakref.ref[Tensor]] = {}  # alive, by id, over the storages of parameters
        self._held_names: Counter[str] = Counter()  # how many of them each parameter has
        self._grad_at: dict[str, int] = {}  # interval in which the gradient was last added to
        self._workspaces: set[tuple[bool, int]] = set()  # of matrix products: whether backward's, and size
        self._workspace_bytes = 0  # of matrix products
        self._intervals = [_Interval((), False, (), "", False, 0, 0)]
        self._compiled: frozenset[str] = frozenset()
        self.on_attention: Callable[[AttentionCall], None] | None = None
        """Called for each call of fused attention in a forward that needs gradients, but for those inside compiled code
        and those with dropout."""

    # Before the step

    def watch(self, model: nn.Module, compiled: Collection[str] = ()) -> None:
        """Take note of the model's parameters and buffers, and of its forwards and gradients from now on.

        Args:
            model: Of fake tensors.
            compiled: Names of modules that need all parameters below them at once, in forward and in backward.
        """
        self._fqn_by_id = {id(p): fqn for fqn, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
        for parameter in model.parameters():
            self._fqn_of[parameter.untyped_storage()._cdata] = self._fqn_by_id[id(parameter)]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_grad)
        for module in _in_order_of_moving(model):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.hold(tensor)
        inside: set[int] = set()
        self._compiled = frozenset(compiled)
        for name, module in model.named_modules():
            if name in compiled:
                inside.update(id(m) for m in module.modules())
                fqns = tuple(dict.fromkeys(self._fqn_by_id[id(p)] for p in module.parameters()))
                for fqn in fqns:  # a tied one that two of them have tells nothing
                    self._needed_with[fqn] = (fqn,) if fqn in self._needed_with else fqns
            else:
                fqns = () if id(module) in inside else self._held_by(module)
            module.register_forward_pre_hook(partial(self._enter, name, fqns), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _held_by(self, module: nn.Module) -> tuple[str, ...]:
        own = [p for p in module._parameters.values() if p is not None]
        below = any(p is not None for m in module.modules() if m is not module for p in m._parameters.values())
        return () if below else tuple(dict.fromkeys(self._fqn_by_id[id(p)] for p in own))

    def hold(self, tensor: Tensor, nbytes: int | None = None) -> bool:
        """Count a tensor's storage until it dies; False if it is known already.

        Args:
            nbytes: What it takes on the GPU, if that is not what it takes here.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return False
        block = self._allocator.allocate(storage.nbytes() if nbytes is None else nbytes)
        role = _PARAMETER if key in self._fqn_of else _ACTIVATION
        self._held[key] = _Held(block, role, len(self._intervals) - 1, weakref.ref(storage, partial(self._forget, key)))
        if block is not None:
            self._bytes[role] += block.nbytes
        return True

    def known_bytes(self, key: int) -> tuple[int, int]:
        """Of a living storage, by address: what it takes, and the interval in which it came."""
        held = self._held.get(key)
        return (0, -1) if held is None else (0 if held.block is None else held.block.nbytes, held.born)

    def so_far(self) -> Moment:
        """Where the step has come to."""
        interval = self._intervals[-1]
        return Moment(
            len(self._intervals) - 1, interval.flops, interval.moved_bytes, interval.num_ops, interval.activation_bytes
        )

    def mark(self, module: str) -> tuple[int, int, int]:
        """Have an interval begin now; gives its number, and the bytes of activations that are there, and of workspaces
        among them.

        Args:
            module: Its name, for people.
        """
        self._open((), False, module)
        return len(self._intervals) - 1, self._bytes[_ACTIVATION], self._workspace_bytes

    def _forget(self, key: int, reference: object) -> None:
        held = self._held.pop(key)
        self._release(held.block, held.role)

    def _release(self, block: Block | None, role: int) -> None:
        if block is not None:
            self._bytes[role] -= block.nbytes
            self._allocator.free(block)

    def _note_peak(self) -> None:
        interval = self._intervals[-1]
        total = self._allocator.allocated_bytes
        interval.activation_bytes = max(interval.activation_bytes, self._bytes[_ACTIVATION])
        interval.total_bytes = max(interval.total_bytes, total)
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak_module = self._frames[-1].name if self._frames else interval.module

    # Operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch puts around each call otherwise: it compiles nothing under such modes anyway

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # in backward, every look at a tensor would go through such modes
            if func is _DEVICE and isinstance(args[0], FakeTensor):
                self._begin(args)
                return args[0].fake_device
            if self._around is None:
                return self._run(func, types, args, kwargs or {})
            return self._around(func, args, partial(self._run, func, types, args, kwargs or {}))

    def _begin(self, sources: Iterable[Tensor]) -> None:
        """Something is done with these."""
        if not self._intervals[-1].is_backward and _in_backward():
            self._open((), False, "")  # backward of the loss
        self._see(sources)

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        sources = _tensors((*args, *kwargs.values()))
        self._begin(sources)
        result = run(func, types, args, kwargs, sources, self._results)
        packet = func._overloadpacket
        outputs = _tensors((result,))
        is_new = False
        if func._schema.is_mutable and packet is not aten.set_:  # which writes no values
            self._note_writes(func, args, kwargs)
        if _in_backward() and (packet is aten.detach or _top_hooks(False) is not None):
            self._note_aliases(outputs)
        for index, tensor in enumerate(outputs):
            # CUDA keeps the statistics of layer norms in fp32.
            in_fp32 = packet is aten.native_layer_norm and index > 0
            is_new |= self.hold(tensor, 4 * tensor.numel() if in_fp32 else None)
        if packet in MATMULS:
            self._hold_matmul_workspace(packet in BIASED_MATMULS)
        blocks = [self._allocator.allocate(n) for n in workspace_bytes(packet, args, outputs)]
        for block in blocks:
            self._bytes[_ACTIVATION] += block.nbytes if block is not None else 0
        self._note_peak()
        for block in blocks:
            self._release(block, _ACTIVATION)
        flops = self._intervals[-1].flops
        if (is_new or func._schema.is_mutable) and packet not in _EMPTY:
            self._count(func, args, kwargs, result, sources, outputs)
        if self.on_attention is not None and is_attention(func) and can_stand_in(func, args, kwargs):
            is_seen = not self._is_in_compiled and not _in_backward()
            if is_seen and any(tensor.requires_grad for tensor in sources):
                keys = {tensor.untyped_storage()._cdata for tensor in outputs}
                nbytes = sum(self.known_bytes(key)[0] for key in keys)
                self.on_attention(AttentionCall(len(self._intervals) - 1, self._intervals[-1].flops - flops, nbytes))
        return result

    def _hold_matmul_workspace(self, is_biased: bool) -> None:
        is_backward = _in_backward()
        for nbytes in (MATMUL_WORKSPACE_BYTES, *((BIASED_MATMUL_WORKSPACE_BYTES,) if is_biased else ())):
            if (is_backward, nbytes) not in self._workspaces:
                self._workspaces.add((is_backward, nbytes))
                block = self._allocator.allocate(nbytes)
                nbytes = block.nbytes if block is not None else 0
                self._bytes[_ACTIVATION] += nbytes
                self._workspace_bytes += nbytes
                self._intervals[-1].workspace_bytes = self._workspace_bytes

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        sources: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        interval, packet = self._intervals[-1], func._overloadpacket
        interval.num_ops += 1
        formula = _FLOPS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            place = _PLACE_OF_CAUSAL.get(packet)
            if place is not None:
                kwargs = {"is_causal": place < len(args) and args[place], **kwargs}
                args = args[:place]
            interval.flops += int(formula(*args, **kwargs, out_val=result))
        else:
            moved = sum(t.numel() * t.element_size() for t in (*sources, *outputs))
            if torch.Tag.pointwise in func.tags:
                is_slow = any(_is_scattered(source, output) for source in sources for output in outputs)
            else:
                is_slow = packet is aten.cat and _joins_rows(args, outputs[0])
            if is_slow:
                moved = int(moved * _SCATTERED)
            interval.moved_bytes += moved

    # Accesses

    def on_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A function is called that takes all parameters among its operands at once."""
        self._see(_tensors((*args, *kwargs.values())))

    def _see(self, tensors: Iterable[Tensor]) -> None:
        found = None
        for tensor in tensors:
            fqn = self._fqn_of.get(tensor.untyped_storage()._cdata)
            if fqn is None or fqn in self._pinned:
                continue
            if fqn in self._held_names and id(tensor) not in self._fqn_by_id:
                continue  # it is there, whatever the engine does
            found = {fqn: None} if found is None else {**found, fqn: None}
        if found is not None:
            self._touch(tuple(found))

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for index, described in enumerate(func._schema.arguments):
            if described.alias_info is not None and described.alias_info.is_write:
                for tensor in _tensors((args[index] if index < len(args) else kwargs.get(described.name),)):
                    fqn = self._fqn_of.get(tensor.untyped_storage()._cdata)
                    if fqn is not None:
                        self.written[fqn] = None

    def _note_aliases(self, outputs: Iterable[Tensor]) -> None:
        """Non-reentrant activation checkpointing has hooks of its own around what it recomputes, and keeps all that is
        saved there until its backward: detached, or as it is where that needs no gradient. (While a hook runs there
        are none, so `detach` counts in any case.) What autograd saves otherwise counts for nothing: the engine has it
        packed."""
        for tensor in outputs:
            fqn = self._fqn_of.get(tensor.untyped_storage()._cdata)
            if fqn is not None and id(tensor) not in self._aliases:  # as a result of an operator in place may be
                self._aliases[id(tensor)] = weakref.ref(tensor, partial(self._forget_alias, id(tensor), fqn))
                self._held_names[fqn] += 1

    def _forget_alias(self, number: int, fqn: str, _: weakref.ref[Tensor]) -> None:
        del self._aliases[number]
        self._held_names[fqn] -= 1
        if not self._held_names[fqn]:
            del self._held_names[fqn]

    def _touch(self, fqns: tuple[str, ...]) -> None:
        if self._needed_with and _in_backward():
            fqns = tuple(dict.fromkeys(name for fqn in fqns for name in self._needed_with.get(fqn, (fqn,))))
        if set(fqns) <= set(self._intervals[-1].fqns):
            return
        where = fqns[0].rpartition(".")[0] if _in_backward() else ""
        if self._frames:
            where = self._frames[-1].name
        self._open(fqns, False, where)

    def _enter(self, name: str, fqns: tuple[str, ...], module: nn.Module, inputs: object) -> None:
        self._frames.append(_Frame(module, name, fqns))
        if fqns:
            self._pinned.update(fqns)
            self._open(fqns, True, name)

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return  # an exception passed by
        frame = self._frames.pop()
        if frame.fqns:
            self._pinned.subtract(frame.fqns)
            self._pinned = +self._pinned
            self._drops.append(frame.fqns)

    @property
    def _is_in_compiled(self) -> bool:
        """Whether the forward of a module runs that is compiled."""
        return any(frame.name in self._compiled for frame in self._frames)

    def _open(self, fqns: tuple[str, ...], is_pinned: bool, module: str) -> None:
        self._intervals[-1].grad_bytes = self._bytes[_GRADIENT]
        dropped, self._drops = tuple(self._drops), []
        interval = _Interval(
            fqns, is_pinned, dropped, module, _in_backward(), self._bytes[_ACTIVATION], self._allocator.allocated_bytes
        )
        interval.held = tuple(self._held_names)
        interval.workspace_bytes = self._workspace_bytes
        interval.is_compiled = self._is_in_compiled or (
            interval.is_backward and not self._needed_with.keys().isdisjoint(fqns)
        )
        self._intervals.append(interval)

    def _on_grad(self, parameter: Tensor) -> None:
        """A gradient was added up: it is model data from here on."""
        if parameter.grad is None:
            return
        held = self._held.get(parameter.grad.untyped_storage()._cdata)
        if held is not None and held.role == _ACTIVATION:
            held.role = _GRADIENT
            if held.block is not None:
                self._bytes[_ACTIVATION] -= held.block.nbytes
                self._bytes[_GRADIENT] += held.block.nbytes
        self._grad_at[self._fqn_by_id[id(parameter)]] = len(self._intervals) - 1

    # After the step

    def intervals(self) -> tuple[ProfileInterval, ...]:
        """What was recorded."""
        if self._drops:
            self._open((), False, "")
        self._intervals[-1].grad_bytes = self._bytes[_GRADIENT]
        for fqn, index in self._grad_at.items():
            self._intervals[index].grads.append(fqn)
        return tuple(
            ProfileInterval(
                fqns=i.fqns,
                is_pinned=i.is_pinned,
                dropped=i.dropped,
                module=i.module,
                is_backward=i.is_backward,
                activation_bytes=i.activation_bytes,
                grad_bytes=i.grad_bytes,
                total_bytes=i.total_bytes,
                flops=i.flops,
                moved_bytes=i.moved_bytes,
                num_ops=i.num_ops,
                grads=tuple(i.grads),
                workspace_bytes=i.workspace_bytes,
                held=i.held,
                is_compiled=i.is_compiled,
            )
            for i in self._intervals
        )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _in_order_of_moving(module: nn.Module) -> Iterator[nn.Module]:
    """Modules as `module.to(device)` goes through them."""
    seen: set[int] = set()

    def walk(node: nn.Module) -> Iterator[nn.Module]:
        if id(node) not in seen:
            seen.add(id(node))
            for child in node.children():
                yield from walk(child)
            yield node

    return walk(module)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _is_scattered(source: Tensor, output: Tensor) -> bool:
    """Whether an element-wise operator finds the elements of an operand in another order than those of the result.
    Whole rows that are repeated are not, nor are single values."""
    extra = output.dim() - source.dim()
    if extra < 0:
        return False
    sizes = [1] * extra + [n if stride else 1 for n, stride in zip(source.shape, source.stride(), strict=True)]
    strides = (0,) * extra + source.stride()
    is_repeated = [n == 1 for n, wanted in zip(sizes, output.shape, strict=True) if wanted > 1]
    if not any(is_repeated):
        return any(
            ours != theirs for ours, theirs, n in zip(strides, output.stride(), output.shape, strict=True) if n > 1
        )
    return not all(is_repeated) and is_repeated != sorted(is_repeated, reverse=True)


def _joins_rows(args: Sequence[Any], output: Tensor) -> bool:
    """Whether a concatenation puts pieces of rows together."""
    dim = args[1] if len(args) > 1 else 0
    return dim in (-1, output.dim() - 1) and output.dim() > 1


# Formulas that torch does not have, has for equal numbers of heads only, or takes long over


def _matmul_flops(first: Tensor, second: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * first.shape[-1]


def _addmm_flops(added: Tensor, first: Tensor, second: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * first.shape[-1]


# Kernels of attention reach less of the device than matrix products, in backward less than in forward, and work through
# tiles of scores, also where half of one is masked: seen of cudnn's on H100s, with 1024 and 8192 keys. Their operations
# count for as many as matrix products do in that time.
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 1.25, 1.45
_ATTENTION_TILE = 256


def _scores(query: Tensor, key: Tensor, is_causal: bool) -> float:
    """How many scores the kernel computes: with a causal mask those of earlier keys, to the end of a tile."""
    rows, columns = query.shape[-2], key.shape[-2]
    scores = rows * columns
    if is_causal:
        square = min(rows, columns)
        below = square * (square + 1) // 2 + (rows - square) * columns
        scores = min(scores, below + rows * _ATTENTION_TILE // 2)
    return float(math.prod(query.shape[:-2]) * scores)


def _attention_flops(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, is_causal: bool, out_val: Any, **kwargs: Any
) -> float:
    return 2 * _scores(query, key, is_causal) * (query.shape[-1] + value.shape[-1]) * _ATTENTION_FORWARD


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, is_causal: bool, out_val: Any, **kwargs: Any
) -> float:
    width = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * _scores(query, key, is_causal) * width * _ATTENTION_BACKWARD


def _grouped_flops(first: Tensor, second: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    # A product over the rows of a ragged operand, or over its columns: each element meets one group.
    if first.dim() == 2 and second.dim() == 2:
        return 2 * first.shape[0] * first.shape[1] * second.shape[1]
    return 2 * out_val.numel() * first.shape[-1]


_FLOPS: dict[Any, Callable[..., float]] = {
    aten.mm: _matmul_flops,
    aten.bmm: _matmul_flops,
    aten.addmm: _addmm_flops,
    aten._scaled_dot_product_cudnn_attention: _attention_flops,
    aten._scaled_dot_product_flash_attention: _attention_flops,
    aten._scaled_dot_product_efficient_attention: _attention_flops,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
}
_PLACE_OF_CAUSAL = {
    packet: next(i for i, argument in enumerate(packet.default._schema.arguments) if argument.name == "is_causal")
    for packet, formula in _FLOPS.items()
    if formula in (_attention_flops, _attention_backward_flops)
}

"""Runs a program on a backend, and notes what a user would see. The same code for the oracle and for the engine."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.fuzz.backends import Plain
from tests.fuzz.build import batch_of, logits_of, loss_of
from tests.fuzz.programs import AFTER_FORWARD, BEFORE_STEP, BETWEEN_STEPS, FAULTS, P_GRAD, Action, Program
from tests.fuzz.scale import has_scale
from tests.fuzz.watchers import LONGEST_READ_S, Watcher


class Note(NamedTuple):
    """One thing that was seen: a tensor, a number, a dict of them, or an error."""

    label: str
    value: Any


class Raised(NamedTuple):
    """An error that the program caught."""

    kind: str
    bases: tuple[str, ...]
    text: str


class Player:
    """One run.

    Args:
        program: What to run.
        backend: By what.
    """

    def __init__(self, program: Program, backend: Plain) -> None:
        self.program, self.backend = program, backend
        self.notes: list[Note] = []
        self.number = 0
        """Of the next batch."""
        self._step = 0
        self._average: dict[str, Tensor] = {}
        self.logits = torch.empty(0)
        """Of the last forward."""
        self._aliases: list[Tensor] = []
        self._views: list[Tensor] = []
        """Of aliases: after an assignment these show the new values (Note: assignment)."""
        self.watcher = Watcher(self)

    def run(self) -> list[Note]:
        self.watcher.begin()
        try:
            for step in range(self.program.steps):
                if not self.one_step(step) and self.program.through == "trainer":
                    break  # which passes on what its user raises
        finally:
            self.watcher.stop()
        self.finish()
        return self.notes

    def go_to(self, step: int, number: int | None = None) -> None:
        """That one comes next, whatever has been begun, with this batch; None: as if every step took as many."""
        self._step = max(0, step - 1)
        self.number = step * self.program.micro_batches if number is None else number

    def finish(self) -> None:
        self.watcher.check()
        self.note("final state", self.backend.state())
        if self.backend.rank == 0 or not self.backend.is_engine:
            self.note("final optimizer state", self.backend.optimizer_state())
        else:
            self.backend.optimizer_state()

    def note(self, label: str, value: Any) -> None:
        self.notes.append(Note(f"step {self._step}: {label}", _kept(value)))

    def one_step(self, step: int) -> bool:
        """Returns whether nothing was raised."""
        program, backend = self.program, self.backend
        may_raise = bool(program.at(step, FAULTS + AFTER_FORWARD + P_GRAD))
        is_plain_step = not program.clip and program.micro_batches == 1 and not may_raise and not program.is_bare
        is_plain_step &= not program.at(step, BEFORE_STEP) and not program.records_grads and not program.watcher
        if not may_raise:
            with backend.unobserved(is_plain_step):
                self._train(step)
        else:
            try:
                self._train(step)
            except Exception as error:
                self.note("raised", raised(error))
                error.__traceback__ = None
                if program.through == "trainer":
                    return False
                backend.zero_grad()
            finally:
                backend.model.clock.fault = ""
        backend.zero_grad()
        if backend.schedule is not None:
            backend.schedule.step()
        self.between_steps(step)
        return True

    def between_steps(self, step: int) -> None:
        if has_scale(self.program):
            scaling = self.backend.scaling()
            self.note("loss scale", scaling)
            self.backend.counters["skipped steps"] += scaling["is skipped"]
        for action in self.program.at(step, BETWEEN_STEPS):
            _ACTIONS[action.name](self, action)

    def training_loss(self, step: int, micro: int) -> Tensor:
        """Of one micro-batch."""
        program, clock = self.program, self.backend.model.clock
        self._step = clock.step = step
        clock.fault = ""
        if micro == program.micro_batches - 1:
            self._arm(step)
        loss = self.forward()
        self.note("loss", loss)
        return loss

    def _train(self, step: int) -> None:
        program, backend = self.program, self.backend
        for micro in range(program.micro_batches):
            loss = self.training_loss(step, micro) / program.micro_batches
            loss = self.after_forward(step, micro, loss)
            if program.through == "trainer" and micro == 0:
                backend.zero_grad()  # where Lightning does
            backend.backward(loss)
            del loss
            backend.model.clock.fault = ""
        if program.records_grads:
            self.note("gradients", backend.grads())
        is_hesitating = program.through == "trainer" and any(a.name == "no_step" for a in program.at(step, BEFORE_STEP))
        if program.through == "trainer" and not is_hesitating:
            backend.unscale()  # where Lightning does
        is_stepping = self.before_step(step)
        if is_hesitating:
            return
        if program.clip == "norm":
            norm = backend.clip_norm(program.clip_at)
            if program.through == "module":
                self.note("norm", norm)
        elif program.clip == "value":
            backend.clip_value(program.clip_at)
        if is_stepping:
            backend.step()

    def after_forward(self, step: int, micro: int, loss: Tensor) -> Tensor:
        """The loss of a micro-batch to run backward from."""
        if micro == self.program.micro_batches - 1:
            for action in self.program.at(step, AFTER_FORWARD + FAULTS):
                if action.name in _ACTIONS:
                    with self.backend.around_steps():
                        changed = _ACTIONS[action.name](self, action, loss)
                    loss = loss if changed is None else changed
        return loss

    def before_step(self, step: int) -> bool:
        """Returns whether there is to be a step."""
        actions = self.program.at(step, BEFORE_STEP + P_GRAD)
        for action in actions:
            if action.name in P_GRAD:
                with self.backend.visible_grads():
                    _ACTIONS[action.name](self, action)
            elif action.name != "no_step":
                _ACTIONS[action.name](self, action)
        return all(action.name != "no_step" for action in actions)

    def _arm(self, step: int) -> None:
        clock = self.backend.model.clock
        for action in self.program.at(step, FAULTS):
            clock.fault, clock.at = action.name, action.arg % max(1, clock.num_leaves)

    def forward(self, *, noted: str = "") -> Tensor:
        """The loss of the next batch."""
        number, rank = self.number, self.backend.rank
        self.number += 1
        torch.manual_seed(5000 + 10 * number + rank)
        output = self.backend(**batch_of(self.program, number, rank))
        self.logits = logits_of(output)
        if noted:
            self.note(noted, self.logits)
        return loss_of(self.program, output, number, rank)

    def parameter(self, action: Action, *, is_trained: bool = False) -> tuple[str, nn.Parameter]:
        named = [(n, p) for n, p in self.backend.named.items() if p.requires_grad or not is_trained]
        return named[action.arg % len(named)]


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _kept(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_kept(entry) for entry in value]
    return value


def raised(error: BaseException) -> Raised:
    return Raised(type(error).__name__, tuple(c.__name__ for c in type(error).__mro__), str(error)[:400])


# ---------------------------------------------------------------------------------------------------- actions

_ACTIONS: dict[str, Callable[..., Any]] = {}


def _action(call: Callable[..., Any]) -> Callable[..., Any]:
    _ACTIONS[call.__name__.strip("_")] = call
    return call


@_action
def read(player: Player, action: Action) -> None:
    name, p = player.parameter(action)
    player.note(f"read {name}", p.detach().float().sum())
    player.note(f"norm {name}", p.norm().item())
    player.note("item", p.flatten()[0].item())


read_parameters = _action(lambda player, action: read(player, action))
_ACTIONS["read_parameters"] = read


@_action
def write(player: Player, action: Action) -> None:
    _, p = player.parameter(action)
    with torch.no_grad():
        if action.arg % 3 == 0:
            p.mul_(0.75)
        elif action.arg % 3 == 1:
            p.add_(0.125)
        else:
            p.data.clamp_(-0.25, 0.25)


@_action
def copy_(player: Player, action: Action) -> None:
    _, p = player.parameter(action)
    with torch.no_grad():
        p.copy_(torch.full(p.shape, 0.1))


_ACTIONS["copy"] = copy_


@_action
def assign(player: Player, action: Action) -> None:
    _, p = player.parameter(action)
    player._views.clear()
    p.data = p.data * 0.5


@_action
def row(player: Player, action: Action) -> None:
    _, p = player.parameter(action)
    with torch.no_grad():
        p[0] = 0.25


@_action
def average(player: Player, action: Action) -> None:
    for name, p in player.backend.named.items():
        earlier = player._average.get(name)
        now = p.detach().clone()
        player._average[name] = now if earlier is None else earlier.mul_(0.5).add_(now, alpha=0.5)


@_action
def swap_average(player: Player, action: Action) -> None:
    """Evaluate with the average of the parameters, and put them back."""
    if not player._average:
        average(player, action)
    kept = {}
    with torch.no_grad():
        for name, p in player.backend.named.items():
            kept[name] = p.detach().clone()
            p.copy_(player._average[name])
    evaluate(player, action)
    with torch.no_grad():
        for name, p in player.backend.named.items():
            p.copy_(kept[name])


@_action
def state_dict(player: Player, action: Action) -> None:
    player.note("state dict", player.backend.state())
    if action.arg % 2 and not player.backend.is_mixed:
        player.note("its own", {k: v.cpu() for k, v in player.backend.model.state_dict().items()})


@_action
def load_state_dict(player: Player, action: Action) -> None:
    changed = {k: v * 0.75 if v.is_floating_point() else v for k, v in player.backend.state().items()}
    if action.arg % 2:
        player.backend.load_state(changed)
    else:
        player.backend.model.load_state_dict(changed)


@_action
def deepcopy(player: Player, action: Action) -> None:
    copied = player.backend.copied().eval()
    number = player.number
    batch = batch_of(player.program, number, player.backend.rank)
    with torch.no_grad():
        player.note("of a copy", logits_of(copied(**batch)))


@_action
def full_parameters(player: Player, action: Action) -> None:
    name, _ = player.parameter(action)
    with player.backend.whole(modify=bool(action.arg % 2)) as named, torch.no_grad():
        player.note("whole", named[name])
        named[name].mul_(0.5)


@_action
def evaluate(player: Player, action: Action) -> None:
    player.backend.model.eval()
    with torch.no_grad() if action.arg % 2 else torch.inference_mode():
        player.forward(noted="evaluated")
    player.backend.model.train()


@_action
def no_grad_forward(player: Player, action: Action) -> None:
    with torch.no_grad():
        player.forward(noted="without gradients")


@_action
def optimizer_state(player: Player, action: Action) -> None:
    player.backend.load_optimizer_state(player.backend.optimizer_state())


@_action
def load_optimizer_of_plain(player: Player, action: Action) -> None:
    """Through bytes, as a checkpoint would."""
    buffer = io.BytesIO()
    torch.save(player.backend.optimizer_state(), buffer)
    buffer.seek(0)
    player.backend.load_optimizer_state(torch.load(buffer, weights_only=False))


@_action
def other_lr(player: Player, action: Action) -> None:
    for group in player.backend.optimizer.param_groups:
        group["lr"] *= 0.5


@_action
def add_group(player: Player, action: Action) -> None:
    held = {id(p) for group in player.backend.optimizer.param_groups for p in group["params"]}
    left = [p for p in player.backend.targets().values() if p.requires_grad and id(p) not in held]
    if left and player.program.optimizer != "adagrad":  # torch's own makes no states for groups that are added
        lr = player.backend.optimizer.param_groups[0]["lr"]
        player.backend.optimizer.add_param_group({"params": left, "lr": lr})


@_action
def resume(player: Player, action: Action) -> None:
    player._aliases.clear()
    player._views.clear()
    player.backend.rebuild(1 + action.arg)
    player.backend.model.clock.step = player._step


@_action
def replan(player: Player, action: Action) -> None:
    if not any(a.name == "freeze" for a in player.program.actions):  # else it is another model's plan
        player.backend.replan(action.arg)


@_action
def freeze(player: Player, action: Action) -> None:
    _, p = player.parameter(action, is_trained=True)
    if sum(q.requires_grad for q in player.backend.named.values()) > 1 and p is not player.backend.model.head.weight:
        p.requires_grad_(False)


@_action
def kept_alias(player: Player, action: Action) -> None:
    for alias in (*player._aliases, *player._views):
        player.note("alias", alias.sum())
    _, p = player.parameter(action)
    player._aliases.append(p.detach())
    player._views.append(p.data.view(-1)[:2])


@_action
def numpy(player: Player, action: Action) -> None:
    name, p = player.parameter(action)
    player.note(f"numpy {name}", float(p.detach().cpu().float().numpy().sum()))


@_action
def vector(player: Player, action: Action) -> None:
    parameters = list(player.backend.named.values())
    flat = nn.utils.parameters_to_vector(parameters)
    player.note("vector", flat)
    if action.arg % 2:
        player._views.clear()
        nn.utils.vector_to_parameters(flat.detach() * 0.5, parameters)


@_action
def pickle(player: Player, action: Action) -> None:
    buffer = io.BytesIO()
    name, p = player.parameter(action)
    torch.save(p, buffer)
    buffer.seek(0)
    player.note(f"pickled {name}", torch.load(buffer, weights_only=False))


@_action
def part_forward(player: Player, action: Action) -> None:
    """A part of the model by itself: its gradients count in the next step."""
    model = player.backend.model
    generator = torch.Generator().manual_seed(action.arg)
    x = torch.randn(2, 3, player.program.width, generator=generator).to(player.program.device, model.head.weight.dtype)
    player.backend.before_forward()
    torch.manual_seed(action.arg)
    y = model.norm(x) if action.arg % 2 else model.head(x)
    if action.arg % 3:
        player.backend.backward(y.float().square().mean())
    player.note("part", y)


@_action
def thread_read(player: Player, action: Action) -> None:
    """In a thread of the user's, for which this one waits."""
    name, p = player.parameter(action)
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(player.backend.state() if action.arg % 2 else p.detach().float().cpu())
        except Exception as error:
            found.append(raised(error))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LONGEST_READ_S)
    if not found:
        raise TimeoutError("a thread that reads a parameter hangs")
    if player.program.ranks > 1:  # which would take the other ranks, and is refused
        if player.backend.is_engine and not (isinstance(found[0], Raised) and "StateError" in found[0].bases):
            raise AssertionError("with several ranks, a thread was served")
        return
    player.note(f"a thread reads {name}", found[0])


@_action
def save(player: Player, action: Action) -> None:
    player.backend.save(len(player.notes))


@_action
def stats(player: Player, action: Action) -> None:
    player.backend.look()


sample = stats
_ACTIONS["sample"] = stats


# Between backward and step


@_action
def drop_gradients(player: Player, action: Action) -> None:
    if action.arg % 2:
        player.backend.zero_grad()
    else:
        player.backend.drop_gradients()


@_action
def drop_one_gradient(player: Player, action: Action) -> None:
    player.backend.drop_gradient(player.parameter(action, is_trained=True)[0])


@_action
def grads(player: Player, action: Action) -> None:
    player.note("gradients", player.backend.grads())


@_action
def forward_again(player: Player, action: Action) -> None:
    player.backend.backward(player.forward())


# Between forward and backward


@_action
def evaluate_between(player: Player, action: Action, loss: Tensor) -> None:
    with torch.no_grad():
        player.forward(noted="between")


@_action
def two_losses(player: Player, action: Action, loss: Tensor) -> Tensor:
    player.backend.backward(player.logits.float().mean() * 0.5, retain_graph=True)
    return loss


@_action
def retained(player: Player, action: Action, loss: Tensor) -> None:
    player.backend.backward(loss, retain_graph=True)


@_action
def autograd_grad(player: Player, action: Action, loss: Tensor) -> None:
    name, p = player.parameter(action, is_trained=True)
    (grad,) = torch.autograd.grad(loss, [p], retain_graph=True, allow_unused=True)
    player.note(f"gradient of {name}", grad)


@_action
def twice_forward(player: Player, action: Action, loss: Tensor) -> Tensor:
    return loss + player.forward()


@_action
def double_backward(player: Player, action: Action, loss: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, [player.logits], create_graph=True)
    return loss + grad.square().sum()


@_action
def write_between(player: Player, action: Action, loss: Tensor) -> None:
    _, p = player.parameter(action)
    with torch.no_grad():
        p.mul_(0.9)


# `p.grad` between backward and step


def _trained_grads(player: Player) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in player.backend.named.items() if p.grad is not None]


@_action
def p_grad_read(player: Player, action: Action) -> None:
    player.note("p.grad", {name: p.grad.float() for name, p in _trained_grads(player)})


@_action
def p_grad_write(player: Player, action: Action) -> None:
    for index, (_, p) in enumerate(_trained_grads(player)):
        if (index + action.arg) % 3 == 0:
            p.grad.mul_(0.5)
        elif (index + action.arg) % 3 == 1:
            p.grad = p.grad * 0.25
        else:
            p.grad.add_(0.01)


@_action
def nan_guard(player: Player, action: Action) -> None:
    found = [p for _, p in _trained_grads(player)]
    if found and action.arg % 2:
        found[0].grad[0] = float("nan")
    if any(not torch.isfinite(p.grad).all() for p in found):
        player.backend.zero_grad()
    player.note("guarded", len(found))


@_action
def torch_clip(player: Player, action: Action) -> None:
    player.note("torch norm", nn.utils.clip_grad_norm_(player.backend.model.parameters(), 0.1))


@_action
def torch_clip_value(player: Player, action: Action) -> None:
    nn.utils.clip_grad_value_(player.backend.model.parameters(), 0.01)

"""Contexts of forwards and backwards, and of the hooks for tensors that these save."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from lightning_elixir.core.signals import deferred
from lightning_elixir.runtime.hooks import ThreadHooks
from lightning_elixir.runtime.transforms import explained


class Span:
    """A forward or a backward, for `with`. A signal may come after the block and before `__exit__`: then the span stays
    open, and `Engine.leave_interrupted` ends it later.

    Args:
        begin: Returns whether it is an outermost one; others are left alone.
        end: Called after it.
        abort: Called instead if anything was raised.
        tell: Called then with what the block has raised.
    """

    def __init__(
        self,
        begin: Callable[[], bool],
        end: Callable[[], None],
        abort: Callable[[], None],
        tell: Callable[[BaseException], None],
    ) -> None:
        self._begin = begin
        self._end = end
        self._abort = abort
        self._tell = tell
        self._is_open = False

    def __enter__(self) -> None:
        try:
            with deferred():
                self._is_open = self._begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with deferred():
            is_open, self._is_open = self._is_open, False
            if not is_open:
                return
            if error is not None:
                self._abort()
                self._tell(error)
                better = explained(error)
                if better is not None:
                    raise better from error
                return
            try:
                self._end()
            except Exception:
                raise
            except BaseException:  # a second Ctrl-C
                self._abort()
                raise


class Packing:
    """Hooks for saved tensors, on inside; in a call that has signals deferred.

    Args:
        enter: Enters them; None: there are none to enter.
    """

    def __init__(self, enter: Callable[[], ThreadHooks | None]) -> None:
        self._enter = enter
        self._hooks: ThreadHooks | None = None

    def __enter__(self) -> None:
        self._hooks = self._enter()

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

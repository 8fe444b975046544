"""Gradients of zeros: what `zero_grad(set_to_none=False)` leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

Key = tuple[int, int]
"""A parameter: chunk id, member index."""


class ZeroGrads:
    """Parameters whose gradient is zeros that lie in no shard: memory is taken for them where a step or a write needs
    it. And those that would be among them after `zero_grad(set_to_none=False)`, as they had a gradient since all
    were last dropped."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._chunk_ids: set[int] = set()
        """Chunks some of whose parameters may be in `_keys` on any rank; the same on every rank."""
        self._of_steps: set[Key] = set()
        """Had a gradient at an earlier step, on any rank, which has dropped it."""
        self._of_losses: set[Key] = set()
        """Had one on this rank that was lost: a backward failed."""
        self._may_have_lost = False
        """Whether that has happened, on every rank: it may have come to different parameters on each."""

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def chunk_ids(self) -> frozenset[int]:
        """Chunks some of whose parameters may have such a gradient on any rank. The same on every rank."""
        return frozenset(self._chunk_ids)

    def may_be_in(self, chunk_id: int) -> bool:
        """Whether parameters of the chunk may have such a gradient on any rank. The same on every rank."""
        return chunk_id in self._chunk_ids

    def note_step(self, used: Iterable[Key], others: Collection[Key]) -> None:
        """A step drops all gradients, but for those of other optimizers.

        Args:
            used: Which parameters of the optimizer that steps had one, on any rank.
            others: All parameters of other optimizers.
        """
        self._of_steps.update(used)
        self._keys.intersection_update(others)
        self._chunk_ids.intersection_update(chunk_id for chunk_id, _ in others)

    def note_loss(self, had: Iterable[Key]) -> None:
        """A backward has failed, on every rank.

        Args:
            had: Which parameters had a gradient on this rank.
        """
        self._of_losses.update(had)
        self._may_have_lost = True

    def forget_all(self) -> None:
        """All gradients are None, as if there had been none."""
        self._keys.clear()
        self._chunk_ids.clear()
        self._of_steps.clear()
        self._of_losses.clear()
        self._may_have_lost = False

    def forget(self, key: Key) -> None:
        """The gradient of one parameter is None."""
        for known in (self._keys, self._of_steps, self._of_losses):
            known.discard(key)

    def zero(self, key: Key, *, has_grad: bool, is_in_chunk: bool) -> None:
        """The gradient of one parameter becomes zeros, if it has one or had one.

        Args:
            has_grad: Whether it has one, on this rank.
            is_in_chunk: Whether parameters of its chunk may have one, on any rank. The same on every rank.
        """
        if is_in_chunk or self._may_have_lost or any(i == key[0] for i, _ in self._of_steps):
            self._chunk_ids.add(key[0])
        had = has_grad or any(key in known for known in (self._keys, self._of_steps, self._of_losses))
        self.forget(key)
        if had:
            self._keys.add(key)

    def zero_all(self, keys: Iterable[Key], chunk_ids: Collection[int], with_grads: Iterable[int]) -> None:
        """All gradients become zeros, also those of parameters that had one.

        Args:
            keys: Which have one, on this rank.
            chunk_ids: All chunks that can have gradients.
            with_grads: Those some of whose parameters may have one, on any rank. The same on every rank.
        """
        self._keys |= {*keys} | self._of_steps | self._of_losses
        self._chunk_ids |= {*with_grads} | ({*chunk_ids} if self._may_have_lost else {i for i, _ in self._of_steps})
        self._of_steps.clear()
        self._of_losses.clear()
        self._may_have_lost = False

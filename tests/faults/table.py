"""The faults: slips of a competent author, one place each, that most tests do not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Room = Literal["ranks", "updates", "nvme", "checkpoints", "rcache", "plan"]
Kind = Literal["silent", "hang", "error", "work"]
"""Wrong numbers that nobody is told of; a wait without an end; an error where there should be none; needless or lost
work, with the right numbers."""

PACKAGE = "lightning_elixir"


@dataclass(frozen=True)
class Fault:
    """One place of the package, and what it would be with the fault."""

    name: str
    room: Room
    kind: Kind
    path: str
    """Within the package."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    breaks: str
    """What a user would suffer."""

    def planted(self, text: str) -> str:
        """The file with the fault.

        Raises:
            ValueError: The place is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its place occurs {count} times in {PACKAGE}/{self.path}, not once")
        return text.replace(self.old, self.new)


_RANKS = (
    Fault(
        "length_of_own_message",
        "ranks",
        "hang",
        "core/comm.py",
        "longest = max(row[1] for row in rows)\n",
        "longest = len(message)\n",
        "Where one rank's message is long and another's short, the one waits for a second round that the other skips.",
    ),
    Fault(
        "mean_in_16_bits",
        "ranks",
        "silent",
        "core/comm.py",
        "total = first.to(torch.promote_types(torch.float32, mean.dtype), copy=True)",
        "total = first.to(mean.dtype, copy=True)",
        "From three ranks on, 16-bit gradients are rounded after every addition, and depend on the order of ranks.",
    ),
    Fault(
        "prefetch_in_own_order",
        "ranks",
        "silent",
        "runtime/agreement.py",
        "return tuple(i for i in wished[0] if i in common)",
        "return tuple(i for i in candidates if i in common)",
        "Ranks whose next needs come in another order gather different chunks in one collective: mixed parameters.",
    ),
    Fault(
        "own_wishes_first",
        "ranks",
        "silent",
        "runtime/agreement.py",
        "self._work.join(sorted(wanted), mine)",
        "self._work.join(sorted(wanted, key=lambda i: (i not in mine, i)), mine)",
        "Ranks that need different experts gather different chunks in one collective: mixed parameters, or a hang.",
    ),
    Fault(
        "largest_gradient_of_one_rank",
        "ranks",
        "silent",
        "stepping/norms.py",
        "            self._engine.comm.all_reduce_max(parts)\n            return float(",
        "            return float(",
        "Clipping to the largest magnitude takes that of each rank's own shards: ranks scale their parts differently.",
    ),
    Fault(
        "overflow_of_one_rank",
        "ranks",
        "silent",
        "stepping/norms.py",
        "        self._engine.comm.all_reduce_sum(parts)\n        return bool(torch.isfinite(parts).all())",
        "        return bool(torch.isfinite(parts).all())",
        "With fp16 a rank skips a step that the others take, where the overflow is in its shards alone.",
    ),
    Fault(
        "statistics_shared_in_training_only",
        "ranks",
        "silent",
        "runtime/forwards.py",
        "            if self._has_own_statistics:\n                self._share_statistics()\n",
        "            if self._has_own_statistics and torch.is_grad_enabled():\n"
        "                self._share_statistics()\n",
        "After the last training batch every rank evaluates with batch-norm statistics of its own.",
    ),
    Fault(
        "met_ranks_count_as_absent",
        "ranks",
        "error",
        "core/waits.py",
        'if passed is None or passed >= record["number"]:',
        'if passed is None or passed > record["number"]:',
        "Two ranks that wait for a slow third one are told that they wait for each other: a healthy run ends.",
    ),
    Fault(
        "different_meetings_go_on",
        "ranks",
        "hang",
        "runtime/agreement.py",
        "        if any(row[0] in (Meeting.WANT, Meeting.READY) for row in rows):\n            return True\n",
        "        if rows:\n            return True\n",
        "A call on one rank alone, as under `if rank == 0`, spins for ever instead of telling what is wrong.",
    ),
    Fault(
        "resident_chunks_are_not_served",
        "ranks",
        "hang",
        "runtime/residency.py",
        "            elif self._is_shared and self._fetcher.is_collective(self._chunks[chunk_id]):\n",
        "            elif self._is_shared and chunk_id not in self._rcache.resident_ids:\n",
        "A rank that has a chunk already stays away when another gathers it, which waits for ever.",
    ),
)

_UPDATES = (
    Fault(
        "begun_update_with_another_factor",
        "updates",
        "silent",
        "optim/updates.py",
        "settings, others = ((u.parts, u.grad_factor, u.is_compute_on_device) for u in (self, other))",
        "settings, others = ((u.parts, u.is_compute_on_device) for u in (self, other))",
        "A step that really clips takes the updates that had begun as if nothing were clipped.",
    ),
    Fault(
        "begun_updates_of_partly_trained_chunks",
        "updates",
        "silent",
        "stepping/cases.py",
        "        case Start.AHEAD, _, _ if not case.is_whole:\n",
        "        case Start.AHEAD, Grads.OVER_PARAMS, _ if not case.is_whole:\n",
        "Parameters that the optimizer does not have, beside others that it has, become zeros.",
    ),
    Fault(
        "begins_in_every_micro_batch",
        "updates",
        "work",
        "runtime/reducer.py",
        "is_last = self.landing.is_step_next or not self.landing.is_accumulation_expected",
        "is_last = True",
        "With accumulation every micro-batch begins updates that the next one drops: the host works for nothing.",
    ),
    Fault(
        "caution_for_ever",
        "updates",
        "work",
        "stepping/speculation.py",
        "        if self._num_off:\n            self._num_off -= 1\n            return\n",
        "        if self._num_off:\n            return\n",
        "After a few clipped steps no update ever begins inside backward again.",
    ),
    Fault(
        "streamed_over_the_old_states",
        "updates",
        "silent",
        "optim/streaming.py",
        "for target, source in zip(piece.written, above.written, strict=True):",
        "for target, source in zip((piece.param, piece.exp_avg, piece.exp_avg_sq), above.written, strict=True):",
        "A streamed update that is taken back, since the step clips, has written over the states already.",
    ),
    Fault(
        "over_gradients_that_are_not_there",
        "updates",
        "silent",
        "stepping/cases.py",
        "case _, Grads.LIKE_PARAMS, Params.HOST if case.is_whole:",
        "case _, Grads.LIKE_PARAMS, Params.HOST:",
        "A parameter that got no gradient in a step becomes zeros where others of its chunk were updated.",
    ),
    Fault(
        "unscaled_after_clamping",
        "updates",
        "silent",
        "optim/gradient_change.py",
        "                grad.clamp_(-value, value)\n",
        "                grad.clamp_(-value * self.inverse_scale, value * self.inverse_scale)\n",
        "With fp16, clipping by value clamps gradients that still have the loss scale: nearly all of them.",
    ),
    Fault(
        "overflows_since_the_beginning",
        "updates",
        "silent",
        "optim/scaling.py",
        "            self._growth_tracker = 0\n            self._hysteresis_tracker = self.options.hysteresis\n",
        "            self._growth_tracker = 0\n",
        "With hysteresis, the loss scale backs off at the first overflow after it has grown.",
    ),
    Fault(
        "updates_before_the_sum_is_there",
        "updates",
        "silent",
        "stepping/scheduler.py",
        "ready = (landed, chunk.ready, step.now if way.is_after_backward else None)",
        "ready = (chunk.ready, step.now if way.is_after_backward else None)",
        "With accumulation an update reads a gradient to which the last micro-batch is still being added.",
    ),
    Fault(
        "order_of_backward_is_kept",
        "updates",
        "work",
        "stepping/scheduler.py",
        "order=self._place(chunk))\n            self._early",
        "order=len(self._early))\n            self._early",
        "Updates that began inside backward keep the order of backward, and the next forward waits for the last one.",
    ),
)

_NVME = (
    Fault(
        "writes_before_earlier_reads",
        "nvme",
        "silent",
        "storage/nvme/direct.py",
        "            self._latest[piece] = task\n",
        "            if transfer.is_write:\n                self._latest[piece] = task\n",
        "A write may overtake an earlier read of the same place, which then gets values of the future.",
    ),
    Fault(
        "gradients_of_the_first_piece",
        "nvme",
        "silent",
        "optim/updates.py",
        "self.states.file.read_into(self.states.chunk_id, GRAD, blocks, nbytes, piece.start * itemsize)",
        "self.states.file.read_into(self.states.chunk_id, GRAD, blocks, nbytes)",
        "Chunks that are updated in pieces take the gradients of their first piece for all where those landed late.",
    ),
    Fault(
        "blank_moments_as_they_come",
        "nvme",
        "silent",
        "optim/updates.py",
        "zeros = (piece,) if self.is_first else self.blank",
        "zeros = (piece,) if self.is_first else ()",
        "A parameter that gets its first gradient later than its neighbours begins with moments of another state.",
    ),
    Fault(
        "moments_of_the_past_are_saved",
        "nvme",
        "silent",
        "optim/nvme_moments.py",
        'for part, *moments in self._states.read(lambda p: p in states and "exp_avg" not in states[p]):',
        "for part, *moments in self._states.read(states.__contains__):",
        "Moments that somebody has put beside those on the disk are lost when they are saved before the next step.",
    ),
    Fault(
        "buffers_of_dropped_visits",
        "nvme",
        "hang",
        "storage/nvme/state_file.py",
        "            self._num_ready -= error is None\n            self._give_back(visit)\n",
        "            self._num_ready -= error is None\n",
        "A read that nobody wants any more keeps its buffer; after three of them every update waits for ever.",
    ),
)

_CHECKPOINTS = (
    Fault(
        "loss_scale_begins_anew",
        "checkpoints",
        "silent",
        "strategy/sharded_checkpoints.py",
        '            "loss_scaler": scaler,\n',
        "",
        "A resumed fp16 run begins with the first loss scale again, and skips steps until it has come down.",
    ),
    Fault(
        "random_state_of_rank_0",
        "checkpoints",
        "silent",
        "strategy/sharded_checkpoints.py",
        "restore_random_states(randoms[comm.rank], device)",
        "restore_random_states(randoms[0], device)",
        "After resuming, all ranks drop out the same units, which they did not before.",
    ),
    Fault(
        "partial_loads_zero_the_rest",
        "checkpoints",
        "silent",
        "strategy/engine_state.py",
        "    if len(wanted) < len(segments):\n",
        "    if not wanted:\n",
        "Loading with strict=False zeros parameters that the checkpoint lacks, beside those that it has.",
    ),
    Fault(
        "earlier_checkpoint_goes_after_a_failure",
        "checkpoints",
        "work",
        "strategy/sharded_checkpoints.py",
        "            for action in self._followers if error is None else ():\n",
        "            for action in self._followers:\n",
        "When a save beside training fails, the only good checkpoint is removed all the same.",
    ),
    Fault(
        "saved_in_the_compute_dtype",
        "checkpoints",
        "silent",
        "runtime/whole.py",
        "    return torch.promote_types(own, master) if chunk.spec.requires_grad else own\n",
        "    return chunk.dtype\n",
        "Sharded checkpoints of mixed precision hold 16-bit parameters: a resumed run has lost the masters' bits.",
    ),
)

_RCACHE = (
    Fault(
        "nothing_more_to_prefetch",
        "rcache",
        "work",
        "plan/rcache.py",
        "            self._there_until, self._settled_until, self._absent = use, 0, -1\n        del self._resident",
        "            pass\n        del self._resident",
        "A chunk that leaves after prefetching has settled is not fetched ahead of its next use.",
    ),
    Fault(
        "prefetching_evicts_what_is_held",
        "rcache",
        "work",
        "runtime/residency.py",
        "                self._prefetch(ahead, self._staying(ids))\n",
        "                self._prefetch(ahead, ())\n",
        "A replica that a view still holds counts as gone after a prefetch, keeps its bytes, and is fetched again.",
    ),
    Fault(
        "fetched_from_overwritten_shards",
        "rcache",
        "silent",
        "runtime/fetcher.py",
        "        elif shard.is_param_overwritten and shard.master is not None:\n",
        "        elif shard.is_param_overwritten and param is None and shard.master is not None:\n",
        "Where gradients take the place of parameters, a forward before the step computes with gradients.",
    ),
    Fault(
        "aliases_of_one_rank",
        "rcache",
        "hang",
        "runtime/steps.py",
        "        self._aliased_ids = sorted({i for row in rows for i in row[1:]})\n",
        "        self._aliased_ids = sorted(mine)\n",
        "A rank whose user keeps a view of a parameter gathers it again after the step, and the others do not.",
    ),
    Fault(
        "rounded_writes_do_not_count",
        "rcache",
        "silent",
        "runtime/interception.py",
        "        if is_rounded and not self.written.has_given(chunk.id, index):\n",
        "        if is_rounded:\n",
        "After p.copy_ of fp32 values, a p.copy_ of 16-bit ones that round alike leaves the fp32 ones in the master.",
    ),
)

_PLAN = (
    Fault(
        "spare_values_take_no_memory",
        "plan",
        "silent",
        "plan/memory.py",
        "        return self.state_bytes(chunk) + self._value_bytes(chunk)\n",
        "        return self.state_bytes(chunk)\n",
        "A plan promises to fit into host memory, and takes two bytes a parameter more.",
    ),
    Fault(
        "ranks_prefetch_at_misses_alone",
        "plan",
        "silent",
        "plan/simulator/rcache_script.py",
        "candidates = rcache.proposals(held, is_meeting=is_meeting)",
        "candidates = rcache.proposals(held, is_meeting=is_meeting) if is_meeting else ()",
        "Predictions of several ranks have the device wait for chunks that were fetched ahead.",
    ),
    Fault(
        "many_moments_of_a_step",
        "plan",
        "silent",
        "plan/growth_estimate.py",
        "return [(group[0][0], group[-1][1]) for group in",
        "return [(group[0][0], group[0][1]) for group in",
        "In deep models the predicted peak of a longer step is too low, and it runs out of memory.",
    ),
    Fault(
        "buffers_of_what_stays",
        "plan",
        "silent",
        "plan/placing/spilling.py",
        "largest = sizes[-NVME_BUFFERS - 1 :]",
        "largest = sizes[-NVME_BUFFERS:]",
        "Too few states go to NVMe, as one buffer too few is counted: a model that would fit is refused.",
    ),
    Fault(
        "gradients_are_read_for_nothing",
        "plan",
        "silent",
        "plan/simulator/cost.py",
        "return (nbytes + grad) / read_rate, (nbytes + values) / write_rate",
        "return nbytes / read_rate, (nbytes + values) / write_rate",
        "Predicted steps with parameters on NVMe are too short: updates read their gradients from there as well.",
    ),
)

FAULTS: tuple[Fault, ...] = (*_RANKS, *_UPDATES, *_NVME, *_CHECKPOINTS, *_RCACHE, *_PLAN)

"""Owns the step: global norm, clipping, loss scale, and the update of the flat shards this rank is responsible for.

Invariant: the numbers a step works with - norm, clip factor, skip - are the same on every rank, and for elements with
the same gradients the update is the same whatever the plan.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, nn

from onefold.engine.flat import Flat
from onefold.engine.grad_states import GradStates
from onefold.engine.session import Session, session_of
from onefold.engine.unit import Unit
from onefold.errors import OptimizerError
from onefold.memory.buffer import exact_dtype
from onefold.optim.calls import NoDecay, check_call
from onefold.optim.elementwise import TorchRule
from onefold.optim.kernels.fused import fused_kernel
from onefold.optim.kernels.host import TorchKernel, host_kernel
from onefold.optim.norm import DeviceNorm, HostNorm
from onefold.optim.rules import Rule, check_hyper
from onefold.optim.update import FlatUpdate, KernelUpdate, Key, RuleUpdate, SliceUpdate
from onefold.plan.table import Tier
from onefold.tiers.tier import Host


class Optimizer(torch.optim.Optimizer):
    """Base of Onefold's optimizers: a rule applied to the shards of a sharded model.

    Args:
        model: what `onefold.shard` returned.
        rule: the update rule.
        defaults: hyper-parameters of the rule that differ from its defaults.
        no_decay: names or fnmatch patterns of parameters (or a function of name and parameter) without weight decay.
        param_groups: groups as in torch.optim (each a dict with "params"); None means all trained parameters.
        max_grad_norm: clip the global L2 norm of the averaged, unscaled gradient to this; None does not clip.
        delayed: let updates off the device take effect one step late, see [Note: The delayed update].
        delay_after: so many updates are exact before.

    Attributes:
        grad_norm: that norm before clipping, of the last step (float; inf or nan where gradients overflowed).
        skipped: whether the last step was skipped because a gradient on some rank was not finite.
        loss_scale: the loss scale now (1.0 without scaling).
        num_updates: steps so far that were not skipped.
        host_busy_s, host_wait_s: seconds that updates on the host took so far, and that the loop waited for them.

    Raises:
        OptimizerError: it is not given a sharded model, or gets arguments that it does not take, or groups hold
            parameters that are not its trained parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule | TorchRule,
        *,
        no_decay: NoDecay = (),
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        max_grad_norm: float | None = None,
        delayed: bool = False,
        delay_after: int = 40,
        **unknown: Any,
    ) -> None:
        check_call(type(self), model, unknown)
        session = session_of(model, "an optimizer", OptimizerError)
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise OptimizerError(
                f"max_grad_norm={max_grad_norm!r}: give a positive norm, or None to leave gradients alone"
            )
        self._session = session
        self._rule = rule
        self.max_grad_norm = max_grad_norm
        self.grad_norm = 0.0
        self.skipped = False
        groups = _groups(model, session, no_decay, param_groups)
        super().__init__(groups, dict(rule.defaults()))
        self._updates = self._build_updates()
        self._norm = (DeviceNorm if session.device.type == "cuda" else HostNorm)(session.comm, self._squares)
        self._members = _members(self.param_groups)
        self._membership = _membership(model, self._members)
        session.optimizer = ref(self)
        self._work = self._arrange()
        self._delay_after = self._allow_delay(delay_after) if delayed else None
        self.num_updates = 0

    def is_of(self, session: Session) -> bool:
        """Whether it updates that session's model."""
        return self._session is session

    @property
    def loss_scale(self) -> float:
        """The factor gradients are scaled by inside the model."""
        return self._session.scaler.scale

    @property
    def host_busy_s(self) -> float:
        """Seconds that updates on the host took so far; they run beside the loop."""
        return sum(house.worker.busy_s for house in self._session.houses.values() if isinstance(house, Host))

    @property
    def host_wait_s(self) -> float:
        """Seconds that the loop waited for updates on the host so far."""
        return sum(house.worker.waited_s for house in self._session.houses.values() if isinstance(house, Host))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights from the gradients reduced since the last `zero_grad`.

        Every rank must call it. Parameters without a gradient on any rank are left alone. The step is skipped on every
        rank when a gradient on any rank is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session = self._session
        session.runtime.settle()
        session.finish_readers()
        session.runtime.finish_updates()
        self._check_members()
        session.take_written()
        session.runtime.catch_up()
        active, told, is_changed = session.runtime.agree("optimizer step", self._settings(), self._norm.told)
        norm = self._norm.of(told, is_changed) / self.loss_scale
        self.skipped = not norm < float("inf")
        self.grad_norm = norm
        if not self.skipped:
            session.comm.before_change()  # which tells nobody who came for what: after the meeting that does
            self._update(active, self._factors(norm))
        scale = self.loss_scale
        session.scaler.update(self.skipped)
        if self.loss_scale != scale:
            session.reducer.rescale(self.loss_scale / scale)
        return loss

    @property
    def updates(self) -> Sequence[FlatUpdate]:
        """The updates of the flat buffers, in the order of the units."""
        return self._updates

    @property
    def rule_name(self) -> str:
        return self._rule.name

    def _hyper_parameters(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def _settings(self) -> int:
        """Rule, hyper-parameters and what is in which group in one number, for ranks to compare."""
        groups = [
            [
                (key, float(value) if isinstance(value, Tensor) else value)
                for key, value in sorted(group.items())
                if value is None or isinstance(value, (int, float, str, list, tuple, Tensor))  # not the user's objects
            ]
            for group in self._hyper_parameters()
        ]
        return crc32(repr((self._rule.name, self.max_grad_norm, groups, self._membership)).encode())

    def _check_members(self) -> None:
        """Updates were built of the groups' parameters, and would not see others.

        Raises:
            OptimizerError: a group was added or removed, or its parameters changed, since the optimizer was built; or a
                hyper-parameter is no number any more.
        """
        check_hyper(self._rule.name, self.defaults, self.param_groups)
        if _members(self.param_groups) != self._members:
            rank = self._session.comm.rank
            raise OptimizerError(
                f"param_groups hold other parameters than when the optimizer was built (rank {rank}): groups keep "
                "their parameters. Hyper-parameters may change at any time; to stop training a parameter, "
                "requires_grad_(False), or give its group lr=0; for other groups, build a new optimizer"
            )

    def _update(self, active: set[tuple[int, int, int]], factors: Sequence[float]) -> None:
        """Make the updates, or start them where they run beside the computation. See [Note: The gated step].

        Those of the host start first, since they take longest.
        """
        is_late = self._delay_after is not None and self.num_updates >= self._delay_after
        self.num_updates += 1
        for unit, updates in self._work:
            started = []
            for update in updates:
                compute = update.prepare(active, factors)
                if compute is None:
                    continue
                if is_late and update.flat.has_twin:
                    unit.update_late(update.flat, compute)
                    continue
                unit.update(update.flat, compute)
                started.append(update.flat)
            unit.hide_updated(started)
        for unit, _ in self._work:
            unit.show_updated()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this optimizer's parameters and free their memory (`set_to_none` is always meant)."""
        self._session.runtime.settle()
        self._session.reducer.finish()
        for update in self._updates:
            update.drop_gradients()
        self._session.reducer.forget_failures()

    def state_itemsize(self, flat: Flat) -> int:
        """Bytes of optimizer state an element of one flat buffer, master weights not counted."""
        return next((update.state_itemsize for update in self._updates if update.flat is flat), 0)

    def held(self, flat: Flat | None = None) -> list[Tensor]:
        """The optimizer state tensors of this rank, master weights included; of one flat buffer, or of all."""
        updates = [update for update in self._updates if flat is None or update.flat is flat]
        return [tensor for update in updates for tensor in update.held()]

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's shards: it can be loaded where the same shard of as many is held under the same plan."""
        self._session.runtime.catch_up()
        return {
            "layout": self._session.fingerprint,
            "rule": self._rule.name,
            "updates": [update.state_dict() for update in self._updates],
            "param_groups": self._hyper_parameters(),
            "scaler": self._session.scaler.state_dict(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            OptimizerError: it was saved of another shard, number of shards, plan or model, or with another rule.
        """
        if state_dict.get("layout") != self._session.fingerprint:
            raise OptimizerError(
                f"this optimizer state was saved as {state_dict.get('layout')}, but this is "
                f"{self._session.fingerprint}; a rank's own state loads only into the same shard, number of "
                "shards, plan and model"
            )
        saved_groups = state_dict["param_groups"]
        if state_dict.get("rule") != self._rule.name or len(saved_groups) != len(self.param_groups):
            raise OptimizerError(
                f"this optimizer state was saved with {state_dict.get('rule')} in {len(saved_groups)} parameter "
                f"group(s), but this is {self._rule.name} in {len(self.param_groups)}; load it into one like that"
            )
        self._session.wait_for_readers()
        self._session.runtime.catch_up()
        for update, saved in zip(self._updates, state_dict["updates"], strict=True):
            update.load_state_dict(saved)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update(saved)
        self._session.scaler.load_state_dict(state_dict["scaler"])
        self.num_updates = state_dict["num_updates"]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise OptimizerError("an optimizer of a sharded model cannot be copied: keep what state_dict() returns")

    def __reduce__(self) -> NoReturn:
        raise OptimizerError("an optimizer of a sharded model cannot be pickled: save what state_dict() returns")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_updates"):
            raise OptimizerError(
                "parameter groups are fixed when the optimizer is built; pass them all in param_groups="
            )
        super().add_param_group(param_group)

    def _build_updates(self) -> list[FlatUpdate]:
        group_of = {id(param): group for group in self.param_groups for param in group["params"]}
        updates: list[FlatUpdate] = []
        for index, states_group in sorted(self._session.reducer.states.items()):
            for position, states in enumerate(states_group):
                groups = [group_of.get(id(param)) for param in states.flat.params]
                if any(group is not None for group in groups):
                    updates.append(self._build_update(states, (index, position), groups))
        return updates

    def _arrange(self) -> list[tuple[Unit, list[FlatUpdate]]]:
        """Updates by unit, those of the host first."""
        by_unit: dict[int, list[FlatUpdate]] = {}
        for update in self._updates:
            by_unit.setdefault(update.unit_index, []).append(update)
        work = [(self._session.runtime.units[index], updates) for index, updates in sorted(by_unit.items())]
        return sorted(work, key=lambda item: -max(update.tier for update in item[1]))

    def _allow_delay(self, delay_after: int) -> int:
        """Take what delayed updates need.

        Raises:
            OptimizerError: no update can be late, or `delay_after` is not a number of updates.
        """
        if not isinstance(delay_after, int) or delay_after < 0:
            raise OptimizerError(f"delay_after={delay_after!r}: give the number of updates to make exactly first")
        lagging = [update.flat for update in self._updates if update.flat.has_twin]
        if not lagging:
            raise OptimizerError(
                f"delayed=True needs optimizer state that rests farther away than the weights (OFFLOAD), so that old "
                f"weights can be used while new ones are made; under {self._session.plan} no update can be late"
            )
        for flat in lagging:
            if flat.trained is not None:
                flat.trained.gradients.keep.add_buffer()
        return delay_after

    def _build_update(self, states: GradStates, key: Key, groups: Sequence[Mapping[str, Any] | None]) -> FlatUpdate:
        if isinstance(self._rule, TorchRule):
            return SliceUpdate(self._rule, states, key, groups)
        trained, dtype = states.flat.trained, exact_dtype(states.flat.weight.dtype)
        if trained is None or trained.rest.tier == Tier.DEVICE:
            fused = fused_kernel(self._session.device)
            if fused is None or not fused.supports(self._rule.name, dtype):
                return RuleUpdate(self._rule, states, key, groups)
            return KernelUpdate(fused, self._rule, states, key, groups)
        kernel = host_kernel(self._session.num_threads)
        if not kernel.supports(self._rule.name, dtype):
            kernel = TorchKernel()
        return KernelUpdate(kernel, self._rule, states, key, groups)

    def _squares(self, is_exact: bool) -> Tensor:
        return torch.stack([update.squares(is_exact) for update in self._updates]).sum()

    def _factors(self, norm: float) -> tuple[float, ...]:
        """What gradients are multiplied with, one after another: unscaling, then clipping as torch computes it."""
        factors = [1 / self.loss_scale] if self.loss_scale != 1 else []
        if self.max_grad_norm is not None:
            total = torch.tensor(norm, dtype=torch.float32)
            factors.append(float((self.max_grad_norm / (total + 1e-6)).clamp(max=1.0)))
        return tuple(factor for factor in factors if factor != 1)


def _members(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The ids of the parameters of each group; flat buffers keep all of them alive."""
    return [[id(param) for param in group["params"]] for group in groups]


def _membership(model: nn.Module, members: Sequence[Sequence[int]]) -> int:
    """Which parameters are in which group, in one number that is the same in every process."""
    names = {id(param): name for name, param in model.named_parameters()}
    return crc32(repr([[names[each] for each in ids] for ids in members]).encode())


def _groups(
    model: nn.Module, session: Session, no_decay: NoDecay, param_groups: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    names = {id(param): name for name, param in model.named_parameters()}
    trained = {id(param): param for states in session.reducer.all_states() for param in states.flat.params}
    for name, param in model.named_parameters():
        if param.requires_grad and not session.runtime.manages(param):
            raise OptimizerError(
                f"{name!r} is not among the parameters that onefold.shard took: it was added to the model, or "
                "replaced, afterwards. First change the model (adapters, new heads, assign=True), then shard it"
            )
    if param_groups is None:
        param_groups = [{"params": [param for _, param in model.named_parameters() if id(param) in trained]}]
    patterns: list[str] = (
        [] if callable(no_decay) or no_decay is None else [no_decay] if isinstance(no_decay, str) else list(no_decay)
    )
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names.values())]
    if unmatched:
        raise OptimizerError(
            f"no_decay pattern {unmatched[0]!r} matches no parameter; names look like {next(iter(names.values()))!r}"
        )
    chosen: list[dict[str, Any]] = []
    for group in param_groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise OptimizerError(
                'param_groups takes groups as torch.optim does, {"params": [...], "lr": ...}; to train all parameters '
                "alike, leave it out"
            )
        kept: list[nn.Parameter] = []
        spared: list[nn.Parameter] = []
        params: Any = group["params"]
        members: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
        for param in members:
            if id(param) not in names:
                raise OptimizerError("a parameter group holds a tensor that is not a parameter of the sharded model")
            if id(param) not in trained:
                continue
            name = names[id(param)]
            is_spared = no_decay(name, param) if callable(no_decay) else any(fnmatchcase(name, p) for p in patterns)
            (spared if is_spared else kept).append(param)
        chosen.append({**group, "params": kept})
        if spared:
            chosen.append({**group, "params": spared, "weight_decay": 0.0})
    if not any(group["params"] for group in chosen):
        raise OptimizerError("no parameter of the model is trained: all were frozen when onefold.shard was called")
    return chosen

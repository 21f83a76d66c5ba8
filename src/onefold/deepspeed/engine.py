"""Owns DeepSpeed's engine on top of Onefold: its loop, its counters, its meaning of gradient accumulation."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.deepspeed.config import Config
from onefold.deepspeed.loader import DeepSpeedDataLoader, make_loader
from onefold.deepspeed.loss_division import LossDivision, already_divided
from onefold.deepspeed.saves import Saves
from onefold.deepspeed.spec import Translation
from onefold.deepspeed.unsupported_names import missing_attribute
from onefold.engine.hooks import change_entering
from onefold.engine.session import session_of
from onefold.errors import EngineError
from onefold.optim.optimizer import Optimizer
from onefold.setup.compile_units import compile_units
from onefold.setup.gathered import accumulate

_log = logging.getLogger("onefold")
_TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is made from, beside its model, optimizer and schedule.

    Args:
        translation, settings, config: what the configuration became, its checked sections, and its values as given.
        local_rank: this process's number on its machine.
        client_optimizer: the script's own, where it made one.
        collate_fn: of loaders.
    """

    translation: Translation
    settings: Config
    config: Mapping[str, Any]
    local_rank: int = 0
    client_optimizer: torch.optim.Optimizer | None = None
    collate_fn: Callable[..., Any] | None = None


class DeepSpeedEngine(Saves):
    """What `initialize` returns: a sharded model with its optimizer and schedule, used as DeepSpeed's engine.

    Attributes:
        module: the model. What an engine has not is looked up in it.
        optimizer: Onefold's optimizer; None without one. lr_scheduler: the schedule; None without one.
        training_dataloader: the loader of `training_data`; None without.
        config: the configuration as it was given, as a dict.
        global_steps, global_samples: steps, skipped ones included, and samples on all ranks so far.
        skipped_steps: those that were skipped because gradients were not finite.
        micro_steps: calls of `step` so far.
        is_compiled: whether blocks are compiled.
        device, local_rank, global_rank, world_size, dp_world_size: where this process is, and among how many.
    """

    optimizer: Optimizer | None

    def __init__(self, module: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any, setup: Setup) -> None:
        super().__init__()
        session = session_of(module, "an engine")
        self.module = module
        self._translation, self._settings, self.config = setup.translation, setup.settings, dict(setup.config)
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.client_optimizer, self.basic_optimizer = setup.client_optimizer, setup.client_optimizer or optimizer
        self.collate_fn = setup.collate_fn
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.device, self.local_rank = session.device, setup.local_rank
        self.global_rank, self.world_size, self.dp_world_size = session.comm.rank, *[session.comm.num_ranks] * 2
        self.mp_world_size, self.mpu = 1, None
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self._micro_batch, self._division = setup.translation.micro_batch, LossDivision(setup.translation.accumulation)
        self._train_batch = setup.translation.train_batch
        self._given_boundary: bool | None = None
        self._num_backwards = self._num_no_sync = 0
        """Calls of `backward` since the last step, and contexts of `no_sync` that are open."""
        self._told: set[str] = set()
        self.is_compiled = setup.translation.compile
        self._was_applied = False
        self._grad_norm: float | None = None

    # --- the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        dtype = self._translation.autocast
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            output = self.module(*args, **kwargs)
        if self._division.parts == 1 or not torch.is_grad_enabled():
            return output
        return change_entering(output, self._division.enter)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add up gradients of `loss`, divided by the number of micro-batches of a step, on the way to the next `step`.

        Args:
            loss: one number, that depends on parameters.
            retain_graph: keep what a second backward through the same graph needs.
            scale_wrt_gas: False does not divide.
        Returns:
            The divided loss.
        Raises:
            EngineError: there is no optimizer, or `loss` is no such number.
        """
        self._check_optimizer("backward")
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise EngineError(
                f"engine.backward takes a loss, a tensor of one number with a gradient, not {_shown(loss)}; for other "
                "gradients call backward of the outputs, as torch has it"
            )
        divided = loss / self._division.parts if scale_wrt_gas else loss
        self._num_backwards += 1
        with self._collecting(), already_divided():
            divided.backward(retain_graph=retain_graph)
        return divided

    def _collecting(self) -> AbstractContextManager[None]:
        """Where gradients rest whole on every rank anyway, only the last micro-batch of a step reduces them."""
        is_last = self.zero_optimization_partition_gradients() or self.is_gradient_accumulation_boundary()
        return nullcontext() if is_last else accumulate(self.module)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` itself, for a plain `backward()`: the loss scale is applied inside of the model."""
        self._check_optimizer("scale")
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After the last micro-batch: update, clear gradients, move the schedule on. After others: count only.

        Args:
            lr_kwargs: arguments for the schedule's `step`.
        Raises:
            EngineError: inside `no_sync`, or without an optimizer.
        """
        self._check_optimizer("step")
        if self._num_no_sync:
            raise EngineError("engine.step() inside `with engine.no_sync():`; leave it before the last micro-batch")
        self._was_applied = False
        if self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation():
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        optimizer = self._check_optimizer("step")
        optimizer.step()
        self._grad_norm, self._was_applied = optimizer.grad_norm, not optimizer.skipped
        optimizer.zero_grad()
        self.global_steps += 1
        num_backwards = self._division.parts if self.managed_gradient_accumulation() else self._num_backwards
        self.global_samples += self._train_batch // self._division.parts * num_backwards
        self._num_backwards = 0
        if optimizer.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that were added up so far; `step` does so by itself. In the middle of a step of several
        micro-batches, under ZeRO 2 and 3, they stay, as with DeepSpeed."""
        is_kept = False
        if self._num_backwards and self._division.parts > 1:
            is_kept = self.zero_optimization_partition_gradients()
            self._tell_once(
                f"zero_grad() in the middle of a step of {self._division.parts} micro-batches: what the first "
                f"{self._num_backwards} added up {'stays' if is_kept else 'is forgotten'}, as with DeepSpeed at stage "
                f"{self.zero_optimization_stage()}. engine.step() clears gradients by itself"
            )
        if not is_kept:
            (self.module if self.optimizer is None else self.optimizer).zero_grad(set_to_none)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning("%s", text)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards only add up on this rank. Under ZeRO 2 and 3 too, where gradients are whole meanwhile.

        Raises:
            EngineError: inside of itself.
        """
        if self._num_no_sync:
            raise EngineError("engine.no_sync() inside of engine.no_sync()")
        self._num_no_sync += 1
        try:
            with accumulate(self.module):
                yield
        finally:
            self._num_no_sync -= 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last of its step; never where only `step()` tells."""
        if self._given_boundary is not None:
            return self._given_boundary
        return self.managed_gradient_accumulation() and (self.micro_steps + 1) % self._division.parts == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on, say whether this micro-batch is the last of its step, instead of counting.

        Raises:
            EngineError: with `managed_gradient_accumulation` false, where every `step()` is one.
        """
        if not self.managed_gradient_accumulation():
            raise EngineError("managed_gradient_accumulation is false: every engine.step() is a boundary; just call it")
        self._given_boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed weights."""
        return self._was_applied

    def _check_optimizer(self, what: str) -> Optimizer:
        if self.optimizer is None:
            raise EngineError(
                f"engine.{what} needs an optimizer: hand one to initialize, or write one into the configuration"
            )
        return self.optimizer

    # --- batch sizes

    def train_batch_size(self) -> int:
        """Samples a step, on all ranks."""
        return self._train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one backward on one rank."""
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._division.parts

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Make steps of another size, by the number of their micro-batches.

        Raises:
            EngineError: it is no multiple of what all ranks take at once.
        """
        at_once = self._micro_batch * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % at_once:
            raise EngineError(
                f"a step of {train_batch_size} samples is no multiple of {at_once}: micro-batches of "
                f"{self._micro_batch} on {self.dp_world_size} ranks"
            )
        self._train_batch, self._division.parts = train_batch_size, train_batch_size // at_once

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Make micro-batches of another size; their number stays."""
        self._micro_batch = micro_batch_size
        self._train_batch = micro_batch_size * self._division.parts * self.dp_world_size

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = _TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's part of `dataset`: shuffled where `route` is "train", else in order."""
        return make_loader(
            dataset,
            batch_size=self._micro_batch if batch_size is None else batch_size,
            rank=self.global_rank,
            num_ranks=self.dp_world_size,
            drop_last=self._translation.drop_last,
            is_trained_on=route == _TRAIN,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=num_local_io_workers,
        )

    # --- what it knows

    def get_global_grad_norm(self) -> float | None:
        """The norm of the averaged gradient before clipping, of the latest step; None before the first."""
        return self._grad_norm

    def get_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Momentum or betas of each parameter group."""
        return self._of_groups(
            "momentum" if self.optimizer is not None and "momentum" in self.optimizer.defaults else "betas"
        )

    def get_type(self) -> list[Any]:
        """What each parameter group says is its type."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(name, 0.0) for group in self.optimizer.param_groups]

    # --- the end

    def compile(  # as DeepSpeed's engine has it, not torch's modules
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of every block, unless the configuration did.

        Args:
            backend, compile_kwargs: for `torch.compile`.
        Raises:
            EngineError: with a schedule or compiled autograd, which are DeepCompile's.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise EngineError(
                "engine.compile compiles blocks: leave out schedule= and compiled_autograd_enabled=; gathers stay "
                "outside of compiled code, and overlap with it"
            )
        if not self.is_compiled:
            more = {key: value for key, value in (compile_kwargs or {}).items() if key != "backend"}
            compile_units(self.module, partial(torch.compile, backend=backend, **more))
            self.is_compiled = True

    def empty_partition_cache(self) -> None:
        """Does nothing: parameters that are split are given back after every pass."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DeepSpeedEngine":
        """What `to`, `cuda`, `half` and the like do: nothing, where parameters are so already.

        Raises:
            EngineError: they would be moved or cast.
        """
        for dtype in {param.dtype for param in self.module.parameters()}:
            now = torch.empty(0, dtype=dtype, device=self.device)
            asked = fn(now)
            if (asked.dtype, asked.device) != (now.dtype, now.device):
                raise EngineError(
                    f"an engine computes in {dtype} on {self.device}, and is neither cast nor moved ({asked.dtype}, "
                    f'{asked.device}): write "bf16" or "fp16" into the configuration, and move models before initialize'
                )
        return self

    def destroy(self) -> None:
        """Wait for what is under way."""
        session = session_of(self.module, "destroy")
        session.wait_for_saves()
        session.runtime.settle()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        module = vars(self).get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(missing_attribute(name))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    return repr(value)[:80]

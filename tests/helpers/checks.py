"""Owns how tests compare: tensors by name, bits, refusals, and the memory that tensors hold."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import onefold
from onefold.errors import OnefoldError

Tensors = Mapping[str, torch.Tensor | None]


def clean(name: str) -> str:
    """A parameter's name without what `torch.compile` adds."""
    return name.replace("_orig_mod.", "")


def tensors(model: nn.Module) -> Tensors:
    """Copies of parameters and buffers by name; the parameters must be whole."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {clean(name): tensor.detach().clone() for name, tensor in named}


def weights(model: nn.Module) -> Tensors:
    """Every parameter, whole, and every buffer of this rank."""
    with onefold.gathered(model):
        return tensors(model)


def pending(model: nn.Module) -> Tensors:
    """Copies of the gradients by name; None where there is none. The parameters must be whole."""
    return {clean(n): None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def grads(model: nn.Module) -> Tensors:
    """Every pending averaged gradient, whole."""
    with onefold.gathered(model):
        return pending(model)


def same(got: Tensors, want: Tensors, tolerance: float = 1e-5) -> None:
    """Raise AssertionError that names every tensor that differs. No gradient and a zero gradient count as equal."""
    wrong = [f"only {'got' if name in got else 'wanted'}: {name}" for name in sorted(set(got) ^ set(want))]
    for name in sorted(set(got) & set(want)):
        a, b = got[name], want[name]
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        if a.shape != b.shape or a.dtype != b.dtype:
            wrong.append(f"{name}: got {a.dtype}{list(a.shape)}, wanted {b.dtype}{list(b.shape)}")
        elif not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
            wrong.append(f"{name}: off by up to {worst:.3g}, {a.flatten()[:3].tolist()} for {b.flatten()[:3].tolist()}")
    if wrong:
        raise AssertionError("\n  ".join([f"{len(wrong)} of {len(want)} differ:", *wrong[:20]]))


def differing(got: Tensors, want: Tensors) -> list[str]:
    """Names of tensors whose values or dtypes differ; both have the same names."""
    assert got.keys() == want.keys()
    return [name for name in want if got[name].dtype != want[name].dtype or not torch.equal(got[name], want[name])]


def equal(got: Tensors, want: Tensors) -> bool:
    """Whether two models' tensors by name are the same, number for number."""
    return got.keys() == want.keys() and not differing(got, want)


def refused(call: Callable[[], Any], kind: type[Exception] = OnefoldError) -> str | None:
    """The message that `call` is refused with; None when it is not."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


def live_bytes(at_most: int | None = None) -> int:
    """Bytes of all distinct storages that hold memory now.

    A collective's thread lets go of its buffers a moment after the wait for them has returned, so where more than
    `at_most` is found, this looks again for a while.
    """
    deadline = time.monotonic() + 60
    while True:
        gc.collect()
        with torch._C.DisableTorchFunctionSubclass():
            found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta]
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
        total = sum(nbytes for address, nbytes in storages.items() if address)
        if at_most is None or total <= at_most or time.monotonic() > deadline:
            return total
        del found

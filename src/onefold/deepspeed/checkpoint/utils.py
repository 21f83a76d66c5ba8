"""DeepSpeed's module `checkpoint.utils`: copies of tensors to be saved."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def clone_tensors_for_torch_save(item: Any, device: "torch.device | str" = "cpu") -> Any:
    """`item` with a copy of its own, on `device`, in the place of every tensor in it (lists, tuples and dicts)."""

    def clone(leaf: Any) -> Any:
        return leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf

    return tree_map(clone, item)

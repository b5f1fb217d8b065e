"""Towers on many ranks: copied (DDP) or sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fullbatch.distributed import world

_WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


def copied(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with gradients averaged over ranks as backward goes (DDP); on one rank, the model itself."""
    if world().size == 1:
        return model
    where = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=where, broadcast_buffers=False, gradient_as_bucket_view=True)


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, its weights spread over the ranks in place (FSDP2): block by block, then what is left."""
    if world().size == 1:
        return model
    for module in model.modules():
        _keep_scalars(module)
    mesh = init_device_mesh(device.type, (world().size,))
    for block in list(_blocks(model)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "features"):  # what evaluation calls beside forward
        register_fsdp_forward_method(model, "features")
    return model


def _keep_scalars(module: nn.Module) -> None:
    """FSDP cannot shard a number (open_clip's frozen logit_scale): as a buffer it keeps its name and its value."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.ndim == 0:
            delattr(module, name)
            module.register_buffer(name, weight.detach())


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers of the towers: the members of outermost lists of modules of one kind."""
    for child in module.children():
        members = list(child.children())
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (member for member in members if next(member.parameters(), None) is not None)
        else:
            yield from _blocks(child)


@contextmanager
def gradients_stay_here(model: nn.Module, stay: bool) -> Iterator[None]:
    """While ``stay``, backward only adds to this rank's gradients; the last backward of a step then averages them."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not stay)
        yield
    elif isinstance(model, DistributedDataParallel) and stay:
        with model.no_sync():
            yield
    else:
        yield


def forget_gathered(model: nn.Module) -> None:
    """FSDP keeps what it last gathered of the outermost weights; after they were changed it must gather them anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other as it is.  Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(tensor: Tensor, values: Tensor) -> None:
    """Set a tensor, sharded or not, from a whole one."""
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The model's state, whole, whatever holds it.  Every rank must ask."""
    return (
        state_dict.get_model_state_dict(model, options=_WHOLE) if isinstance(model, FSDPModule) else model.state_dict()
    )


def set_weights(model: nn.Module, state: dict[str, Any]) -> None:
    if isinstance(model, FSDPModule):
        state_dict.set_model_state_dict(model, state, options=_WHOLE)
    else:
        model.load_state_dict(state)


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, whole.  Every rank must ask."""
    if isinstance(model, FSDPModule):
        return dict(state_dict.get_optimizer_state_dict(model, optimizer, options=_WHOLE))
    return optimizer.state_dict()


def set_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if isinstance(model, FSDPModule):
        state_dict.set_optimizer_state_dict(model, optimizer, state, options=_WHOLE)
    else:
        optimizer.load_state_dict(state)

"""Towers on many ranks: copied (DDP) or sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, empty
from torch.nn.parallel import DistributedDataParallel

from fullbatch.distributed import world
from fullbatch.distributed.shards import empty_whole


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


def lays_out_gradients(model: nn.Module) -> bool:
    """DDP does so anew after its first backward pass, in the order in which gradients came."""
    return isinstance(model, DistributedDataParallel)


def forget_gathered(model: nn.Module) -> None:
    """FSDP keeps what it last gathered of the outermost weights; after they were changed it must gather them anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other as it is.  Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def held_like(value: Any, tensor: Tensor | None) -> Any:
    """A whole tensor as its counterpart ``tensor`` is held, whole or sharded; whatever else as it is."""
    whole_one = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if whole_one and isinstance(tensor, DTensor) and value.shape == tensor.shape:
        return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements)
    return value


def empty_as_in(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Makes room for a tensor that was sharded: for this rank's part if the model is sharded, else for all of it."""
    mesh = next((weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)), None)
    if mesh is None:
        return empty_whole
    return lambda tensor: empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=[Shard(0)])


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The model's state in one piece, for those who export it: of a sharded one on the first rank's host alone.  Every
    rank must ask."""
    if not isinstance(model, FSDPModule):
        return model.state_dict()
    return state_dict.get_model_state_dict(
        model, options=state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def load_weights(model: nn.Module, state: dict[str, Any]) -> None:
    own = model.state_dict()
    model.load_state_dict({name: held_like(value, own.get(name)) for name, value in state.items()})


def load_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    weight_of = dict(zip(keys, weights, strict=False))  # where they do not fit, the optimizer says so
    moments = {
        key: {name: held_like(value, weight_of.get(key)) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})

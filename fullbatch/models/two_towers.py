"""Two towers: a batch of images and captions in, unit embeddings of one width out."""

# B: pairs   C: channels   H, W: pixels   L: tokens   D: width of the embedding

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as _functorch
from torch.nn import functional as F

from fullbatch.config.training import Precision
from fullbatch.data.loader import TextSize
from fullbatch.distributed.towers import whole_weights
from fullbatch.models.adapters import plain_state
from fullbatch.models.design import Design
from fullbatch.models.lean import encode_packed, make_lean
from fullbatch.models.tokenizers import NoText, Tokenizer


class TwoTowers(nn.Module):
    """An image tower and a text tower behind one face, whatever they are made of.

    ``backbone`` has ``encode_image`` and ``encode_text``, as open_clip's models do.  Images arrive as uint8 and are
    normalised here, on the device; float images are taken as normalised already.  Locked towers stay in evaluation
    mode, so that their BatchNorm statistics and dropout stay put.
    """

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        design: Design,
        tokenize: Tokenizer | NoText,
        *,
        width: int,  # of the embedding, D
        image_size: int,  # pixels a side
        locked: Iterable[nn.Module] = (),
        initial_temperature: float | None = None,  # that came with pretrained weights
        initial_bias: float | None = None,  # likewise
        adapter_scale: float = 1.0,  # what LoRA's changes are multiplied by; without adapters of no account
    ) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.design, self.tokenize, self.width, self.image_size = design, tokenize, width, image_size
        self.initial_temperature, self.initial_bias = initial_temperature, initial_bias
        self.adapter_scale = adapter_scale
        self.register_buffer("mean_C11", 255.0 * torch.tensor(design.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std_C11", 255.0 * torch.tensor(design.std).view(-1, 1, 1), persistent=False)
        self.reading = make_lean(backbone, getattr(tokenize, "padding", None))
        self._locked = list(locked)
        self.train()

    @property
    def context_length(self) -> int:
        return self.tokenize.context_length

    def forward(
        self, images_BCHW: Tensor | None, tokens_BL: Tensor | None, size: TextSize | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both embeddings, or one: whatever wraps the model (DDP, FSDP, torch.compile) sees only this call.  ``size``
        is what there is to read of the captions; without it their padding is read too."""
        if images_BCHW is not None and tokens_BL is not None and being_recorded(images_BCHW):
            return self._side_by_side(images_BCHW, tokens_BL, size)
        image_BD = None if images_BCHW is None else self.encode_image(images_BCHW)
        text_BD = None if tokens_BL is None else self.encode_text(tokens_BL, size)
        return image_BD, text_BD

    def _side_by_side(
        self, images_BCHW: Tensor, tokens_BL: Tensor, size: TextSize | None = None
    ) -> tuple[Tensor, Tensor]:
        """In a recorded step the towers' kernels, small as they are, run at the same time.  The image tower draws its
        noise first, as in a plain step."""
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            image_BD = self.encode_image(images_BCHW)
        text_BD = self.encode_text(tokens_BL, size)
        here.wait_stream(beside)
        return image_BD, text_BD

    def encode_image(self, images_BCHW: Tensor) -> Tensor:
        return _unit_rows(self.backbone.encode_image(self.normalised(images_BCHW)))

    def normalised(self, images_BCHW: Tensor) -> Tensor:
        """uint8 images as the towers take them."""
        if images_BCHW.dtype == torch.uint8:
            images_BCHW = (images_BCHW.float() - self.mean_C11) / self.std_C11
        return images_BCHW

    def encode_text(self, tokens_BL: Tensor, size: TextSize | None = None) -> Tensor:
        if size is not None and self.reading == "packed":
            return _unit_rows(encode_packed(self.backbone, tokens_BL, size))
        if size is not None and self.reading == "trimmed":
            tokens_BL = tokens_BL[:, : size.longest]
        return _unit_rows(self.backbone.encode_text(tokens_BL))

    def compile(self, **options: Any) -> None:
        """Each tower by itself, so that captions of another size leave the image tower as it is."""
        self.encode_image = compiled(self.encode_image, **options)  # type: ignore[method-assign]
        self.encode_text = compiled(self.encode_text, **options)  # type: ignore[method-assign]

    def plain_weights(self) -> dict[str, Tensor]:
        """The backbone's weights, whole, LoRA's changes added: those of an ordinary model.  Every rank must ask."""
        state = {key.removeprefix("backbone."): value for key, value in whole_weights(self).items()}
        return plain_state(state, self.adapter_scale)

    def train(self, mode: bool = True) -> TwoTowers:
        super().train(mode)
        for module in self._locked:
            _rest_where_frozen(module)
        return self


def compiled(encode: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """With the outputs of norms and activation functions made again on the way back, where products need them: they
    cost a pass over memory, and kept they are a third of all that is."""
    inner = torch.compile(encode, **options)
    if not hasattr(_functorch, "ban_recompute_materialized_backward"):  # torch may take it away: it is not public
        return inner

    def encoded(*given: Any, **named: Any) -> Tensor:
        with _functorch.patch(ban_recompute_materialized_backward=False):  # read when it compiles
            return inner(*given, **named)

    return encoded


def batch_norm_names(model: nn.Module) -> list[str]:
    """The layers whose output for a sample depends on its batch in training; those of a locked tower do not."""
    mode = model.training
    model.train()
    kinds = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in model.named_modules() if isinstance(module, kinds) and module.training]
    model.train(mode)
    return names


def is_convolutional(model: nn.Module) -> bool:
    """Whether a convolution is left that is more than a product of patches or points."""
    return any(type(module) is nn.Conv2d and max(module.kernel_size) > 1 for module in model.modules())


def _unit_rows(features_BD: Tensor) -> Tensor:
    return F.normalize(features_BD.float(), dim=-1)


def _rest_where_frozen(module: nn.Module) -> None:
    """Evaluation mode for every part of which no weight learns."""
    learns = [parameter.requires_grad for parameter in module.parameters()]
    if learns and not any(learns):
        module.eval()
    else:
        for child in module.children():
            _rest_where_frozen(child)


_DTYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def in_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in it."""
    dtype = _DTYPES[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def being_recorded(tensor: Tensor) -> bool:
    """While recording nothing runs, so no number can be read, and no seed set."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()

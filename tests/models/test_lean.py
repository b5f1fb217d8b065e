"""Towers that do less work give the same numbers: packed captions, patches by a product, attention without copies."""

import copy
from types import SimpleNamespace

import open_clip
import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import nn

from fullbatch.config.model import Model
from fullbatch.data.loader import TextSize, known_size
from fullbatch.models import two_towers
from fullbatch.models.attention import SelfAttention
from fullbatch.models.build import build_model
from fullbatch.models.lean import PatchProduct, make_lean
from fullbatch.models.tokenizers import Tokenizer
from tests.models.conftest import CAPTIONS, SMALL, some_images
from tests.models.siglip import write_siglip

SIZES = ("width", "heads", "layers", "context_length", "vocab_size")
NAMES = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
READINGS = {  # of the kinds of text tower that this project tells apart
    "argmax": ({}, "packed"),
    "eos": ({"pool_type": "eos", "eos_id": 49407}, "packed"),
    "projection with a bias": ({"proj_bias": True}, "packed"),
    "no projection": ({"proj_type": "none", "width": 16, "heads": 1}, "packed"),
    "layer scale": ({"ls_init_value": 0.5}, "packed"),
    "pooled first": ({"pool_type": "first"}, "whole"),
    "pooled last": ({"pool_type": "last", "no_causal_mask": True}, "whole"),
    "looks ahead": ({"no_causal_mask": True}, "whole"),
    "class token": ({"embed_cls": True}, "whole"),
    "other layers": ({"block_type": "custom"}, "whole"),
    "normalised queries": ({"qk_norm": True}, "whole"),
}


def gradients(model, *inputs, scale=1.0):
    """Embeddings, and every gradient of a sum that weighs them all differently; ``scale`` as a scaler does it."""
    model.zero_grad()
    embedded = [rows for rows in model(*inputs) if rows is not None]
    weights = torch.Generator().manual_seed(2)
    total = sum((rows * torch.rand(rows.shape, generator=weights).to(rows.device)).sum() for rows in embedded)
    (scale * total).backward()
    named = {name: weight.grad / scale for name, weight in model.named_parameters() if weight.grad is not None}
    return [rows.detach() for rows in embedded], named


def assert_alike(model, plain, padded, *sizes):
    """``plain`` on padded captions gives what the lean model gives, at each size."""
    embedded, named = gradients(plain, *padded)
    assert named
    for size in sizes:
        rows, grads = gradients(model, *padded, size)
        for ours, theirs in [*zip(rows, embedded, strict=True), *((grads[name], named[name]) for name in named)]:
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=2e-6)
        assert set(grads) == set(named)


def sizes_of(model, tokens):
    """The size itself, and two that a GPU would have: rounded up, and as large as can be."""
    lengths = model.tokenize.lengths(tokens).tolist()
    (exact,) = known_size(tokens, lengths)
    rows, length = tokens.shape
    (rounded,) = known_size(SimpleNamespace(is_cuda=True, shape=tokens.shape), lengths)
    assert exact.total < rounded.total <= rows * length
    return exact, rounded, TextSize(rows * length, length)


def built_plain(monkeypatch, config):
    """The same model as open_clip makes it, every time with the same weights."""
    torch.manual_seed(0)
    with monkeypatch.context() as patched:
        patched.setattr(two_towers, "make_lean", lambda *_: "whole")
        return build_model(config)


def built(config):
    torch.manual_seed(0)
    return build_model(config)


@pytest.mark.parametrize("custom", [False, True], ids=["CLIP", "CustomTextCLIP"])
@pytest.mark.parametrize("kind", READINGS)
def test_packed_captions_have_the_same_embeddings_and_gradients(kind, custom, write_config, monkeypatch):
    text, reading = READINGS[kind]
    if kind == "class token" and not custom:
        pytest.skip("open_clip's plain CLIP has none")
    config = Model(write_config(text=text, custom_text=custom))
    model, plain = built(config), built_plain(monkeypatch, config)
    assert model.reading == reading
    tokens = model.tokenize(CAPTIONS)
    assert_alike(model, plain, (some_images(32), tokens), *sizes_of(model, tokens))


def test_every_kind_of_open_clips_own_text_towers_is_read_as_it_must_be(write_config, monkeypatch):
    """Of each kind in its registry one, made small: only towers that cannot see what follows the end are packed."""
    kinds = {}
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)
        text = {key: value for key, value in config["text_cfg"].items() if key not in (*SIZES, *NAMES)}
        if "multimodal_cfg" not in config and "hf_model_name" not in text:
            options = {key: config[key] for key in ("custom_text", "quick_gelu") if key in config}
            kinds[repr((sorted(text.items(), key=str), options))] = text, options
    assert len(kinds) >= 12
    for text, options in kinds.values():
        if text.get("pool_type") == "eos":
            text = {**text, "eos_id": 49407}  # of the tokenizer that is at hand
        config = Model(write_config(text=text, **options))
        model, plain = built(config), built_plain(monkeypatch, config)
        sees_padding = text.get("no_causal_mask", False)
        assert model.reading == ("whole" if sees_padding else "packed"), text
        tokens = model.tokenize(CAPTIONS)
        assert_alike(model, plain, (None, tokens), *sizes_of(model, tokens)[:2])


def test_a_long_batch_in_which_no_caption_is_padded(write_config, monkeypatch):
    config = Model(write_config())
    model, plain = built(config), built_plain(monkeypatch, config)
    tokens = model.tokenize(["words that go on for far too long " * 3] * 3)
    (size,) = known_size(tokens, model.tokenize.lengths(tokens).tolist())
    assert size == TextSize(3 * 12, 12)
    assert_alike(model, plain, (None, tokens), size)


@pytest.mark.parametrize("options", [{"checkpoint_activations": True}, {"lora_rank": 2}, {"lock_text": True}])
def test_with_recomputation_adapters_or_a_locked_tower(options, write_config, monkeypatch):
    config = Model(write_config(), **options)
    model, plain = built(config), built_plain(monkeypatch, config)
    plain.load_state_dict(model.state_dict())
    tokens = model.tokenize(CAPTIONS)
    assert model.reading == "packed"
    assert_alike(model, plain, (some_images(32), tokens), *sizes_of(model, tokens))


def test_a_hugging_face_tower_reads_up_to_the_longest(text_folder, monkeypatch):
    config = Model(image_tower="test_vit", text_tower=text_folder, context_length=12)
    model, plain = built(config).eval(), built_plain(monkeypatch, config).eval()
    tokens = model.tokenize(["a photo of a cat", "two dogs", ""])
    seen = []
    model.backbone.text.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape), with_kwargs=True
    )
    assert model.reading == "trimmed"
    assert_alike(model, plain, (None, tokens), *sizes_of(model, tokens))
    assert seen == [(3, 7), (3, 12), (3, 12)]


def test_siglip_reads_its_padding(tmp_path, monkeypatch):
    path, tokenizer = write_siglip(tmp_path / "siglip")
    model = build_model(Model(path, tokenizer=tokenizer))
    tokens = model.tokenize(CAPTIONS)
    (size,) = known_size(tokens, model.tokenize.lengths(tokens).tolist())
    with torch.no_grad():
        assert torch.equal(model.encode_text(tokens, size), model.encode_text(tokens))


def test_lengths_end_where_a_caption_is_read():
    clip = Tokenizer(SimpleTokenizer(context_length=12), "CLIP", 12, 49408, 0)
    tokens = clip(CAPTIONS)
    assert torch.equal(clip.lengths(tokens), tokens.argmax(dim=1) + 1)
    ended = Tokenizer(SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=9)), "padded by its end", 5, 10, 9)
    assert ended.lengths(torch.tensor([[1, 2, 9, 9, 9], [1, 2, 3, 4, 9], [9, 9, 9, 9, 9]])).tolist() == [3, 5, 1]
    inside = Tokenizer(SimpleNamespace(), "padding inside", 5, 10, 0)
    assert inside.lengths(torch.tensor([[1, 0, 3, 0, 0], [0, 0, 0, 0, 0]])).tolist() == [3, 1]


def test_padding_that_would_be_read_is_kept(write_config, monkeypatch):
    """A caption that is read at its largest id, padded by a larger one, is read in its padding."""
    plain = [built_plain(monkeypatch, Model(write_config())).backbone for _ in range(3)]
    read = [make_lean(backbone, padding) for backbone, padding in zip(plain, (0, 49408, None), strict=True)]
    assert read == ["packed", "whole", "whole"]


@pytest.mark.parametrize("size", [32, 37])
def test_patches_by_a_product_are_those_of_the_convolution(size):
    convolution = nn.Conv2d(3, 8, 16, stride=16).double()
    product = copy.deepcopy(convolution)
    product.__class__ = PatchProduct
    images = torch.rand(2, 3, size, size, dtype=torch.float64)
    for layer in (convolution, product):
        layer(images).square().sum().backward()
    torch.testing.assert_close(product(images), convolution(images))
    torch.testing.assert_close(product.weight.grad, convolution.weight.grad)
    torch.testing.assert_close(product.bias.grad, convolution.bias.grad)


def test_only_what_can_be_replaced_is(write_config):
    vit = build_model(Model(write_config()))
    assert isinstance(vit.backbone.visual.conv1, PatchProduct)
    assert all(isinstance(layer.attn, SelfAttention) for layer in vit.backbone.visual.transformer.resblocks)
    assert not any(layer.attn.causal for layer in vit.backbone.visual.transformer.resblocks)
    assert all(layer.attn.causal for layer in vit.backbone.transformer.resblocks)
    resnet = build_model(Model(write_config(vision={"layers": [1, 1, 1, 1], "patch_size": None, "head_width": 16})))
    assert not any(isinstance(module, PatchProduct) for module in resnet.modules())


def test_weights_keep_their_names(write_config):
    ours = build_model(Model(write_config())).backbone.state_dict()
    theirs = open_clip.CLIP(**copy.deepcopy(SMALL)).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


def test_compiled_towers_keep_no_outputs_of_norms_and_activations(write_config):
    """Same numbers and gradients, from fewer bytes between forward and backward pass."""
    model = build_model(Model(write_config()))
    images = some_images(model.image_size)
    want, want_named = gradients(model, images, None)
    kept = []
    usual = torch.compile(model.encode_image, backend="aot_eager_decomp_partition")
    model.compile(backend="aot_eager_decomp_partition")
    for encode in (usual, model.encode_image):
        torch._dynamo.reset()
        rows = encode(images)
        kept.append(sum(t.nbytes for t in rows.grad_fn.saved_tensors if not isinstance(t, nn.Parameter)))
    (rows,), named = gradients(model, images, None)
    torch.testing.assert_close(rows, want[0])
    torch.testing.assert_close(named, want_named, rtol=1e-4, atol=2e-6)
    assert kept[1] < 0.75 * kept[0]


def test_compiled_towers_take_names_and_need_no_private_setting(write_config, monkeypatch):
    model = build_model(Model(write_config()))
    images = some_images(model.image_size)
    want = model.encode_image(images)
    monkeypatch.setattr("fullbatch.models.two_towers._functorch", object())  # torch may rename it
    model.compile(backend="aot_eager")
    torch.testing.assert_close(model.encode_image(images_BCHW=images), want)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

SENTENCE = "a photo of two red dogs that run fast over wet grass and along an old wall in the late afternoon sun"
LONG = {"context_length": 77, "width": 128, "heads": 2, "layers": 4}


def distance(ours, theirs):
    """Of all tensors together, relative."""
    gap = sum(((a.double().cpu() - b.double().cpu()) ** 2).sum() for a, b in zip(ours, theirs, strict=True))
    return float((gap / sum((b.double().cpu() ** 2).sum() for b in theirs)).sqrt())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_on_a_gpu_packed_captions_err_no_more_than_padded_ones(precision, compiled, write_config, monkeypatch):
    """Against float64 on the CPU: at most twice the error of open_clip's own tower in the same precision."""
    config = Model(write_config(text=LONG))
    words = SENTENCE.split()
    captions = [" ".join(words[: 1 + 7 * row % len(words)]) for row in range(50)]
    exact, padded, packed = built_plain(monkeypatch, config).double(), built_plain(monkeypatch, config), built(config)
    tokens = packed.tokenize(captions)
    lengths = packed.tokenize.lengths(tokens).tolist()
    rows, named = gradients(exact, None, tokens)
    there = tokens.cuda()
    (size,) = known_size(there, lengths)
    assert sum(lengths) < size.total < there.numel() / 2
    if compiled:
        packed.compile()
    errors = []
    for model, inputs in ((padded, (None, there)), (packed, (None, there, size))):
        with two_towers.in_precision(precision, there.device):
            got, grads = gradients(model.cuda(), *inputs, scale=1024.0 if precision == "fp16" else 1.0)
        errors.append((distance(got, rows), distance([grads[name] for name in named], list(named.values()))))
    (padded_rows, padded_grads), (packed_rows, packed_grads) = errors
    assert packed_rows <= 2 * padded_rows + 1e-6 and packed_grads <= 2 * padded_grads + 1e-6, errors

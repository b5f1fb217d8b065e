"""Small models and a small Hugging Face folder, so that no test needs a hub or a big network."""

import json
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before any hub client is imported

SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
CAPTIONS = ["a photo of a cat", "two dogs, running; fast", "", "ünïcode and 123 words that go on for far too long " * 3]


@pytest.fixture
def write_config(tmp_path):
    """An open_clip JSON config with some fields changed; returns its path."""

    def write(vision=(), text=(), name="small.json", **top):
        config = {**SMALL, **top}
        config["vision_cfg"] = {**SMALL["vision_cfg"], **dict(vision)}
        config["text_cfg"] = {**SMALL["text_cfg"], **dict(text)}
        path = tmp_path / name
        path.write_text(json.dumps(config))
        return str(path)

    return write


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A tiny DistilBERT with a word tokenizer, as transformers would save them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("distilbert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "two", "dogs", "running", "fast", "the"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    config = DistilBertConfig(
        vocab_size=len(words), dim=24, hidden_dim=48, n_layers=3, n_heads=2, max_position_embeddings=32
    )
    DistilBertModel(config).save_pretrained(folder)
    return str(folder)


def some_images(size, count=4):
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

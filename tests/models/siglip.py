"""A SigLIP model in small, and a stand-in for its tokenizer: a Unigram one of our own in a Hugging Face folder.

python -m tests.models.siglip FOLDER   # writes FOLDER/tokenizer, for --tokenizer, and FOLDER/siglip.json, for --model
"""

import json
import sys
from pathlib import Path

CAPTIONS = [
    "a photo of a cat",
    "two dogs running fast over the grass",
    "a red square beside a blue circle",
    "the quick brown fox jumps over the lazy dog",
    "an icon of a house with a green roof",
    "a picture of number 123 on a door",
]

# ViT-B-16-SigLIP of open_clip with smaller numbers: timm's trunk with attention pooling and no projection, a text tower
# that sees both ways and is read at its last token, a projection with a bias, a bias of the logits.
SIGLIP = {
    "embed_dim": 64,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
    "text_cfg": {
        "context_length": 64,
        "vocab_size": 512,
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 32,
        "heads": 2,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}


def write_tokenizer(folder, captions=CAPTIONS, vocabulary=500):
    """As SigLIP's: pieces of words by a Unigram model, captions that end in and are padded by </s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=vocabulary, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator(captions, trainer)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder)
    return str(folder)


def write_siglip(folder):
    """A JSON config and a tokenizer; their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "siglip.json"
    config.write_text(json.dumps(SIGLIP, indent=1))
    return str(config), write_tokenizer(folder / "tokenizer")


if __name__ == "__main__":
    print(*write_siglip(sys.argv[1]), sep="\n")

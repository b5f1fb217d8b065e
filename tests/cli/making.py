"""A small run, and what a command answers."""

import re

from fullbatch.cli import main
from fullbatch.cli.train import train_config

MODEL = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SHORT = ["--samples", "32", "--batch-size", "8", "--workers", "0", "--no-tensorboard", "--quiet"]
SHORT += ["--settings.rho", "1.0"]  # below log(negatives)


def config_of(*arguments):
    return train_config(list(arguments))[0]


def answer(capsys, *arguments):
    """The exit status and what was printed, whether by us or by tyro."""
    capsys.readouterr()
    try:
        status = main(list(arguments))
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def plain(text):
    """Without tyro's boxes and line ends."""
    return " ".join(re.sub(r"[^\x00-\x7f]", " ", text).split())


def small(place):
    return [*SHORT, "--data", f"{place}/shard.tar", "--model", f"{place}/model.json", "--runs", f"{place}/runs"]

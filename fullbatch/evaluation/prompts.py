"""Prompts for class names, and ImageNet's names and numbers."""

from __future__ import annotations

import functools

PLAIN_TEMPLATES = ("{}", "a picture of {}", "an image about {}")


def written_out(templates: tuple[str, ...]) -> tuple[str, ...]:
    """With the names of sets replaced by their prompts: "openai" is open_clip's 80, "simple" its 7."""
    import open_clip

    sets = {"openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES}
    return tuple(prompt for text in templates for prompt in ([f("{}") for f in sets[text]] if text in sets else [text]))


def prompted(template: str, name: str) -> str:
    """CLIP_benchmark's files write {c} where open_clip writes {}."""
    return template.replace("{c}", name).replace("{}", name)


@functools.cache
def imagenet_names() -> tuple[str, ...]:
    """open_clip's names of the 1,000 classes, by number."""
    import open_clip

    return tuple(open_clip.IMAGENET_CLASSNAMES)


@functools.cache
def imagenet_numbers() -> dict[str, int]:
    """From what a class's folder may be called to the class's number: "n01440764", "0", "000"."""
    from timm.data import ImageNetInfo

    ids = ImageNetInfo("imagenet-1k").label_names()
    numbers = {f"{number:0{width}d}": number for number in range(len(ids)) for width in (1, 3, 4)}
    return numbers | {name: number for number, name in enumerate(ids)}

"""``fullbatch recipes``: list them, or show one."""

from __future__ import annotations

from fullbatch.recipes import RECIPES, recipe_summary, recipe_text


def recipes(arguments: list[str]) -> int:
    match arguments:
        case []:
            width = max(len(name) for name in RECIPES)
            for name in RECIPES:
                print(f"{name:{width}}  {recipe_summary(name)}")
            print("\nShow one: fullbatch recipes NAME.  Use one: fullbatch train --recipe NAME --data ...")
        case ["-h" | "--help"]:
            print("usage: fullbatch recipes [NAME]")
        case [name]:
            print(recipe_text(name), end="")
        case _:
            raise ValueError("usage: fullbatch recipes [NAME]")
    return 0

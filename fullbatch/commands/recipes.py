"""``fullbatch recipes``: list them, or show one."""

from __future__ import annotations

from fullbatch.config.messages import listed, nearest
from fullbatch.recipes import RECIPES, SEARCHES, first_line, recipe_text, search_text

_USAGE = "usage: fullbatch recipes [NAME | search NAME]"


def recipes(arguments: list[str]) -> int:
    match arguments:
        case []:
            width = max(len(name) for name in (*RECIPES, *SEARCHES))
            for name in RECIPES:
                print(f"{name:{width}}  {first_line(recipe_text(name))}")
            print("\nShow one: fullbatch recipes NAME.  Use one: fullbatch train --recipe NAME --data ...")
            print("\nSearches:")
            for name in SEARCHES:
                print(f"{name:{width}}  {first_line(search_text(name))}")
            print("\nShow one: fullbatch recipes search NAME.  Use one: fullbatch search --recipe NAME --data ...")
        case ["-h" | "--help"]:
            print(_USAGE)
        case ["search", name]:
            print(search_text(name), end="")
        case ["search"]:
            raise ValueError(_USAGE)
        case [name] if name in RECIPES:
            print(recipe_text(name), end="")
        case [name] if name in SEARCHES:
            print(search_text(name), end="")
        case [name]:
            names = tuple(dict.fromkeys((*RECIPES, *SEARCHES)))
            raise ValueError(f"There is no recipe {name!r}{nearest(name, names)} They are {listed(names)}.")
        case _:
            raise ValueError(_USAGE)
    return 0

"""WinoGAViL: which of the candidate images does a cue go with?"""

# N: candidate images of all questions   Q: questions   D: width

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fullbatch import distributed
from fullbatch.evaluation.arrow_folders import CandidateImages
from fullbatch.evaluation.embed import Embedder
from fullbatch.evaluation.result import Result


def prompt_of_cue(cue: str) -> str:
    """
    >>> prompt_of_cue("Orange"), prompt_of_cue("bear")
    ('An orange', 'A bear')
    """
    cue = cue.lower()
    return f"An {cue}" if cue[:1] in tuple("aeiou") else f"A {cue}"


def associations(task: str, folder: Path, embedder: Embedder) -> Result:
    """The mean Jaccard index; main is that of questions with ten or twelve candidates, as in DataComp."""
    samples = distributed.together(lambda: CandidateImages(folder))
    images = embedder.images(samples)
    cues, right = samples.table.column("cue"), samples.table.column("associations")
    text_QD = embedder.captions([prompt_of_cue(cue) for cue in cues])
    row_of_id = {sample: row for row, sample in enumerate(images.ids.tolist())}
    scores: dict[int, list[tuple[float, float]]] = {}
    first, left_out = 0, 0
    for question, candidates in enumerate(samples.candidates):
        rows = [row_of_id.get(first + place) for place in range(len(candidates))]
        first += len(candidates)
        is_right = [candidate in right[question] for candidate in candidates]
        there = [row for row in rows if row is not None]
        if len(there) < len(rows) or not any(is_right):
            left_out += 1
            continue
        similarities = (images.image_ND[there] @ text_QD[question]).tolist()
        guessing = jaccard_of_guessing(len(candidates), sum(is_right))
        scores.setdefault(len(candidates), []).append((jaccard(similarities, is_right), guessing))
    many = [score for size, found in scores.items() if size >= 10 for score in found]
    if not many:
        raise ValueError(f"{str(folder)!r} holds no question with ten or more candidates, which are those that count.")
    few = [score for size, found in scores.items() if size <= 6 for score in found]
    every = [score for found in scores.values() for score in found]
    metrics = {"jaccard_10_12": _mean(many), "jaccard": _mean(every)}
    if few:
        metrics["jaccard_5_6"] = _mean(few)
    counts = {"questions": len(samples.candidates), "images": len(images.ids), "left_out": left_out}
    notes = (f"{left_out:,} questions left out: an image could not be read, or none is right",) if left_out else ()
    chance = sum(guessing for _, guessing in many) / len(many)
    return Result(task, metrics, "jaccard_10_12", chance, max(scores), counts=counts, notes=notes)


def _mean(scores: list[tuple[float, float]]) -> float:
    return sum(score for score, _ in scores) / len(scores)


def jaccard(similarities: Sequence[float], right: Sequence[bool]) -> float:
    """Take as many of the most similar as are right; what both have in common over what they have together.

    Of equally similar ones the first is taken.
    """
    count = sum(right)
    taken = sorted(range(len(right)), key=lambda place: -similarities[place])[:count]
    common = sum(right[place] for place in taken)
    return common / (2 * count - common)


def jaccard_of_guessing(candidates: int, right: int) -> float:
    """Its mean over all choices of ``right`` among ``candidates``."""
    ways = math.comb(candidates, right)
    return sum(
        math.comb(right, common) * math.comb(candidates - right, right - common) / ways * common / (2 * right - common)
        for common in range(1, right + 1)
    )

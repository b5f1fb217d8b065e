"""Steps with equal replay keys move every counter equally; what happens once has no key."""

import pytest
import torch
from torch.nn.functional import normalize

import fullbatch as fb

SETTINGS = {
    "neuclip": {"prototypes": 24, "updates": 2, "restart_every": 7, "rho": 1.0},
    "rolling": {"prototypes": 24, "updates": 2, "rho": 1.0},
    "queue": {"prototypes": 24, "rho": 1.0},
    "xbm": {"queue": 24, "starts_after": 20},
    "amorlip": {"blend_epochs": 2.0, "rho_late_epoch": 2.0},
    "tempnet": {"centers": 8, "rho": 1.0},
    "fastclip_v3": {"rho": 1.0},
}


def steps_of(method, count=40, **more):
    """(key, moves of the counters, epoch) of each step."""
    objective = fb.make_objective(method, width=6, num_samples=40, **{**SETTINGS.get(method, {}), **more})
    generator = torch.Generator().manual_seed(0)
    parts = [(part, name) for part in objective.modules() for name in getattr(part, "counters", ())]
    found = []
    for step in range(count):
        image, text = (normalize(torch.randn(8, 6, generator=generator), dim=1) for _ in range(2))
        ids = (torch.arange(8) + 8 * step) % 40
        key, epoch = objective.replay_key(), objective.epoch
        before = [getattr(part, name) for part, name in parts]
        objective(image, text, ids)
        found.append(
            (key, tuple(getattr(part, name) - old for (part, name), old in zip(parts, before, strict=True)), epoch)
        )
    return found


@pytest.mark.filterwarnings("ignore:rho=")
@pytest.mark.parametrize("method", fb.METHODS)
def test_equal_keys_move_counters_equally(method):
    moves = {}
    for key, move, _ in steps_of(method):
        if key is not None:
            assert moves.setdefault(key, move) == move
    assert moves


def test_the_first_steps_and_every_256th_are_looked_at():
    keys = [key for key, _, _ in steps_of("openclip", 258)]
    assert keys[:8] == [None] * 8 and keys[256] is None
    assert set(keys[8:256]) == {(0,)}


def test_restarts_happen_once():
    keys = [key for key, _, _ in steps_of("neuclip", 36)]
    assert [step for step, key in enumerate(keys) if key is None] == [*range(8), 14, 21, 28, 35]


def test_prototypes_that_are_still_appended_to():
    keys = [key for key, _, _ in steps_of("neuclip", 30, prototypes=100, restart_every=0)]
    assert [step for step, key in enumerate(keys) if key is None] == list(range(13))


@pytest.mark.parametrize("method", ["rolling", "queue", "xbm"])
def test_what_keeps_the_newest_is_replayed_once_it_is_full(method):
    size = {"queue": 100, "starts_after": 0} if method == "xbm" else {"prototypes": 100}
    keys = [key for key, _, _ in steps_of(method, 30, **size)]
    assert [step for step, key in enumerate(keys) if key is None] == list(range(13)) and len(set(keys)) == 2


def test_an_epoch_has_its_own_keys_where_a_schedule_counts_them():
    for method, follows in (("fastclip_v3", True), ("amorlip", True), ("sogclr", False)):
        keys = {epoch: key for key, _, epoch in steps_of(method) if key is not None}
        assert (len({key[0] for key in keys.values()}) > 1) == follows


def test_an_epoch_of_amorlip_starts_plainly_and_its_average_follows_every_other_step():
    found = steps_of("amorlip")
    assert all(found[step][0] is None for step in range(0, 40, 5))
    by_epoch = {}
    for key, _, epoch in found:
        if key is not None:
            by_epoch.setdefault(epoch, set()).add(key)
    assert all(len(keys) == 2 for keys in by_epoch.values())


def test_tables_on_the_host_are_run_plainly():
    assert all(key is None for key, _, _ in steps_of("sogclr", table_storage="node"))

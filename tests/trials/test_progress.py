"""What the terminal says: every trial once, nothing cut, nobody's text taken for markup."""

import io

from rich.console import Console

from fullbatch.trials.phases import Slot
from fullbatch.trials.progress import SearchDisplay, cost_and_left, live_view, print_search, trial_line
from fullbatch.trials.search_summary import summarize
from tests.trials.made_up import Running, all_owed, plan_of, played


def console(width=60, terminal=False):
    return Console(file=io.StringIO(), width=width, highlight=False, force_terminal=terminal, color_system=None)


def said(where):
    return where.file.getvalue()


def summary_of(plan, ended, running=None):
    return summarize(plan, ended, running or {}, all_owed(plan), importance=False)


def test_each_trial_is_told_once():
    plan = plan_of()
    ended = played(plan)
    where = console()
    with SearchDisplay(True, where) as display:
        display.known(summary_of(plan, {"choices": ended["choices"][:3]}))
        for end in (3, 5, 5, 24):
            display.show(summary_of(plan, {"choices": ended["choices"][:end]}))
        display.show(summary_of(plan, {**ended, "finals": []}))
    lines = said(where).splitlines()
    assert sum(line.startswith("choices 3,") for line in lines) == 1
    assert not any(line.startswith(("choices 0,", "choices: 24 trials")) for line in lines), "known before"
    assert any(line.startswith("choices 4, ") and "[5 of 24], 0.05 device-hours, about " in line for line in lines)
    assert any("choices 6" in line and "failed, CUDA out of memory" in line for line in lines)
    assert any(line.startswith("choices: ended; best radam + neuclip with ") for line in lines)
    assert "grid: 4 trials, by mean_r1" in lines and "fine 7: " in said(where)
    assert "\x1b" not in said(where)


def test_a_terminal_has_live_lines():
    plan = plan_of()
    ended = played(plan, ("choices",))
    running = {"grid": [Running(Slot(n), {"method": "sogclr", "optimizer": "sgd"}, f"host:{n}") for n in range(11)]}
    where = console(120, terminal=True)
    with SearchDisplay(False, where) as display:
        display.show(summary_of(plan, ended, running))
    assert "24 of 24" in said(where) and "0 of 4, 11 running" in said(where)
    view = console(120)
    view.print(live_view(summary_of(plan, ended, running)))
    text = said(view)
    assert "best radam + neuclip with 2" in text and "and 3 more" in text and "host:7" in text
    assert "device-hours, about" in text
    view = console(120)
    view.print(live_view(summary_of(plan, ended, running), lambda phase, slot: f"step {slot} of 9" if slot < 2 else ""))
    assert "grid 1: sgd + sogclr, host:1, step 1 of 9" in said(view) and said(view).count(" of 9") == 2
    quiet = console(120, terminal=True)
    with SearchDisplay(True, quiet) as display:
        display.show(summary_of(plan, ended, running))
    assert "running" not in said(quiet)


def test_the_time_left_is_said():
    cost = {"device_hours": 1.25, "left_seconds": 100.0, "workers": 1, "trials_done": 1, "trials_owed": 3}
    assert cost_and_left(cost) == "1.25 device-hours, about 1 min 40 s left"
    assert cost_and_left({**cost, "left_seconds": None}).endswith("not known yet")
    assert cost_and_left({**cost, "trials_done": 3}).endswith("nothing left")


def test_how_a_trial_ended_is_said():
    metric = {"short": "mean_r1", "share": True}
    trial = {"slot": 3, "label": "fine 3", "values": [0.2], "seconds": 65.0, "error": ""}
    words = {
        status: trial_line("fine", {**trial, "status": status}, [metric])
        for status in ("stopped", "pruned", "diverged")
    }
    done = trial_line("choices", {**trial, "label": "radam + sogclr", "status": "done"}, [metric])
    assert done == "choices 3, radam + sogclr: 20.00%, 1 min 5 s"
    assert words == {
        "stopped": "fine 3: stopped early, 20.00%, 1 min 5 s",
        "pruned": "fine 3: pruned, 20.00%, 1 min 5 s",
        "diverged": "fine 3: diverged, 1 min 5 s",
    }


def test_tables_are_whole_in_a_narrow_terminal():
    plan = plan_of()
    found = summary_of(plan, played(plan))
    found["finalists"][0]["name"] = "[red]fine[/red] [link=x]"
    where = console(40)
    print_search(found, where)
    text = said(where)
    assert "warmup_epochs" in text and "…" not in text
    assert "[red]fine[/red] [link=x]" in text
    assert "fine: 20 of 20 trials, all with method neuclip, optimizer radam" in text
    assert "and 14 more, in search.csv" in text
    assert "openclip" in text and "baseline" in text
    assert found["winner"]["said"] in text.replace("\n", " ").replace("  ", " ") or found["winner"]["said"] in text
    assert "63 of 63 trials" in text


def test_long_metrics_have_a_short_head():
    plan = plan_of(metrics=["mean(text_to_image_r1, image_to_text_r1)", "seconds"], finals=None)
    found = summary_of(plan, played(plan))
    where = console(200)
    print_search(found, where)
    first, *lines = said(where).splitlines()
    assert first == "value 1: mean(text_to_image_r1, image_to_text_r1)"
    assert any(line.split()[:4] == ["trial", "rank", "value", "1"] and "seconds" in line for line in lines)
    line = trial_line("fine", found["phases"][2]["trials"][0], found["metrics"])
    assert line.startswith("fine 0: mean(text_to_image_r1, image_to_text_r1) ") and ", seconds " in line


def test_a_single_seed_is_not_the_finals_best():
    plan = plan_of()
    where = console()
    with SearchDisplay(True, where) as display:
        display.show(summary_of(plan, played(plan)))
    assert "finals: ended\n" in said(where) and "fine: ended; best fine" in said(where)


def test_tables_of_nothing():
    plan = plan_of()
    where = console()
    print_search(summary_of(plan, {}), where)
    assert said(where) == "0 of 63 trials, 0.0 s of training, 0 device-hours\n"

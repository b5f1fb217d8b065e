"""The page of a search: every figure is there, nothing on it is anybody's markup, and it fits."""

import json
from dataclasses import replace

import pytest

from fullbatch.report.page import MAX_BYTES, write_page
from fullbatch.report.search_figures import EndedTrial, _height, setting_axes
from fullbatch.trials.phases import Slot
from fullbatch.trials.search_summary import summarize, write_files
from tests.report.making import HOSTILE, SCRIPT
from tests.report.test_pages import data_of
from tests.trials.made_up import Running, all_owed, plan_of, played
from tests.waiting import HANG


def written(folder, plan, ended, running=None, importance=True):
    folder.mkdir(parents=True, exist_ok=True)
    write_files(plan, summarize(plan, ended, running or {}, all_owed(plan), importance=importance), folder)
    return write_page([folder])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A search at its end, of hostile names, with nothing, midway, of many trials, of one, and of two metrics."""
    root = tmp_path_factory.mktemp("searches")
    plan = plan_of()
    ended = played(plan)
    hostile = plan_of()
    name = f"{SCRIPT}'\"&".replace("/", "")  # no plan takes it, but a search.json may have it
    object.__setattr__(hostile, "name", name)
    wild = {
        phase: [
            replace(one, error=HOSTILE[one.slot.number % len(HOSTILE)] if one.status == "failed" else "")
            for one in ones
        ]
        for phase, ones in played(hostile).items()
    }
    under_way = {"grid": [Running(Slot(0), {"method": "sogclr", "optimizer": "sgd"}, SCRIPT)]}
    many = plan_of(
        choices={"trials": 300, "over": None},
        fine={"trials": 300},
        methods=["openclip", "sogclr", "isogclr_new", "neuclip", "fastclip_v3", "amorlip"],
        optimizers=["adamw", "radam", "lamb", "sgd", "adam", "lion", "novograd", "nvnovograd", "rmsprop", "adopt"],
    )
    single = plan_of(
        methods=["sogclr"],
        optimizers=["adamw"],
        space={"lr": {"low": 1e-4, "high": 1e-2, "log": True}},
        choices={"trials": 1, "over": ["lr"]},
        grid=None,
        fine={"trials": 1},
        finals=None,
    )
    two = plan_of(metrics=["mean_r1", "seconds"])
    long = plan_of(
        metrics=["mean(text_to_image_r1, image_to_text_r1)", "image_to_text_median_rank"],
        name=("long names " * 6).strip(),
        methods=["isogclr_new_v2", "fastclip_v3"],
        optimizers=["nvnovograd", "adamw"],
        space={
            "temperature_lr_drop_below": {"low": 0.01, "high": 0.05},
            "lr": {"low": 1e-4, "high": 1e-2, "log": True},
            "temperature_lr": {"low": 1e-5, "high": 1e-3, "log": True},
            "warmup_from": {"low": 0.0, "high": 1e-5},
            "clip_norm": {"choices": [None, 1.0, 5.0]},
            "schedule": {"choices": ["cosine", "tanh", "linear", "constant"]},
            "batch_size": {"choices": [64, 128, 256, 512]},
            "eps": {"low": 1e-9, "high": 1e-5, "log": True},
        },
    )
    return {
        "whole": written(root / "whole", plan, ended),
        "hostile": written(root / "hostile", hostile, wild),
        "empty": written(root / "empty", plan, {}),
        "midway": written(root / "midway", plan, {"choices": ended["choices"]}, under_way),
        "many": written(root / "many", many, played(many), importance=False),
        "single": written(root / "single", single, played(single)),
        "two": written(root / "two", two, played(two)),
        "long": written(root / "long", long, played(long)),
        "two_early": written(root / "two_early", two, played(two, ("choices",))),
    }


SORTS = ("whole", "hostile", "empty", "midway", "many", "single", "two", "two_early", "long")


def test_every_figure_is_there(pages):
    text = pages["whole"].read_text()
    for title in ("By optimizer", "By method", "Progression", "Importance", "Slices", "Parallel coordinates"):
        assert f"<h3>{title}</h3>" in text, title
    charts = data_of(pages["whole"])["charts"]
    assert text.count("data-chart=") == len(charts) == len({chart["key"] for chart in charts})
    assert "<h3>Learning curves</h3>" in text and 'id="finalists"' in text and 'id="cost"' in text
    assert "over 20 whole trials; 3 pruned ones are left out" in text
    assert "is where a trial was pruned" in text and "weight_decay (log)" in text
    summary = json.loads((pages["whole"].parent / "search.json").read_text())
    assert summary["winner"]["said"].split(";")[0] in text
    assert "on the same evaluation sets looks a little better than it is" in text.replace("\n", " ")
    tips = [tip for chart in charts for series in chart["series"] for tip in series["tips"]]
    best = summary["winner"]["slot"]
    assert any(f"fine {best} (trial {best}), done" in tip and "lr = " in tip for tip in tips), "settings on hover"
    assert "Trials that could not be trained" in text and "CUDA out of memory" in text


@pytest.mark.parametrize("sort", SORTS)
def test_it_is_small_and_whole(pages, sort):
    text = pages[sort].read_text()
    assert len(text.encode()) < MAX_BYTES / 2
    for chart in data_of(pages[sort])["charts"]:
        for series in chart["series"]:
            assert len(series["x"]) == len(series["y"]) > 0
            assert len(series["tips"]) in (0, 1, len(series["x"])) and len(series["looks"]) in (0, len(series["x"]))
    assert ' style="' not in text, "the page's policy would drop it"


def test_hostile_names_stay_text(pages):
    text = pages["hostile"].read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;script&gt;" in text
    assert text.count("<script") == 2, "the page's own data and script"
    assert "<script>alert" not in pages["midway"].read_text()


def test_nothing_yet(pages):
    text = pages["empty"].read_text()
    assert "there is no winner" in text and text.count("No trial has ended yet.") == 3 and "0 of 63" in text
    midway = pages["midway"].read_text()
    assert "<dt>running</dt><dd>1</dd>" in midway and "<dt>left</dt><dd>about " in midway
    assert "0 of 4 trials ended, 1 running." in midway


def test_one_trial_draws_no_comparison(pages):
    text = pages["single"].read_text()
    assert "By optimizer" not in text and "Slices" not in text and "Parallel" not in text and "Progression" in text
    assert "No importance: of whole trials there are 1, and fewer than 8 tell nothing." in text


def test_two_metrics_have_a_front(pages):
    text = pages["two"].read_text()
    assert 'id="front"' in text and "among the finalists, by their means over seeds" in text
    assert "whole trials of the phase choices" in pages["two_early"].read_text()
    assert 'id="front"' not in pages["whole"].read_text()


def test_thousands_of_trials_fit(tmp_path):
    plan = plan_of(choices={"trials": 3000, "over": None}, grid=None, fine=None, finals=None)
    text = written(tmp_path / "big", plan, played(plan), importance=False).read_text()
    assert len(text.encode()) < MAX_BYTES
    assert "The figures show 600" in text and "2500 more are in search.csv" in text


def test_a_search_stands_alone(tmp_path, pages):
    folder = pages["empty"].parent
    with pytest.raises(ValueError, match=r"is a search, which has a page of its own; name it alone\."):
        write_page([folder, tmp_path])
    with pytest.raises(ValueError, match=r"neither a run folder .* nor a comparison .* nor a search"):
        write_page([tmp_path])
    broken = tmp_path / "broken"
    broken.mkdir()
    for content, words in (("{", "cannot be read"), ("[]", "holds no list of phases"), ('{"phases": 3}', "no list")):
        (broken / "search.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            write_page([broken])


def test_a_file_of_another_version_does_not_break_the_page(tmp_path):
    """What is missing or of another kind is left out."""
    odd = {
        "phases": [
            {
                "name": "choices",
                "trials": [{"slot": "x"}, 3, {"slot": 1, "values": ["a"], "evaluations": [[1], [2, 3]]}],
            },
            {"name": "elsewhere", "trials": None, "importance": 3},
        ],
        "metrics": "none",
        "finalists": [{"mean": [None]}, {"mean": [0.5], "values": [[0.5], [0.6]], "seeds": [1]}],
        "winner": {"said": None, "paired": [{"mean": "x"}]},
        "cost": [],
    }
    (tmp_path / "search.json").write_text(json.dumps(odd))
    assert "In short" in write_page([tmp_path]).read_text()


def test_settings_are_scales_or_words():
    def trial(slot, **params):
        return EndedTrial(slot, slot, "", "done", params, (0.1 * slot,), (), "")

    trials = [
        trial(n, lr=10.0**-n, kind=None if n % 2 else "tanh", few=[1, 2][n % 2], same=1, mixed=[1, "a"][n % 2])
        for n in range(6)
    ]
    axes = setting_axes(trials, {"lr"})
    assert set(axes) == {"lr", "kind", "few", "mixed"}
    assert axes["lr"].scale == "log" and _height(axes["lr"], 1.0) == 1.0 and _height(axes["lr"], 10**-2.5) == 0.5
    assert axes["kind"].words == ["none", "tanh"] and axes["few"].words == ["1", "2"]


# ---------------------------------------------------------------------------------------------------------------------
# in a browser


OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll(".plot > svg")) {
    const room = svg.getBoundingClientRect();
    const all = [...svg.querySelectorAll("text")];
    const texts = all.map((each) => [each.lastChild.textContent, each.getBoundingClientRect()]);
    texts.forEach(([said, a], place) => {
      if (a.left < room.left - 2 || a.right > room.right + 6) found.push(`beyond the edge: ${said}`);
      for (const [other, b] of texts.slice(place + 1)) {
        const beside = a.left >= b.right - 1 || b.left >= a.right - 1;
        if (!beside && a.top < b.bottom - 3 && b.top < a.bottom - 3) found.push(`${said} on ${other}`);
      }
    });
  }
  return found;
}"""


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize(("scheme", "width"), [pytest.param("light", 1280, marks=pytest.mark.slow), ("dark", 360)])
def test_it_looks_right(browser_with_a_font, pages, sort, scheme, width):
    """Nothing scrolls sideways, no text lies on another, nothing is NaN, nothing is loaded or run."""
    context = browser_with_a_font.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.set_default_timeout(1000 * HANG)
    wrong = []
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(pages[sort].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".plot > svg").count() == page.locator("figure.chart").count()
    assert page.evaluate(OVERLAPS) == []
    assert "NaN" not in page.locator("main").inner_html() and "Infinity" not in page.locator("main").inner_html()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert dark == (scheme == "dark")
    assert wrong == []
    context.close()


def test_points_tell_their_settings_and_can_be_hidden(browser, pages):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1000 * HANG)
    page.goto(pages["whole"].as_uri())
    figure = page.locator("figure[data-chart='fine-progression']")
    figure.locator("circle.dot").nth(3).hover()
    assert "lr = " in figure.locator(".tip").inner_text() and "mean_r1" in figure.locator(".tip").inner_text()
    choice = page.locator("figure[data-chart='choices-by-optimizer']")
    before = choice.locator(".dot").count()
    choice.locator(".legend button", has_text="neuclip").click()
    assert 0 < choice.locator(".plot .dot").count() < before
    assert choice.locator("text.name").all_text_contents() == ["radam", "adamw", "lamb", "sgd"], "best mean first"
    page.close()

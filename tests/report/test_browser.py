"""The pages in a real browser: nothing leaves them, nothing fails in them, and what can be pressed works."""

from itertools import pairwise

import pytest

from fullbatch.report.blocks import Html, Page, Section
from fullbatch.report.charts import Axis, Chart, Series, figures
from fullbatch.report.page import fitting
from tests.waiting import HANG

SORTS = ("run", "several", "comparison", "tuned", "mixed", "tunings")


class Visit:
    """An opened page, and everything about it that should not happen."""

    def __init__(self, browser, path, **options):
        self.wrong = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(1000 * HANG)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", self._dialog)
        self.context.route("**/*", lambda route: self._request(route, path))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.plot svg path.line').length > 0")

    def _dialog(self, dialog):
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, route, path):
        url = route.request.url
        if url == path.as_uri() or url.startswith("data:"):
            route.continue_()
        else:
            self.wrong.append(f"request: {url}")
            route.abort()

    def unfold(self):
        self.page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
        self.page.wait_for_function(
            "[...document.querySelectorAll('figure.chart')].every(figure => figure.querySelector('svg[role=img]'))"
        )

    def lines(self, chart="loss"):
        return self.page.locator(f"figure[data-chart='{chart}'] path.line").count()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_renders_and_nothing_leaves_it(browser, pages, sort, scheme):
    with Visit(browser, pages[sort], color_scheme=scheme) as visit:
        visit.unfold()
        plots = visit.page.locator("figure.chart").count()
        assert plots >= 6
        assert visit.page.locator("figure.chart svg[role=img]").count() == plots
        dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        assert dark == (scheme == "dark")
        assert visit.wrong == []


@pytest.mark.parametrize("sort", SORTS)
def test_a_phone_shows_it_without_scrolling_sideways(browser_with_a_font, pages, sort):
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    with Visit(browser_with_a_font, pages[sort], **phone) as visit:
        visit.unfold()
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360
        assert visit.wrong == []


def test_pictures_are_there_and_marked_by_more_than_colour(browser, pages):
    with Visit(browser, pages["run"]) as visit:
        images = visit.page.locator("img[data-picture]")
        assert images.count() > 50
        loaded = "images => images.every(i => i.complete && i.naturalWidth > 0)"
        assert images.evaluate_all(loaded)
        signs = visit.page.locator(".hits li .sign").all_inner_texts()
        assert set(signs) <= {"✓", "✗"} and "✗" in signs
        styles = visit.page.locator(".hits .wrong img").first.evaluate("i => getComputedStyle(i).outlineStyle")
        assert styles == "dashed"
        assert visit.wrong == []


def test_captions_do_no_harm(browser, pages):
    with Visit(browser, pages["run"]) as visit:
        body = visit.page.locator("body").inner_text()
        assert "<script>alert(1)</script>" in body
        assert visit.page.locator("iframe, object, embed").count() == 0
        longest = visit.page.locator(".said").evaluate_all("all => Math.max(...all.map(e => e.textContent.length))")
        assert longest <= 160
        assert visit.wrong == []


def test_what_can_be_pressed_works(browser, pages):
    with Visit(browser, pages["several"]) as visit:
        page = visit.page
        assert visit.lines() == 2
        page.locator(".legend.shared button").first.click()
        assert visit.lines() == 1
        page.locator(".legend.shared button").first.click()
        path = page.locator("figure[data-chart=loss] path.line").first
        before = path.get_attribute("d")
        page.locator("figure[data-chart=loss] button.log").click()
        assert path.get_attribute("d") != before
        page.locator("button.smooth").click()
        assert visit.lines() == 4  # and the raw ones, faint
        for value, label in (("samples", "pairs seen"), ("time", "time (s)"), ("step", "step")):
            page.locator(f"[data-choice=x] [data-value={value}]").click()
            assert label in page.locator("figure[data-chart=loss] svg").first.text_content()
        plot = page.locator("figure[data-chart=loss] .plot")
        plot.hover()
        tip = page.locator("figure[data-chart=loss] .tip")
        assert tip.is_visible() and "openclip" in tip.inner_text()
        box, room = tip.bounding_box(), plot.bounding_box()
        assert box["height"] < room["height"] and box["x"] + box["width"] <= room["x"] + room["width"] + 1
        page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert visit.wrong == []


def test_a_comparison_narrows_its_curves_to_a_batch_size(browser, pages):
    with Visit(browser, pages["comparison"]) as visit:
        assert visit.lines() == 2
        visit.page.locator("[data-choice=filter] [data-value='16']").click()
        assert visit.lines() == 0
        assert "nothing to show" in visit.page.locator("figure[data-chart=loss] svg").first.text_content()
        assert visit.page.locator("figure[data-chart='points-0'] circle").count() == 4
        assert visit.wrong == []


def test_a_fine_tuning_shows_where_it_began(browser, pages):
    with Visit(browser, pages["tuned"]) as visit:
        page = visit.page
        task = page.locator("figure[data-chart='task-0']")
        assert "base 30%" in task.locator("svg").first.text_content()
        assert "recovery" in task.locator("svg").first.text_content()
        for chart in ("task-0", "loss"):
            shade = page.locator(f"figure[data-chart='{chart}'] rect.frozen")
            line = page.locator(f"figure[data-chart='{chart}'] line.axis")
            share = shade.bounding_box()["width"] / line.bounding_box()["width"]
            assert share == pytest.approx(8 / 20, abs=0.02)
        for value in ("samples", "time"):
            page.locator(f"[data-choice=x] [data-value={value}]").click()
            assert task.locator("rect.frozen").bounding_box()["width"] > 0
        assert visit.wrong == []


@pytest.mark.parametrize("sort", ["tuned", "tunings"])
def test_distributions_are_filled_and_can_be_hidden(browser, pages, sort):
    with Visit(browser, pages[sort]) as visit:
        figure = visit.page.locator("figure[data-chart='similarity-image_to_text-0']")
        assert figure.locator("path.band").count() == figure.locator("path.line").count() == 3
        assert figure.locator("circle, rect.frozen").count() == 0
        figure.locator(".legend button").first.click()
        assert figure.locator("path.line").count() == 2
        figure.locator(".plot").hover()
        tip = figure.locator(".tip").inner_text()
        assert "similarity" in tip and "nearest negatives" in tip and "%" in tip
        assert visit.wrong == []


def test_mixtures_lie_on_an_even_axis(browser, pages):
    with Visit(browser, pages["mixed"]) as visit:
        dots = visit.page.locator("figure[data-chart=mixtures] circle")
        places = [float(dots.nth(at).get_attribute("cx")) for at in range(5)]
        gaps = [after - before for before, after in pairwise(places)]
        assert min(gaps) == pytest.approx(max(gaps), abs=0.1)
        assert visit.wrong == []


CLOSE = {"close": [0.12345, 0.12346], "small": [1e-9, 3e-9], "large": [12345000.0, 12346000.0], "flat": [0.0, 0.0]}


def test_ticks_that_differ_are_written_differently(browser, tmp_path):
    charts = [Chart(key, key, "", [Series("a", [1.0, 2.0], y)], x=Axis("x")) for key, y in CLOSE.items()]
    charts.append(Chart("log", "log", "", [Series("a", [1e-4, 1e-2], [1.0, 2.0])], x=Axis("x", "log")))
    path = tmp_path / "page.html"
    path.write_text(fitting(Page("t", Html(""), [Section("c", "c", figures(charts))])))
    with Visit(browser, path) as visit:
        for chart in charts:
            figure = visit.page.locator(f"figure[data-chart='{chart.key}'] .plot svg")
            ticks = figure.locator("text[text-anchor=end]:not(:last-of-type)").all_text_contents()
            assert len(ticks) == len(set(ticks)) >= 2, (chart.key, ticks)
        assert {"0.001", "0.01"} <= set(figure.locator("text[text-anchor=middle]").all_text_contents())
        assert visit.wrong == []

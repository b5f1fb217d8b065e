"""The page in a real browser, used as a person would use it: type, click, go back; on a desk and on a phone."""

import re

import pytest

from fullbatch.config.messages import plain
from fullbatch.encoder import Encoder
from fullbatch.find.gallery import write_static
from tests.find.making import HOSTILE, picture, serving, write_hostile, write_pictures
from tests.waiting import HANG

MINUS = "\u2212"


@pytest.fixture(scope="module")
def finder(indexed, tmp_path_factory):
    place = tmp_path_factory.mktemp("shown")
    write_pictures(place / "pictures", 30)
    write_hostile(place / "pictures" / "<b>hostile<")
    return indexed(place / "pictures", place / "index")


class Visit:
    """The opened page, and everything about it that should not happen."""

    def __init__(self, browser, url, **options):
        self.wrong = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(1000 * HANG)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._request(request.url, url))
        self.page.goto(url)
        self.ready()

    def _request(self, asked, own):
        if not asked.startswith((own, "data:")):
            self.wrong.append(f"request: {asked}")

    def ready(self, text="picture"):
        """The last search has been answered, and the page says so."""
        self.page.wait_for_function("() => document.getElementById('grid').getAttribute('aria-busy') !== 'true'")
        self.page.wait_for_function("text => document.getElementById('told').textContent.includes(text)", arg=text)

    @property
    def told(self):
        return self.page.locator("#told").inner_text()

    def names(self):
        return self.page.locator(".tile bdi").all_inner_texts()

    def shows(self, name):
        """A tile with this name comes."""
        self.page.wait_for_function(
            "name => [...document.querySelectorAll('.tile bdi')].some(e => e.textContent === name)", arg=name
        )

    def search(self, words):
        self.page.fill("#words", words)
        self.page.press("#words", "Enter")
        self.ready("ms" if words else "ask")

    def busy(self):
        """Seconds of script, style and layout so far."""
        if not hasattr(self, "devtools"):
            self.devtools = self.context.new_cdp_session(self.page)
            self.devtools.send("Performance.enable", {"timeDomain": "threadTicks"})  # whoever else is busy
        metrics = {each["name"]: each["value"] for each in self.devtools.send("Performance.getMetrics")["metrics"]}
        return sum(metrics[name] for name in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration"))

    def loaded(self):
        """All pictures in view have come."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.tile img')].every(i => i.complete && i.naturalWidth > 0)"
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()


def names_of(hits):
    return [hit.entry.path.split("/")[-1] for hit in hits]


def test_type_click_and_back(browser, server, finder):
    with Visit(browser, server.url) as visit:
        page = visit.page
        assert visit.told == f"{len(finder.pictures)} pictures; ask for something"
        visit.loaded()
        visit.search("a red apple")
        best = finder.find(finder.query("a red apple"), 100)
        assert visit.names()[0] == names_of(best)[0]
        assert "q=a+red+apple" in page.url and page.locator("#scores").is_visible()
        score = page.locator(".tile .score").first.inner_text()
        assert score.replace(MINUS, "-") == f"{best[0].score:.3f}"

        visit.search("a red apple - a leaf")
        assert visit.names()[0] == names_of(finder.find(finder.query("a red apple - a leaf"), 1))[0]

        page.locator(".tile .like").nth(2).click()
        page.wait_for_selector("#likes li")
        visit.ready("ms")
        number = int(re.search(r"like=(\d+)", page.url)[1])
        assert page.input_value("#words") == "" and visit.names()[0] == names_of([finder.find(None, 100)[number]])[0]
        assert page.locator(".tile .score").first.inner_text() == "1.000"

        page.go_back()
        page.wait_for_function("() => document.getElementById('words').value === 'a red apple - a leaf'")
        assert page.locator("#likes li").count() == 0
        page.go_back()
        page.wait_for_function("() => document.getElementById('words').value === 'a red apple'")
        visit.ready("ms")
        assert visit.names()[0] == names_of(best)[0]
        page.go_forward()
        page.wait_for_function("() => document.getElementById('words').value === 'a red apple - a leaf'")
        visit.search("")
        assert visit.told.endswith("ask for something") and page.locator("#scores").is_hidden()
        assert visit.wrong == []


def test_pictures_are_added_and_taken_away(browser, server, finder):
    with Visit(browser, server.url) as visit:
        page = visit.page
        visit.search("a cat")
        page.locator(".tile").nth(3).locator(".plus").click()
        page.wait_for_selector("#likes li")
        visit.ready("ms")
        page.locator(".tile").nth(5).locator(".minus").click()
        page.wait_for_function("() => document.querySelectorAll('#likes li').length === 2")
        visit.ready("ms")
        plus, minus = re.search(r"like=(\d+)%2C-(\d+)", page.url).groups()
        query = finder.query("a cat", [(1.0, finder.row(int(plus))), (-1.0, finder.row(int(minus)))])
        page.wait_for_function("name => document.querySelector('.tile bdi').textContent === name",
                               arg=names_of(finder.find(query, 1))[0])  # fmt: skip
        assert page.locator("#likes li").all_inner_texts()[1].startswith(MINUS)
        page.locator("#likes button").first.click()
        page.wait_for_function("() => document.querySelectorAll('#likes li').length === 1")
        assert page.input_value("#words") == "a cat"
        assert visit.wrong == []


def test_a_picture_is_chosen_or_dropped(browser, server, finder, tmp_path):
    picture(5).save(tmp_path / "mine.png")
    (tmp_path / "words.png").write_text("no picture")
    with Visit(browser, server.url) as visit:
        page = visit.page
        page.set_input_files("#file", tmp_path / "mine.png")
        page.wait_for_selector("#likes img")
        visit.ready("ms")
        assert visit.names()[0] == "0005.png" and "like=d" in page.url
        drop = """bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "<img>.png", { type: "image/png" }));
            for (const name of ["dragover", "drop"])
                document.body.dispatchEvent(new DragEvent(name, { dataTransfer: data, bubbles: true }));
        }"""
        picture(8).save(tmp_path / "other.png")
        page.evaluate(drop, list((tmp_path / "other.png").read_bytes()))
        page.wait_for_function("() => document.querySelector('.tile bdi').textContent === '0008.png'")
        page.go_back()
        page.wait_for_function("() => document.querySelector('.tile bdi').textContent === '0005.png'")
        assert visit.wrong == []
        page.set_input_files("#file", tmp_path / "words.png")
        page.wait_for_selector("#told.wrong")
        assert "not a JPEG" in visit.told
        assert len(visit.wrong) == 1 and "400" in visit.wrong[0], "the browser's own note of the refusal"


def test_mistakes_in_a_query_are_told(browser, server):
    with Visit(browser, server.url) as visit:
        visit.page.fill("#words", "a cat -")
        visit.page.press("#words", "Enter")
        visit.page.wait_for_selector("#told.wrong")
        assert visit.told == "The query 'a cat -' says nothing after a -."
        assert visit.page.get_attribute("#grid", "aria-busy") == "false"
        visit.search("a cat")
        assert visit.page.locator("#told.wrong").count() == 0


def test_the_box_is_reached_where_nothing_is_shown(browser, server):
    with Visit(browser, f"{server.url}?like=d99") as visit:
        visit.page.evaluate("document.activeElement.blur()")
        visit.page.keyboard.press("/")
        assert visit.page.evaluate("document.activeElement.id") == "words"


def test_a_model_that_reads_no_words_has_no_box_for_them(browser, server, monkeypatch):
    monkeypatch.setattr(Encoder, "reads_text", False)
    with Visit(browser, server.url) as visit:
        assert visit.page.locator("#words").is_hidden() and visit.page.locator("#choose").is_visible()
        visit.page.locator(".tile .like").first.click()
        visit.page.wait_for_selector("#likes li")
        visit.ready("ms")
        assert visit.wrong == []


def test_filters_by_folder_and_score(browser, server, finder):
    with Visit(browser, server.url) as visit:
        page = visit.page
        visit.search("a cat")
        folders = page.locator("#folder option").all_inner_texts()
        assert folders == ["all", f"<b>hostile< ({len(HOSTILE)})", "below (10)"]
        page.select_option("#folder", label="below (10)")
        visit.ready("10 pictures")
        assert visit.names() == names_of(finder.find(finder.query("a cat"), 100, "below"))
        scores = [hit.score for hit in finder.find(finder.query("a cat"), 100, "below")]
        page.locator("#least").evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })); }", scores[3] - 1e-4
        )
        visit.ready("4 pictures")
        assert len(visit.names()) == 4 and "least=" in page.url
        page.reload()
        visit.ready("4 pictures")
        assert page.locator("#folder option:checked").inner_text() == "below (10)"
        page.go_back()
        visit.ready(f"{len(finder.pictures)} pictures")
        assert visit.wrong == []


def test_the_keyboard_is_enough(browser, server, finder):
    with Visit(browser, server.url) as visit:
        page = visit.page
        page.keyboard.type("a cat")  # the box has the focus
        page.keyboard.press("Enter")
        visit.ready("ms")
        at = "document.activeElement.closest('.tile')?.dataset.at"
        page.keyboard.press("ArrowDown")
        assert page.evaluate(at) == "0"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        columns = int(page.evaluate(at)) - 1
        assert columns >= 4
        page.keyboard.press("Space")
        page.wait_for_selector("dialog[open]")
        hits = finder.find(finder.query("a cat"), 100)
        assert page.locator("#path").inner_text() == hits[columns + 1].entry.path
        page.wait_for_function("() => document.getElementById('shown').naturalWidth > 0")
        page.keyboard.press("ArrowRight")
        assert page.locator("#path").inner_text() == hits[columns + 2].entry.path
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog[open]", state="detached")
        page.wait_for_function(f"at => {at} === at", arg=str(columns + 2))
        page.keyboard.press("Enter")
        page.wait_for_selector("#likes li")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "words"
        assert visit.wrong == []


def test_hostile_names_do_no_harm(browser, server):
    with Visit(browser, server.url) as visit:
        visit.page.select_option("#folder", index=1)
        visit.ready(f"{len(HOSTILE)} pictures")
        visit.loaded()
        names = visit.names()
        assert "<script>alert(1)<.png" in names and '"><img src=x onerror=alert(2)>.png' in names
        assert visit.page.locator("iframe, object, embed, b, .tile script").count() == 0
        for place in range(len(HOSTILE)):
            visit.page.locator(".tile .large").nth(place).click()
            visit.page.keyboard.press("Escape")
        assert visit.wrong == []


def test_other_sites_cannot_use_it(browser, server):
    """A page of another origin, which knows the whole address, gets neither a picture, nor an answer, nor a frame."""
    context = browser.new_context()
    context.set_default_timeout(1000 * HANG)
    page = context.new_page()
    page.route("http://evil.example/*", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
    page.goto("http://evil.example/")
    tried = page.evaluate(
        """async (url) => {
            const image = await new Promise((done) => {
                const made = new Image();
                made.onload = () => done("loaded");
                made.onerror = () => done("refused");
                made.src = url + "thumbnail/0";
            });
            const asked = await fetch(url + "search?q=a").then(() => "read", () => "refused");
            const frame = document.createElement("iframe");
            frame.src = url;
            document.body.append(frame);
            await new Promise((done) => { frame.onload = done; setTimeout(done, 1000); });
            let inside = "nothing";
            try { inside = frame.contentDocument ? frame.contentDocument.body.innerText : "nothing"; } catch {}
            return [image, asked, inside];
        }""",
        server.url,
    )
    assert tried[:2] == ["refused", "refused"] and "Find" not in tried[2]
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(browser, server, scheme):
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    with Visit(browser, server.url, **phone) as visit:
        visit.search("a cat")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
        dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        assert dark == (scheme == "dark")
        visit.page.locator("#theme").click()
        assert visit.page.evaluate("document.documentElement.dataset.theme") == ("light" if dark else "dark")
        assert visit.wrong == []


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_many_pictures_without_stutter(browser, indexed, tmp_path, count):
    write_pictures(tmp_path / "pictures", count)
    many = indexed(tmp_path / "pictures", tmp_path / "index")
    with serving(many) as server, Visit(browser, server.url) as visit:
        page = visit.page
        visit.ready(f"{count:,} pictures")
        visit.search("a cat")
        visit.ready(f"{count:,} pictures")
        assert page.locator(".tile").count() < 200, "only what is in view exists"
        scroll = """async ([step, frames]) => {
            for (let frame = 0; frame < frames; frame++) {
                scrollBy(0, step);
                await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            }
        }"""
        before = visit.busy()
        page.evaluate(scroll, [300, 100])  # faster than anyone reads
        assert (visit.busy() - before) / 100 < 1 / 60, "what the page does fits in a frame"
        page.evaluate(scroll, [20_000, 20])
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        last = names_of(many.find(many.query("a cat"), count))[-1]
        visit.shows(last)
        visit.loaded()
        y = page.evaluate("scrollY")
        page.wait_for_function(f"() => history.state.y === {y}")  # it is remembered when scrolling has come to rest
        page.locator(".tile .like").last.click()
        page.wait_for_selector("#likes li")
        page.wait_for_function("() => scrollY === 0")
        page.go_back()
        page.wait_for_function(f"() => Math.abs(scrollY - {y}) < 2")
        visit.shows(last)
        page.keyboard.press("/")
        page.keyboard.press("ArrowDown")
        assert visit.wrong == []


# -- one file ----------------------------------------------------------------------------------------------------------


def test_a_static_page_holds_everything(browser, finder, tmp_path):
    path = tmp_path / "below" / "found.html"
    hits = finder.find(finder.query("a cat"), 25)
    assert write_static(finder, hits, "a cat </script><script>alert(9)</script>", path) == 25
    with Visit(browser, path.as_uri()) as visit:
        page = visit.page
        assert visit.told == f"25 pictures of {len(finder.pictures)}"
        assert page.locator("h1").inner_text() == "a cat </script><script>alert(9)</script>"
        assert visit.names() == [plain(name) for name in names_of(hits)]
        visit.loaded()
        assert page.locator("#search").is_hidden()
        page.locator(".tile .like").first.click()
        page.wait_for_function("() => document.getElementById('shown').naturalWidth > 0")
        page.keyboard.press("Escape")
        page.select_option("#folder", index=2)
        visit.ready("pictures of")
        inside = sum(hit.entry.path.startswith("below/") for hit in hits)
        assert len(visit.names()) == inside
        assert visit.wrong == []


def test_a_static_page_leaves_out_what_is_gone(indexed, tmp_path):
    write_pictures(tmp_path / "pictures", 6)
    finder = indexed(tmp_path / "pictures", tmp_path / "index")
    (tmp_path / "pictures" / "0000.png").unlink()
    assert write_static(finder, finder.find(None, 10), "", tmp_path / "page.html") == 5

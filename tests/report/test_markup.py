"""Text that others wrote stays text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fullbatch.config.messages import plain
from fullbatch.report.blocks import Html, embedded_json, node


def test_children_and_attributes_are_escaped():
    made = node("p", "<b>", Html("<i>kept</i>"), ["&", None, 3], title='"x" <y>', hidden=True, lang=None)
    assert made == '<p title="&quot;x&quot; &lt;y&gt;" hidden>&lt;b&gt;<i>kept</i>&amp;3</p>'


def test_plain_text_is_one_short_line():
    assert plain("a\n\u2028b\x00c") == "a b c"
    assert plain("\u202eabc\u2066") == "abc"  # nothing turns the text around
    assert plain("👩\u200d🚀") == "👩\u200d🚀"
    assert len(plain("x" * 10_000)) == 300 and plain("x" * 10_000).endswith("…")
    assert plain("\ud800") == "\ufffd"


@given(st.text())
def test_no_text_ends_the_script_it_stands_in(text):
    written = embedded_json({"caption": text})
    assert json.loads(written) == {"caption": text}
    assert written.isascii()
    assert not set("<>&") & set(written)


@given(st.text())
def test_no_text_becomes_markup(text):
    inside = node("p", text).removeprefix("<p>").removesuffix("</p>")
    assert "<" not in inside and '"' not in inside
    plain(text).encode("utf-8")

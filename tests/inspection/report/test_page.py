import base64
import dataclasses
import gzip
import hashlib
import itertools
import json
import re
import unicodedata
from collections import Counter
from html.parser import HTMLParser

import pytest

import imagined_runs
from normkit.errors import InputError
from normkit.inspection import figures
from normkit.inspection.report import description as html
from normkit.show import theme
from normkit.show.parts import printable
from rendered_pages import rendered

VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a browser would see: every element with its attributes, and the text of each kind of element."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts = [], [], Counter()
        self.content = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.content.setdefault(self.open[-1] if self.open else "", []).append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def text(self, tag):
        return "".join(self.content[tag])


@pytest.fixture
def page(faulty):
    return Page(rendered(faulty))


@pytest.fixture
def spiking(faulty):
    return watched(faulty, imagined_runs.spike)


@pytest.fixture
def hostile_run(hostile):
    return watched(hostile, imagined_runs.hostile, hostile.model.name)


def watched(inspection, kind, *arguments):
    return dataclasses.replace(inspection, training=kind(inspection, *arguments))


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["faulty", "spiking", "hostile", "hostile_run", "empty", "gauged"])
def test_every_page_is_well_formed_and_holds_its_inspection(name, request):
    inspection = request.getfixturevalue(name)
    page = Page(rendered(inspection))
    assert page.open == []
    assert page.named("html") == [{"lang": "en"}]
    assert [len(page.named(tag)) for tag in ("main", "header", "footer", "h1")] == [1, 1, 1, 1]
    assert page.named("a")[0] == {"class": "skip", "href": "#verdict"}
    assert {attrs["scope"] for attrs in page.named("th")} <= {"col", "row"}
    ids = Counter(attrs["id"] for _, attrs in page.elements if "id" in attrs)
    assert [name for name, count in ids.items() if count > 1] == []
    for _, attrs in page.elements:
        for name in ("href", "aria-labelledby"):
            if name in attrs:
                assert attrs[name].removeprefix("#") in ids
        for target in re.findall(r"url\(#([^)]*)\)", " ".join(value or "" for value in attrs.values())):
            assert target in ids
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    data, _ = page.content["script"]
    packed = gzip.decompress(base64.b64decode(data, validate=True))
    assert json.loads(packed) == json.loads(json.dumps(inspection.to_json()))


def test_every_figure_can_be_read_without_being_seen(page):
    figures = [attrs for attrs in page.named("svg") if attrs.get("role") == "img"]
    assert len(figures) == 6
    assert all(attrs["aria-label"].endswith(".") for attrs in figures)
    others = [attrs for attrs in page.named("svg") if attrs.get("role") != "img"]
    assert all(attrs["aria-hidden"] == "true" for attrs in others)


def test_no_element_asks_for_anything_outside_the_page_and_the_policy_lets_nothing_load(page):
    for tag, attrs in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
        assert "http" not in attrs.get("style", "")
    policy = next(m["content"] for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy")
    _, script = page.content["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert dict(rule.split(" ", 1) for rule in policy.split("; ")) == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_both_schemes_are_defined_from_the_one_palette(page):
    style = page.text("style")
    for name in theme.LIGHT:
        assert f"--{name}: {theme.LIGHT[name]};" in style
        assert f"--{name}: {theme.DARK[name]};" in style
    used = set(re.findall(r"var\(--([a-z]+)\)", style))
    assert used <= {*theme.LIGHT, "text", "code"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hostile", "hostile_run"])
def test_hostile_strings_are_text_only_and_leave_no_control_character(name, request):
    inspection = request.getfixturevalue(name)
    text = rendered(inspection)
    page = Page(text)
    assert Counter(tag for tag, _ in page.elements)["script"] == 2
    assert page.named("img") == []
    assert [name for _, attrs in page.elements for name in attrs if name.startswith("on")] == []
    assert page.text("h1") == printable(inspection.model.name)
    assert "<script>alert" not in text
    assert "49" not in page.text("h1")
    assert "{{ 7 * 7 }}" in page.text("h1")
    assert {character for character in text if unicodedata.category(character)[0] == "C"} == {"\n"}
    text.encode()


def test_a_finding_leads_to_its_places_to_the_page_of_its_rule_and_to_the_command(faulty):
    first = dataclasses.replace(faulty.findings[0], page="https://example.org/A1.html")
    page = rendered(dataclasses.replace(faulty, findings=(first,)))
    assert '<a href="https://example.org/A1.html">A model that fails A1</a>' in page
    assert "<code>normkit rule A1</code>" in page
    first, second = (path.replace(".", ".<wbr>") for path in ("transformer.h.{0-1}.ln_1", "transformer.h.0.ln_2"))
    assert f"<dt>where</dt><dd><code>{first}</code>, <code>{second}</code></dd>" in page


def test_the_page_says_what_the_description_says(page):
    assert page.text("title") == "demo layernorm, eps planted: eps is not the config's, and 1 more fault | normkit"
    assert page.text("dd").count("Set eps") == 0
    assert "Set eps to 1e-5 where the norms are built." in page.text("li")
    assert "eps 1e-3 at 3 norms" in page.text("dd")
    assert page.text("code").count("transformer.h.0.ln_1") == 2
    assert "transformer.h.{0-1}.ln_1" in page.text("code")
    headings = [heading for heading in page.content["h3"] if heading.strip()]
    assert headings[-3:] == ["2 findings", "6 checks clean", "1 not checked"]
    checked = page.text("span")
    for title in ("eps differs from the config's", "eps outside the root", "little headroom"):
        assert checked.count(title) == 1
    assert "no 16-bit tensors seen" in page.text("p")


def test_all_but_the_verdict_and_the_first_fault_is_closed(page):
    opened = [attrs for attrs in page.named("details") if "open" in attrs]
    assert len(opened) == 1
    assert page.text("summary").count("All 13 rows") == 2
    # Each section says what it holds before it is opened.
    gists = [text for text in page.text("span").split("\n") if text.strip()]
    assert "13 norms" not in gists
    for gist in ("token 17", "10 of 13 LayerNorm, eps 1e-5", "median rows turn", "6 pre-norm", "6 checks clean"):
        assert gist in page.text("span")


@pytest.mark.slow
def test_attention_is_plotted_or_listed(faulty, monkeypatch):
    assert "largest sampled" not in Page(rendered(faulty)).text("th")
    monkeypatch.setattr(figures, "drawings", lambda _: ())
    listed = Page(html.render(faulty))
    assert "largest sampled" in listed.text("th")
    assert "transformer.h.{0-5}.attn" in listed.text("code")


def test_the_geometry_of_norms_and_keys_has_a_section(page):
    assert {"id": "geometry", "aria-labelledby": "geometry-heading"} in page.named("section")
    assert "What the norms do to vectors" in page.text("h3")
    assert "Which keys can be selected" in page.text("h3")
    cells = page.content["td"]
    assert "6.4 to 12.0°" in cells
    assert "16 of 128" in cells
    assert "62.5 %" in cells


@pytest.mark.slow
def test_only_what_was_asked_for_has_a_section(gauged, page):
    assert not {"folding", "run", "steps"} & {attrs.get("id") for _, attrs in page.elements}
    known = Page(rendered(gauged))
    assert {"id": "folding", "aria-labelledby": "folding-heading"} in known.named("section")
    assert "not folded: the gain is not 1" in known.text("dd")
    assert "partly centred: 1 of 2 writers of the transformer.ln_f" in known.text("dd")
    assert "a sign of a tool that centres" in known.text("dd")
    assert "its reader is tied" in known.text("dd")
    assert "How far the weights are from folded and centred is read off them" in known.text("li")


@pytest.mark.slow
def test_why_it_is_not_known_how_far_from_folded_is_told(healthy):
    unknown = Page(rendered(dataclasses.replace(healthy, foldedness_unknown="its family is not declared")))
    assert "Not known: its family is not declared." in unknown.text("p")
    assert unknown.open == []
    assert "is read off them" not in unknown.text("li")


@pytest.mark.slow
def test_a_run_comes_first_after_the_verdict_then_findings_then_figures(spiking):
    page = Page(rendered(spiking))
    named = [attrs["aria-labelledby"] for tag, attrs in page.elements if tag in ("section", "article")]
    assert named[:6] == [
        "verdict-heading", "run-heading", "finding-1", "finding-2", "steps-heading", "walk-heading",
    ]  # fmt: skip
    assert "Loss spike at step 412" in page.text("h2")
    assert "step 409, the update of a parameter" in page.text("strong")
    for question in imagined_runs.QUESTIONS:
        assert question in page.text("h3")
    classes = [attrs.get("class") for attrs in page.named("li")]
    assert classes[:4] == ["neutral", "warning", "warning", "note"]
    assert "Clip the gradient norm at 1.0." in page.text("li")
    assert "Resume from step 400" in page.text("p")
    figures = [attrs for attrs in page.named("svg") if attrs.get("role") == "img"]
    assert len(figures) == 9
    assert "All 33 rows" in page.text("summary")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind",
    [
        imagined_runs.bare,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (imagined_runs.calm, imagined_runs.broken, imagined_runs.short)
        ),
    ],
)
def test_every_run_of_a_real_model_has_a_page_with_the_same_bytes(tiny, kind):
    inspection = watched(tiny, kind)
    text = html.render(inspection)
    assert text == html.render(inspection)
    page = Page(text)
    assert page.open == []
    assert ("What happened" in page.text("h2")) == (kind in (imagined_runs.broken, imagined_runs.bare))


@pytest.mark.slow
def test_a_run_without_sampled_rows_has_no_section_of_geometry(empty, tiny):
    assert 'id="geometry"' in rendered(empty)
    sites = tuple(dataclasses.replace(site, geometry=None) for site in tiny.sites)
    bare = dataclasses.replace(tiny, sites=sites, selections=())
    text = html.render(watched(bare, imagined_runs.bare))
    assert "geometry" not in {attrs.get("id") for _, attrs in Page(text).elements}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_page_of_twelve_layers_is_under_150_kb_and_of_a_hundred_under_1_mb(twelve, long):
    assert len(rendered(twelve).encode()) < 150_000
    assert len(rendered(long).encode()) < 1_000_000


@pytest.mark.slow
def test_a_long_model_is_grouped_and_its_rows_are_kept(long):
    page = Page(rendered(long))
    summaries = page.text("summary")
    assert (summaries.count("All 201 rows"), summaries.count("All 100 rows")) == (2, 2)
    assert "transformer.h.{0-99}.ln_1" in page.text("code")
    assert "transformer.h.57.ln_2" in page.text("code")


def test_a_model_without_norms_has_a_page(empty):
    text = rendered(empty)
    page = Page(text)
    assert "This model has no normalization layer that a spec describes." in page.text("p")
    assert "No attention call was seen." in page.text("p")
    assert "No row of a norm was sampled." in page.text("p")
    assert "No key was tried: that takes SciPy" in page.text("p")
    assert "No repeated block was found" in page.text("p")
    assert page.named("figure") == []
    assert 'id="walk"' not in text


@pytest.mark.slow
def test_a_written_page_is_the_rendered_one(faulty, tmp_path):
    path = faulty.write_html(tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == rendered(faulty)
    with pytest.raises(InputError, match="cannot write"):
        faulty.write_html(path / "below" / "a file.html")


@pytest.mark.slow
def test_a_notebook_gets_the_page_in_a_sandbox(hostile):
    frame = Page(hostile._repr_html_())
    (tag, attrs), *others = frame.elements
    assert (tag, others) == ("iframe", [])
    assert attrs["sandbox"] == "allow-scripts"
    assert attrs["title"] == f"normkit inspection of {printable(hostile.model.name)}"
    assert attrs["srcdoc"] == rendered(hostile)
    assert "height: 760px" in attrs["style"]

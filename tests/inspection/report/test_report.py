"""The page in a real browser."""

import dataclasses
import json

import pytest

import imagined_runs
from normkit.inspection.report import description as html
from rendered_pages import rendered

pytestmark = pytest.mark.browser

# Elements that stick out to the right of the window, those within their own scroller left out.
STICKING_OUT = """() => [...document.querySelectorAll("body *")].filter(element => {
    if (element.closest(".scroll, .formula, .skip, script")) return false;
    return element.getBoundingClientRect().right > innerWidth + 1;
}).map(element => element.outerHTML.slice(0, 80))"""


@pytest.fixture
def opened(window, tmp_path):
    """Opens an inspection's page from a file and keeps what the browser asked for and complained of."""

    def open_page(inspection, **options):
        path = tmp_path / "report.html"
        path.write_text(rendered(inspection), encoding="utf-8")
        requests, complaints = [], []
        listeners = {
            "request": lambda request: requests.append(request.url),
            "console": lambda message: complaints.append(message.text),
            "pageerror": lambda error: complaints.append(str(error)),
            "dialog": lambda dialog: (complaints.append(dialog.message), dialog.dismiss()),
        }
        page = window(listeners=listeners, **options)
        page.goto(path.as_uri())
        page.requests, page.complaints, page.address = requests, complaints, path.as_uri()
        return page

    return open_page


def size(width):
    return {"viewport": {"width": width, "height": 900}}


@pytest.fixture
def spiking(faulty):
    return dataclasses.replace(faulty, training=imagined_runs.spike(faulty))


@pytest.fixture
def hostile_run(hostile):
    return dataclasses.replace(hostile, training=imagined_runs.hostile(hostile, hostile.model.name))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["faulty", "hostile", "long", "empty", "spiking", "hostile_run"])
@pytest.mark.parametrize("width", [320, 1280])
def test_the_page_loads_alone_and_fits_its_window(opened, request, name, width):
    page = opened(request.getfixturevalue(name), **size(width))
    assert page.requests == [page.address]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(STICKING_OUT) == []


def test_the_page_reads_without_scripts(opened, faulty):
    page = opened(faulty, java_script_enabled=False)
    assert page.locator("h1").is_visible()
    assert page.locator("article.finding").first.is_visible()
    assert page.locator("section#norms").is_hidden()
    page.locator("summary", has_text="The norms").click()
    assert page.locator("section#norms").is_visible()
    assert page.locator("section#norms .rows tbody tr").count() == 13
    assert page.locator("figure svg").count() == 6
    assert page.locator("th button").count() == 0


def test_the_answers_of_a_run_stand_side_by_side_where_there_is_room(opened, spiking):
    for width, columns in ((1280, 2), (390, 1)):
        page = opened(spiking, java_script_enabled=False, **size(width))
        replies = page.locator(".replies li")
        assert replies.count() == 4
        assert len({replies.nth(place).bounding_box()["x"] for place in range(4)}) == columns
        assert page.locator("#steps figure svg").count() == 3


def test_the_first_key_leads_past_the_navigation_and_a_click_sorts_a_table_by_number(opened, faulty):
    page = opened(faulty)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.locator("summary", has_text="The norms").click()
    page.locator("summary", has_text="All 13 rows").first.click()
    rows = page.locator("section#norms .rows tbody tr")
    heading = page.locator("section#norms .rows th", has_text="eps cuts")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert rows.first.locator("th").inner_text() == "transformer.h.5.ln_2"
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert rows.first.locator("th").inner_text() == "transformer.h.0.ln_1"
    page.locator("section#norms .rows th button", has_text="norm").first.click()
    assert heading.get_attribute("aria-sort") is None
    assert rows.first.locator("th").inner_text() == "transformer.h.0.ln_1"
    assert rows.last.locator("th").inner_text() == "transformer.ln_f"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(19, 22, 25)")])
def test_the_page_and_its_figures_follow_the_scheme(opened, faulty, scheme, paper):
    page = opened(faulty, color_scheme=scheme)
    page.locator("summary", has_text="Over depth").click()
    colour = "element => getComputedStyle(element)"
    assert page.locator("body").evaluate(f"{colour}.backgroundColor") == paper
    ink = page.locator("body").evaluate(f"{colour}.color")
    title = page.locator("figure svg text", has_text="block (norms").first
    assert title.evaluate(f"{colour}.fill") == ink


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["faulty", "spiking"])
def test_print_is_on_white_paper_and_cuts_nothing_off(opened, request, name):
    # A4 less 15 mm to every side, in CSS pixels.
    page = opened(request.getfixturevalue(name), color_scheme="dark", **size(680))
    page.emulate_media(media="print")
    assert page.locator("body").evaluate("element => getComputedStyle(element).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    assert page.locator("footer button").is_hidden()


def test_print_opens_every_section_with_and_without_scripts(opened, healthy):
    for scripts in (True, False):
        page = opened(healthy, java_script_enabled=scripts)
        page.emulate_media(media="print")
        if scripts:
            page.evaluate("dispatchEvent(new Event('beforeprint'))")
            assert page.locator("details:not([open])").count() == 0
        last = page.locator("section#method li").last
        assert last.bounding_box()["height"] > 10
        if scripts:
            page.evaluate("dispatchEvent(new Event('afterprint'))")
            assert page.locator("details[open]").count() == 0


def test_a_model_of_18_layers_is_at_most_4500_pixels_high_and_400_kb(opened, peri):
    # It was 13,506 pixels and 946 kB.
    page = opened(peri, **size(1280))
    assert len(peri.sites) == 109
    assert page.evaluate("document.documentElement.scrollHeight") <= 4500
    assert len(rendered(peri).encode()) <= 400_000


def test_tables_fit_or_show_by_a_shade_that_there_is_more(opened, peri):
    shade = "element => getComputedStyle(element).backgroundAttachment"
    hidden = "element => element.scrollWidth - element.clientWidth"
    for width in (1280, 400):
        page = opened(peri, **size(width))
        page.evaluate("document.querySelectorAll('.part').forEach(part => part.open = true)")
        tables = page.locator("section#norms > .scroll, section#geometry > .scroll")
        beyond = [tables.nth(place).evaluate(hidden) for place in range(tables.count())]
        assert (max(beyond) > 0) == (width == 400), beyond
        assert "local" in tables.first.evaluate(shade)


def test_the_numbers_can_be_saved(opened, healthy, tmp_path):
    page = opened(healthy)
    with page.expect_download() as download:
        page.locator("footer button").click()
    download.value.save_as(tmp_path / "saved.json")
    assert json.loads((tmp_path / "saved.json").read_text()) == json.loads(json.dumps(healthy.to_json()))
    assert page.complaints == []


def test_a_notebook_frame_shows_the_page(faulty, window):
    page = window()
    page.set_content(html.frame(faulty))
    heading = page.frame_locator("iframe").locator("h1")
    heading.wait_for()
    assert heading.inner_text() == "demo layernorm, eps planted"

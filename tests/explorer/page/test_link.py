"""The state as text in the address bar: what a link says, and what garbage is told."""

from __future__ import annotations

import math
import random
import string

import pytest

pytestmark = pytest.mark.browser

SCENES = ["three", "four", "model", "clusters", "gradient", "attention", "depth"]
MODES = ["layer", "rms", "batch", "length", "plane"]


@pytest.fixture(scope="module")
def start(modules):
    return modules("state.js", "DEFAULTS")


def any_number(chance: random.Random, low: float, high: float) -> float:
    return chance.choice([low, high, chance.uniform(low, high), round(chance.uniform(low, high), 2)])


def any_state(chance: random.Random) -> dict:
    """A patch with every field, each as wild as it may be."""

    def vector():
        return [chance.choice([0, -1, 1e-17, -99.99, chance.gauss(0, 1), chance.uniform(-100, 100)]) for _ in range(4)]

    edits = {
        str(chance.randrange(60)): [
            chance.choice([1e-300, -1e9, 0.1 + 0.2, chance.gauss(0, 3)]) for _ in range(chance.choice([3, 4]))
        ]
        for _ in range(chance.choice([0, 0, 1, 7]))
    }
    return {
        "scene": chance.choice(SCENES),
        "mode": chance.choice(MODES),
        "cloud": chance.choice(["scatter", "four", "small", "given", "a-b_9"]),
        "stage": any_number(chance, 0, 4),
        "eps": chance.choice([0, 1e-12, 1e-5, 10, 10 ** chance.uniform(-12, 1)]),
        "place": chance.choice(["inside", "outside"]),
        **{name: vector() for name in ("gain", "bias", "normal", "upstream")},
        "edits": edits,
        "selected": chance.randrange(-1, 2000),
        "yaw": chance.uniform(-4, 4),
        "pitch": any_number(chance, -1.5708, 1.5708),
        "zoom": any_number(chance, 0.2, 8),
        "model": chance.randrange(3),
        "site": chance.randrange(30),
        "colour": chance.choice(["token", "position", "layer"]),
        "depth": chance.randrange(1, 49),
        "spread": any_number(chance, 0.25, 4),
        "residual": chance.random() < 0.5,
        "seed": chance.choice([0, 1, 4294967295, chance.randrange(10000)]),
        "layer": chance.randrange(-1, 49),
        "walk": chance.randrange(7),
    }


@pytest.fixture(scope="module")
def round_trips(modules):
    """A hundred and fifty pairs of a start and a state: how each comes back from its own link."""
    chance = random.Random(6)
    pairs = [[any_state(chance) if chance.random() < 0.5 else {}, any_state(chance)] for _ in range(150)]
    return modules.run(
        """async (pairs) => {
          const { createStore, startFrom } = await load("state.js");
          const { decode, encode } = await load("link.js");
          return pairs.map(([first, second]) => {
            const start = startFrom(first);
            const store = createStore(start);
            store.set(second);
            const hash = encode(store.get(), start);
            return { state: store.get(), start, hash, ...Object.fromEntries(
              Object.entries(decode(hash, start)).map(([key, value]) => [`decoded ${key}`, value])) };
          });
        }""",
        pairs,
    )


def test_every_state_survives_its_link_which_is_text_that_an_address_holds(round_trips):
    assert [trip["hash"] for trip in round_trips if trip["decoded state"] != trip["state"]] == []
    assert {problem for trip in round_trips for problem in trip["decoded problems"]} == set()
    assert len({trip["hash"] for trip in round_trips}) == 150
    assert {trip["state"]["scene"] for trip in round_trips} == set(SCENES)
    assert sum(bool(trip["state"]["edits"]) for trip in round_trips) > 30
    allowed = set(string.ascii_letters + string.digits + "-_=&,;:.#+")
    assert all(set(trip["hash"]) <= allowed for trip in round_trips)


def test_a_link_holds_only_what_differs(modules, start):
    assert modules("link.js", "encode", start, start) == "#v=1"
    changed = start | {
        "scene": "four",
        "cloud": "four",
        "eps": 1e-9,
        "edits": {"3": [1, 2, -0.5, 0], "7": [0.1, 0, 0, 0]},
    }
    assert (
        modules("link.js", "encode", changed, start)
        == "#v=1&scene=four&cloud=four&eps=1e-9&edits=3:1,2,-0.5,0;7:0.1,0,0,0"
    )


def test_an_empty_link_is_the_start(modules, start):
    for text in ("", "#", "#v=1"):
        assert modules("link.js", "decode", text, start) == {"state": start, "problems": []}


def test_what_the_maker_of_a_page_wants_stands_at_the_start(modules, start):
    wanted = modules("state.js", "startFrom", {"scene": "gradient", "eps": 0})
    assert wanted == start | {"scene": "gradient", "eps": 0, "selected": 0}
    assert modules("link.js", "decode", "#eps=1e-5", wanted)["state"]["scene"] == "gradient"


@pytest.mark.parametrize(
    ("hash", "told", "changed"),
    [
        ("#eps=0&stage=3", "", {"eps": 0, "stage": 3}),
        ("eps=1e-6", "", {"eps": 1e-6}),
        ("#scene=model&mode=rms&colour=layer", "", {"scene": "model", "mode": "rms", "colour": "layer"}),
        ("#gain=1,2,3", "", {"gain": [1, 2, 3, 0.8]}),
        ("#residual=false", "", {"residual": False}),
        ("#eps=1e-5&eps=1e-4", "", {"eps": 1e-4}),
        ("#edits=3%3A1%2C2%2C3", "", {"edits": {"3": [1, 2, 3]}}),
        ("#v=2&eps=0.1", 'The link is of version "2", this page of 1', {"eps": 0.1}),
        ("#v=9e99&eps=0.1", "version", {"eps": 0.1}),
        ("#v=&eps=0.1", "version", {"eps": 0.1}),
        ("#eps=1e999", 'eps should be 0 or a number from 1e-12 to 10, not "1e999": it is "0.00001" here.', {}),
        ("#eps=NaN&stage=2", "eps should be", {"stage": 2}),
        ("#eps=-1", 'not "-1": it is "0" here', {"eps": 0}),
        ("#eps=0x10", "eps should be", {}),
        ("#eps= 1", "eps should be", {}),
        ("#eps=", "eps should be", {}),
        ("#eps", "eps should be", {}),
        ("#depth=100", 'depth should be a whole number from 1 to 48, not "100": it is "48" here.', {"depth": 48}),
        ("#depth=2.5", 'it is "3" here', {"depth": 3}),
        ("#gain=1,2,NaN,4", "gain should be", {}),
        ("#gain=1,2,3,4,5", "gain should be up to four numbers", {}),
        ("#gain=1,,3", "gain should be", {}),
        ("#gain=1e300,1,1,1", "gain should be", {}),
        ("#normal=0,0,0,1", "normal should be", {}),
        ("#normal=0,0,1e-3", "", {"normal": [0, 0, 1e-3, 0.2]}),
        ("#scene=nowhere", "scene should be three or four or model", {}),
        ("#scene=toString", "scene should be", {}),
        ("#scene=model&mode=batch", "The scene model has no mode batch.", {"scene": "model"}),
        ("#scene=gradient&mode=plane", "", {"scene": "gradient", "mode": "plane", "selected": 0}),
        ("#__proto__=1&stage=1", 'The link sets "__proto__", which this page does not have.', {"stage": 1}),
        ("#constructor=1", 'sets "constructor"', {}),
        ("#edits=__proto__:1,2,3", "edits should be", {}),
        ("#edits=constructor:1,2,3", "edits should be", {}),
        ("#edits=1:1,2,3;2", "edits should be", {}),
        ("#edits=1:1,2,3:4", "edits should be", {}),
        ("#edits=-1:1,2,3", "edits should be", {}),
        ("#edits=1:1,2,1e999", "edits should be", {}),
        ("#edits=9999999:1,2,3", "edits should be", {}),
        ("#cloud=<img src=x onerror=alert(1)>", "cloud should be the name of a cloud of points", {}),
        ("#cloud=__proto__", "cloud should be", {}),
        ("#walk=<script>alert(1)</script>", "walk should be", {}),
        ("#%E0%A4%A=1", "which this page does not have", {}),
        ("#stage=%E0%A4%A", "stage should be", {}),
        ("#garbage", 'sets "garbage"', {}),
        ("#=&==&&", "The link sets", {}),
        ("#" + "x" * 41000, "A link of 41000 characters was left aside.", {}),
        ("#stage=" + "9" * 30000, "stage should be", {}),
        ("#stage=" + "9" * 300, 'not "' + "9" * 30 + '…"', {"stage": 4}),
    ],
)
def test_what_a_link_says(modules, start, hash, told, changed):
    found = modules("link.js", "decode", hash, start)
    assert found["state"] == start | changed
    assert len(found["problems"]) <= (1 if hash != "#=&==&&" else 4)
    assert told in " ".join(found["problems"])
    assert bool(told) == bool(found["problems"])


def test_a_link_to_what_another_page_holds_says_so(modules, start):
    page = {"clouds": {"scatter": {}, "small": {}}, "models": [{"sites": [{}, {}]}]}
    cases = ["#cloud=given&stage=1", "#scene=model&model=1", "#scene=model&site=2", "#scene=model&site=1&cloud=small"]
    given, model, site, fine = modules.each("link.js", "decode", [[text, start, page] for text in cases])
    assert given == {
        "state": start | {"stage": 1},
        "problems": ['The points "given" of the link are not in this page.'],
    }
    assert model["problems"] == ["The activations of the link (model 1, site 0) are not in this page."]
    assert site["problems"] == ["The activations of the link (model 0, site 2) are not in this page."]
    assert (model["state"]["model"], site["state"]["site"]) == (0, 0)
    assert fine["problems"] == []
    assert (fine["state"]["site"], fine["state"]["cloud"]) == (1, "small")


def test_a_thousand_mistakes_are_told_in_seven_sentences(modules, start):
    found = modules("link.js", "decode", "#" + "&".join(f"k{index}=1" for index in range(1000)) + "&stage=2", start)
    assert found["state"] == start | {"stage": 2}
    assert len(found["problems"]) == 7
    assert found["problems"][-1] == "994 more such mistakes are in the link."


def test_garbage_never_throws_and_is_told(modules, start):
    """Random text, and links with some of their characters changed."""
    chance = random.Random(7)
    alphabet = string.printable + "é😀\u0000\u202e%"
    hashes = ["#" + "".join(chance.choices(alphabet, k=chance.randrange(1, 80))) for _ in range(400)]
    keys = list(start)
    values = [
        "NaN",
        "-Infinity",
        "1e999",
        "",
        "null",
        "{}",
        "[]",
        "true",
        "__proto__",
        "1,",
        "%",
        "%00",
        "'\"><b>",
        "0" * 5000,
    ]
    hashes += ["#" + "&".join(f"{chance.choice(keys)}={chance.choice(values)}" for _ in range(5)) for _ in range(400)]
    found = modules.each("link.js", "decode", [[text, start] for text in hashes])
    assert len(found) == 800
    for text, answer in zip(hashes, found, strict=True):
        assert set(answer["state"]) == set(start), text
        assert all(math.isfinite(value) for value in answer["state"].values() if isinstance(value, float)), text
        assert all(problem[-1] == "." and len(problem) < 300 for problem in answer["problems"]), text
    silent = [text for text, answer in zip(hashes, found, strict=True) if not answer["problems"]]
    # An empty list of moved points, and zeros, are what a link may say.
    assert [text for text in silent if text.strip("#&").split("=")[0] not in start] == []


@pytest.mark.parametrize("cloud", ["clusters", "scatter", "small"])
def test_a_link_to_three_norms_keeps_the_points_chosen_there(modules, cloud):
    script = """async (cloud) => {
      const { DEFAULTS, createStore } = await load("state.js");
      const { decode, encode } = await load("link.js");
      const store = createStore(DEFAULTS);
      store.set({ scene: "clusters", cloud });
      return decode(encode(store.get(), DEFAULTS), DEFAULTS).state.cloud;
    }"""
    assert modules.run(script, cloud) == cloud


def test_a_pasted_link_is_taken_over_and_changes_are_written(modules):
    """In a page without an address, as everywhere."""
    assert modules.run(
        """async () => {
          const { createStore, DEFAULTS } = await load("state.js");
          const { mountHash } = await load("link.js");
          const store = createStore(DEFAULTS);
          const said = [];
          const write = mountHash(store, DEFAULTS, (text) => said.push(text));
          const settled = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 20)));
          document.body.innerHTML = '<main id="view"></main>';
          const seen = [];
          for (const hash of ["#eps=0.5", "#view", "#eps=zero", "#stage=2"]) {
            location.hash = hash;
            await settled();
            seen.push([store.get().eps, store.get().stage, said.length]);
          }
          store.set({ stage: 3 });
          write();
          await settled();
          return [seen, said, location.hash];
        }"""
    ) == [
        [[0.5, 0, 1], [0.5, 0, 1], [1e-5, 0, 2], [1e-5, 2, 3]],
        ["", 'eps should be 0 or a number from 1e-12 to 10, not "zero": it is "0.00001" here.', ""],
        "#v=1&stage=3",
    ]

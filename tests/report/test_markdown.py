"""What is pasted into an issue: short, and nothing of a model is markup, a mention or the end of the fence."""

import dataclasses
import re
import unicodedata

from normkit.report.markdown import markdown

ORIGIN = "normkit inspect demo --format markdown (normkit 1.0)"

FAULTY = """\
### eps is not the config's, and 1 more fault

demo layernorm, eps planted: GPT2LMHeadModel (gpt2), 331,776 parameters in float32, width 64

- norms: 10 LayerNorm, eps 1e-5; 3 LayerNorm, eps 0.001
- blocks: 6 pre-norm; final norm transformer.ln\\_f
- input rows: median rms 0.120 to 0.579; eps shortens median rows by up to 3.3 %
- attention: logits reach 212, bound 402

- error **A1** eps is not the config's: eps 1e-3 at 3 norms (at transformer.h.\\{0-1\\}.ln\\_1, transformer.h.0.ln\\_2)
- warning **F1** attention logits above 100: sampled 214, bound 402 (at transformer.h.5.attn)

```text
"""


def test_the_verdict_the_facts_the_findings_and_the_table_in_a_fence(faulty):
    said = markdown(faulty, ORIGIN)
    assert said.startswith(FAULTY)
    assert said.endswith(f"```\n\n6 checks clean, 1 not checked; the demo's own text: 2,048 tokens\n\n{ORIGIN}\n")
    assert "transformer.h.0.ln_1  LayerNorm, eps 0.001  pre        0.120   0.40 %     3.3 %" in said
    assert len(said.splitlines()) < 45


def test_a_finding_leads_to_the_page_of_its_rule(faulty):
    first = dataclasses.replace(faulty.findings[0], page="https://example.org/A1.html")
    said = markdown(dataclasses.replace(faulty, findings=(first,)), ORIGIN)
    assert "- error **[A1](https://example.org/A1.html)** eps is not the config's" in said


def test_a_long_model_stays_short_and_a_model_without_norms_needs_no_table(long, empty):
    assert len(markdown(long, ORIGIN).splitlines()) < 30
    assert "```" not in markdown(empty, ORIGIN)


def test_findings_past_a_few_are_counted(faulty):
    many = dataclasses.replace(faulty, findings=faulty.findings * 6)
    assert markdown(many, ORIGIN).count("**F1**") == 4
    assert "- and 4 more\n" in markdown(many, ORIGIN)


def test_nothing_of_a_model_is_markup(hostile):
    path = "```\n# <b>@here</b> `x` [a](http://x)"
    sites = tuple(dataclasses.replace(site, path=path, class_name="*x*") for site in hostile.sites)
    said = markdown(dataclasses.replace(hostile, sites=sites, final_norm=path), "a `command` of @someone")
    fences = re.findall(r"^(`{3,})(?:text)?$", said, re.MULTILINE)
    assert len(fences) == 2
    assert len(fences[0]) > max(map(len, re.findall("`+", said.split(fences[0])[1])))
    before, _, after = said.split(fences[0])
    for part in (before, after):
        assert re.findall(r"(?<!\\\\)[<>@\\[\\]`]", part) == []
        assert not re.search(r"^# ", part, re.MULTILINE)
    assert {character for character in said if unicodedata.category(character)[0] == "C"} == {"\n"}

import dataclasses
import re
import unicodedata

import pytest

import imagined_runs
from normkit.inspection.report.description import describe
from normkit.inspection.report.printing import Norms, markdown, summary, walk_table
from screens import shown

HEALTHY = """\
demo layernorm  GPT2LMHeadModel (gpt2), 331,776 parameters in float32, width 64
the demo's own text: 2,048 tokens

+ No fault found  13 norms looked at: 8 checks clean, 1 not checked.
blocks     6 pre-norm; final norm transformer.ln_f
attention  logits reach 6.05, bound 11.5

norm                  role   input rms  along 1  eps cuts  gain 5 to 95 %
─────────────────────────────────────────────────────────────────────────
transformer.h.0.ln_1  pre        0.120    2.0 %   0.035 %  0.560 to 0.880
transformer.h.0.ln_2  pre        0.138    2.0 %   0.026 %  0.560 to 0.880
transformer.h.1.ln_1  pre        0.209    1.0 %   0.011 %  0.584 to 0.936
transformer.h.1.ln_2  pre        0.240    1.0 %  0.0087 %  0.584 to 0.936
transformer.h.2.ln_1  pre        0.289   0.67 %  0.0060 %  0.608 to 0.992
transformer.h.2.ln_2  pre        0.332   0.67 %  0.0045 %  0.608 to 0.992
transformer.h.3.ln_1  pre        0.364   0.50 %  0.0038 %   0.632 to 1.05
transformer.h.3.ln_2  pre        0.418   0.50 %  0.0029 %   0.632 to 1.05
transformer.h.4.ln_1  pre        0.435   0.40 %  0.0026 %   0.656 to 1.10
transformer.h.4.ln_2  pre        0.500   0.40 %  0.0020 %   0.656 to 1.10
transformer.h.5.ln_1  pre        0.503   0.33 %  0.0020 %   0.680 to 1.16
transformer.h.5.ln_2  pre        0.579   0.33 %  0.0015 %   0.680 to 1.16
transformer.ln_f      final      0.569   0.30 %  0.0015 %    1.08 to 1.72
input rms: of the median row. along 1: energy along all-ones, which centring removes. eps cuts: how
much shorter eps makes the median row. gain 5 to 95 %: as it acts, any offset added.
all 13 LayerNorm, eps 1e-5: y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias

clean        A1 A2 A7 B1 B5 D1 D3 F1
not checked  E2 (no 16-bit tensors seen)
"""

FINDINGS = """\
x eps is not the config's, and 1 more fault  1 error, 1 warning; 6 checks clean, 1 not checked.
blocks     6 pre-norm; final norm transformer.ln_f
attention  logits reach 212, bound 402

x error  A1  eps is not the config's  at transformer.h.{0-1}.ln_1 and 1 more
  measured  eps 1e-3 at 3 norms
  evidence  transformer.h.0.ln_1: eps 1e-3, shortens the median row by 1.9 %
  why       Rows come out shorter than the next layer was trained on, most where they are small.
  do        1. Set eps to 1e-5 where the norms are built.
            2. Look for a default that the port did not override.
  confirm   normkit identify prints eps 1e-5 for these norms.
! warning  F1  attention logits above 100  at transformer.h.5.attn
  measured  sampled 214, bound 402
  evidence  transformer.h.5.attn: head 2, bound 402
  why       The softmax is one-hot there and passes no gradient; growth from here ends in a loss
            spike.
  do        1. Normalize queries and keys.
            2. Lower the learning rate or lengthen the warm-up.
  confirm   The bound stays under 100 over a few hundred steps.
normkit rule A1 says where the limit comes from
"""

LONG = """\
norm                       role       input rms         along 1         eps cuts  gain 5 to 95 %
────────────────────────────────────────────────────────────────────────────────────────────────
transformer.h.{0-99}.ln_1  pre    0.120 to 4.78  0.020 to 2.0 %  at most 0.035 %   0.560 to 6.42
transformer.h.{0-99}.ln_2  pre    0.138 to 5.49  0.020 to 2.0 %  at most 0.026 %   0.560 to 6.42
transformer.ln_f           final           4.82          0.30 %         <0.001 %    1.08 to 1.72
"""

WALK = """\
token 17, “ the”, at transformer.h.2.ln_1, n = 64
y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05) + bias

stage            mean  length  length / √n  angle to 1  what is true now
────────────────────────────────────────────────────────────────────────────────────────────────────
raw            0.0212    5.26        0.657      88.15°  the residual stream
centred             0    5.25        0.657      90.00°  mean 0: on the hyperplane orthogonal to
                                                        all-ones
scaled              0    8.00         1.00      90.00°  length sqrt(n): on the sphere
gain and bias  0.0140    6.62        0.828      89.03°  on the ellipsoid around the bias
depth below the ellipsoid's surface      1.2e-5 of its size
distance from its hyperplane             3.1e-9
difference from the module's own output  1.3e-7 of the largest entry; one rounding is 5.96e-8
"""

RUN = """\
! Loss spike at step 412  437 steps seen, the norms measured 18 times, every 25 steps. It began 3
steps earlier.
  began          step 409, the update of a parameter at transformer.h.5.mlp.c_fc.weight: update
                 ratio 0.132, 31 deviations above its median of 0.0120
  loss           5.50 at step 0, 9.08 at step 436; 5.55 is chance among 256 entries
  gradient norm  2.50 at step 0, 9.62 at step 436
  update ratio   0.132 at transformer.h.5.mlp.c_fc.weight, then 0.0100 at
                 transformer.h.4.mlp.c_fc.weight
  logit bound    233 at step 425

- no       1. Is a norm wrong?  All norms compute their specs to 1.3 machine eps.
! yes      2. Is the learning rate too high, and where?  One step changed the weight by 13.2 % of
           its rms; the usual is 1.2 %. At transformer.h.5.mlp.c_fc.weight.
! yes      3. Would clipping have held it, and at which norm?  The gradient norm rose from 0.41 to
           12.3 one step later: a limit of 1.0 would have held it.
i unknown  4. Is the initialisation off?  Step 0 was not seen: the run was resumed.

change first  1. Lower the learning rate of this weight's group by 3 or more, or lengthen the
              warm-up.
              2. Clip the gradient norm at 1.0.
confirm       Resume from step 400 with the changed rate: the update ratio stays below 0.02 past
              step 420.

x error  A1  eps is not the config's  at transformer.h.{0-1}.ln_1 and 1 more
"""

BROKEN = """\
x Non-finite values at step 0  No finding: 8 checks clean, 1 not checked.
  began          step 0, NaN or infinity in the forward pass at transformer.h.0.ln_1: 4,096 of 4,096
                 outputs are NaN; every input is finite
  loss           NaN at step 0; 5.55 is chance among 256 entries
  gradient norm  NaN at step 0
  logit bound    NaN at step 0

! yes      1. Is a norm wrong?  No number was finite.
"""

BARE = """\
- No step was seen  No finding: 8 checks clean, 1 not checked.

norms        13 LayerNorm, eps 1e-5
"""

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


def test_a_healthy_model(healthy):
    assert shown(summary(healthy)) == HEALTHY


def test_findings_stand_before_the_table_on_one_screen(faulty):
    lines = shown(summary(faulty))
    assert len(lines.splitlines()) <= 46
    assert FINDINGS in lines
    assert lines.index("x error") < lines.index("transformer.h.5.ln_2  LayerNorm, eps 1e-5   pre")
    assert "3 of 13 LayerNorm, eps 0.001: y = weight * (x - mean(x)) / sqrt(var(x) + 0.001) + bias\n" in lines


@pytest.mark.slow
def test_rows_of_a_long_model_are_merged_or_counted_past_a_screen(long):
    lines = shown(summary(long))
    assert LONG in lines
    assert len(lines.splitlines()) <= 25
    # Without blocks no rows can be merged.
    lines = shown(summary(dataclasses.replace(long, blocks=())))
    assert "and 185 rows more\n" in lines
    assert "transformer.h.7.ln_2 " in lines
    assert "transformer.h.8.ln_1 " not in lines


def watched(inspection, kind):
    return dataclasses.replace(inspection, training=kind(inspection))


def test_a_run_stands_first_with_its_answers(faulty):
    shorter = dataclasses.replace(faulty, findings=faulty.findings[:1])
    lines = shown(summary(watched(shorter, imagined_runs.spike)))
    assert RUN in lines
    assert "\nwatch       observer verified: 3 known shards" in lines
    assert len(lines.splitlines()) <= 48
    assert max(map(len, lines.splitlines())) <= 100


def test_runs_without_findings(healthy):
    assert BROKEN in shown(summary(watched(healthy, imagined_runs.broken)))
    bare = shown(summary(watched(healthy, imagined_runs.bare)))
    assert BARE in bare
    assert "\nnot watched  Registered after torch.compile: the hooks were ignored;" in bare
    calm = shown(summary(watched(healthy, imagined_runs.calm)))
    assert "+ No fault found  13 norms looked at: " in calm
    assert "\n+ Ran to its end, step 436  437 steps seen" in calm
    assert "\n+ no  4. Is the initialisation off?  The first loss, 5.50, is that of chance, 5.55.\n" in calm
    assert len(calm.splitlines()) <= 30


def test_a_long_path_is_broken_after_dots_and_the_table_keeps_its_width(faulty):
    sites = tuple(dataclasses.replace(s, path="model.language_model." * 4 + s.path) for s in faulty.sites)
    lines = shown(summary(dataclasses.replace(faulty, sites=sites))).splitlines()
    first = next(place for place, line in enumerate(lines) if line.endswith("1.08 to 1.72"))
    assert max(map(len, lines)) <= 100
    assert lines[first].split(maxsplit=1)[1].startswith("LayerNorm, eps 1e-5   final")
    name = [line.split(maxsplit=1)[0] for line in lines[first : first + 5]]
    assert name == ["model.language_model."] * 4 + ["transformer.ln_f"]


def test_a_model_without_norms(empty):
    assert shown(summary(empty)) == (
        "a plain network  Sequential, 331,776 parameters in float32\n"
        "the demo's own text: 2,048 tokens\n"
        "\n"
        "- No norms  This model has no normalization layer that a spec describes. 9 not checked.\n"
        "\n"
        "not checked  A1 A2 A7 B1 B5 D1 D3 E2 F1 (no norms)\n"
    )


def test_the_walk(healthy):
    assert shown(walk_table(healthy.walk)) == WALK


def test_a_pattern_chooses_the_norms_of_the_table(healthy):
    said = shown(summary(healthy, "*.3.ln_?"))
    assert re.findall(r"^transformer\S+", said, re.MULTILINE) == ["transformer.h.3.ln_1", "transformer.h.3.ln_2"]
    assert said.splitlines()[:4] == shown(summary(healthy)).splitlines()[:4]


def test_nothing_of_a_model_reaches_the_terminal_as_a_command(hostile):
    run = dataclasses.replace(hostile, training=imagined_runs.hostile(hostile, hostile.model.name))
    for renderable in (summary(hostile), summary(run), walk_table(hostile.walk)):
        lines = shown(renderable)
        assert {c for c in lines if unicodedata.category(c)[0] == "C"} == {"\n"}
        assert "[bold]markup[/bold]" in lines.replace("\n", "")


def test_a_terminal_gets_colour_unless_no_color_is_set(faulty):
    coloured, plain = (
        shown(summary(faulty), force_terminal=True, color_system="standard", _environ=environment)
        for environment in ({}, {"NO_COLOR": "1"})
    )
    assert "\x1b[1;31mx eps is not the config's, and 1 more fault\x1b[0m" in coloured
    assert "\x1b[1;31m" not in plain
    assert "\x1b[31m" not in plain


@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_number_is_there_and_no_two_names_read_alike_at_any_width(peri, width):
    # Seen on Gemma 3: at 80 columns "0.116 to…", at 100 two rows "…edforward_layernorm".
    norms = describe(peri).part("norms")
    lines = shown(Norms(norms.tables[0], norms.sections), width).split("input rms: ")[0].splitlines()
    assert max(map(len, lines)) <= width
    body = "\n".join(lines)
    keys = ("rms", "ones", "eps", "gain")
    for row in norms.tables[0].only(*keys).groups:
        for cell in row:
            for word in cell.text.split():
                assert word in {each.rstrip(",") for each in body.split()}, (cell.text, body)
    names = re.findall(r"^model\.\S+", re.sub(r"(?<=\}\.)( [^\n]*)?\n", "", body), re.MULTILINE)
    assert set(names) == {row[0].text for row in norms.tables[0].groups}


def test_names_get_the_room_of_roles_where_a_terminal_is_narrow(healthy):
    """Names of Swin were broken in the middle of a word, beside a column of roles."""
    paths = [
        f"swin.encoder.layers.{i // 4}.blocks.{i // 2 % 2}.layernorm_before_attention_of_all_tokens_{i % 2}"
        for i in range(8)
    ]
    sites = (dataclasses.replace(site, path=path) for site, path in zip(healthy.sites, paths, strict=False))
    norms = describe(dataclasses.replace(healthy, sites=tuple(sites))).part("norms")
    narrow, wide = (shown(Norms(norms.tables[0], norms.sections), width) for width in (80, 140))
    assert ("role" in narrow, "role" in wide) == (False, True)
    # Names that do not fit are broken after dots.
    rows = [line.split()[0] for line in narrow.splitlines()[3:5]]
    assert rows == ["swin.encoder.layers.0.blocks.0.", "layernorm_before_attention_of_all_tokens_0"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_walk_keeps_its_numbers_in_a_narrow_terminal(healthy, width):
    lines = shown(walk_table(healthy.walk), width)
    assert max(map(len, lines.splitlines())) <= width
    for stage in describe(healthy).part("walk").sections:
        row = next(line for line in lines.splitlines() if line.startswith(stage.title))
        assert [fact.value in row.split() for fact in stage.facts] == [True] * 4
    assert "length sqrt(n): on the" in lines


def test_the_verdict_the_facts_the_findings_and_the_table_in_a_fence(faulty):
    said = markdown(faulty, ORIGIN)
    assert said.startswith(FAULTY)
    assert said.endswith(f"```\n\n6 checks clean, 1 not checked; the demo's own text: 2,048 tokens\n\n{ORIGIN}\n")
    assert "transformer.h.0.ln_1  LayerNorm, eps 0.001  pre        0.120   0.40 %     3.3 %" in said
    assert len(said.splitlines()) < 45


def test_a_long_model_stays_short_and_a_model_without_norms_needs_no_table(long, empty):
    assert len(markdown(long, ORIGIN).splitlines()) < 30
    assert "```" not in markdown(empty, ORIGIN)


def test_a_finding_leads_to_the_page_of_its_rule_and_those_past_a_few_are_counted(faulty):
    first = dataclasses.replace(faulty.findings[0], page="https://example.org/A1.html")
    said = markdown(dataclasses.replace(faulty, findings=(first, faulty.findings[1]) * 6), ORIGIN)
    assert "- error **[A1](https://example.org/A1.html)** eps is not the config's" in said
    assert said.count("**F1**") == 4
    assert "- and 4 more\n" in said


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


def test_a_note_is_short_and_its_rule_has_the_rest(faulty):
    notes = tuple(dataclasses.replace(each, severity="note") for each in faulty.findings)
    text = shown(summary(dataclasses.replace(faulty, findings=notes)))
    assert "i note  A1  eps is not the config's  at transformer.h.{0-1}.ln_1 and 1 more" in text
    assert "  do        Set eps to 1e-5 where the norms are built." in text
    assert "normkit rule A1 says why, and where the limit comes from" in text
    assert not any(word in text for word in ("  why", "  confirm", "Look for a default"))

"""The report: it says what the files say, it stands alone, and it executes nothing."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jppo.report import write_report
from jppo.report.figures import smooth, thin

EVIL = "<script>alert(1)</script> & \"'><img src=http://x.example/i onerror=f()>"
SUMMARY = {
    "before": {"reward": -0.5, "reward_se": 0.02, "gold": 0.25, "kl": 0.0},
    "after": {"reward": 1.5, "reward_se": 0.03, "gold": 0.125, "kl": 8.0},
    "reward_model": {"pair_accuracy": 0.842, "tfidf_pair_accuracy": 0.791, "pairs": 54},
    "seconds": {"generate": 40.0, "update": 25.0, "total": 70.0},
}


def step(t, **extra):
    names = "scores gold kl entropy lengths rewards value_loss approx_kl approx_kl_k3"
    names += " clip_frac explained_variance stopped_frac seconds tokens_per_second"
    names += " grad_norm_actor grad_norm_critic ratio_max"
    return {"step": t, **{k: 0.1 * t for k in names.split()}, "beta": 0.05} | extra


def make_run(folder, *, rows=None, samples=None, summary=None, config=None):
    folder.mkdir(exist_ok=True)
    rows = [step(t) for t in range(1, 6)] if rows is None else rows
    for name, lines in (("metrics", rows), ("samples", samples)):
        if lines is not None:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(text)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return write_report(folder)


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of style, by section."""

    VOID = {"meta", "link"}

    def __init__(self, path):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        assert self.open == [], "a tag was left open"
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def titles(self, level="h3"):
        return re.findall(f"<{level}>(.*?)</{level}>", self.source)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "films & <b>"
    samples = [
        {"step": 0, "prompt": "one", "completion": "old one", "score": -1.5},
        {"step": 0, "prompt": EVIL, "completion": EVIL, "score": 0.5, "gold": 0.25},
        {"step": 3, "prompt": "one", "completion": "between", "score": 0.0},
        {"step": 5, "prompt": EVIL, "completion": "new evil", "score": 0.75},
        {"step": 5, "prompt": "one", "completion": "new one", "score": 2.5},
    ]
    path = make_run(folder, samples=samples, summary=SUMMARY, config=f"# {EVIL}\n")
    assert path == folder / "report.html"
    assert [p.name for p in folder.iterdir() if p.suffix == ".tmp"] == []
    return Page(path)


def test_the_lead_tells_the_numbers(full):
    assert "Over 5 steps the mean reward rose from −0.500 to 1.50 ." in full.text
    assert "never trained, fell from 0.250 to 0.125 ." in full.text
    assert "ended 8.00 nats of KL" in full.text
    assert "learnt the reward model rather than the task" in full.text


def test_before_and_after_stand_in_a_table(full):
    assert "Reward what the policy was trained on -0.500".replace("-", "−") in full.text
    assert "−0.500 ± 0.020 1.50 ± 0.030 +2.00" in full.text
    assert "0.250 0.125 −0.125" in full.text
    assert "Length" not in full.text.split("Curves")[0]  # not in this summary


def test_the_reward_model_stands_beside_its_yardstick(full):
    head = full.text.split("Curves")[0]
    assert "This reward model 84.2 %" in head
    assert "TF-IDF yardstick 79.1 %" in head
    assert "pairs 54" in head
    assert "width:84.2%" in full.source and "width:79.1%" in full.source


def test_every_plot_is_there_with_its_axes_and_words(full):
    plots = full.titles()[2:]
    assert plots == [
        "Reward", "What the reward cost in KL", "Gold against reward",
        "Distance from the reference", "Entropy", "Size of the update", "Critic",
        "Completions", "Gradients", "Speed", "Where the time went",
    ]  # fmt: skip
    assert full.source.count("<svg") == full.source.count('class="here"') == len(plots)
    for label in ("KL from the reference, nats a sequence", "step", "seconds"):
        assert label in full.text
    assert "correlation over steps r = 1.00" in full.text
    assert "70.0 s in all" in full.text
    assert "clip_frac 10.0 → 50.0 %" in full.text


def test_samples_are_joined_by_prompt_from_first_to_last_step(full):
    samples = full.text.split("Samples")[1].split("Config")[0]
    one, evil = samples.split(EVIL, 1)
    assert "one step 0 score −1.50 old one step 5 score 2.50 new one" in one
    assert "score 0.500 gold 0.250" in evil and "score 0.750 new evil" in evil
    assert "between" not in samples


def test_what_a_model_wrote_is_inert(full):
    tags = {tag for tag, _ in full.tags}
    assert not tags & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert not [a for _, attrs in full.tags for a in attrs if a.startswith("on")]
    assert full.text.count(EVIL) == 3  # prompt, completion, config: as text
    assert full.titles("h1") == ["films &amp; &lt;b&gt;"]
    policy = [a for _, a in full.tags if a.get("http-equiv")][0]["content"]
    assert policy.startswith("default-src 'none'") and "script" not in policy


def test_the_page_stands_alone(full):
    for _, attrs in full.tags:
        for name in ("src", "href", "xlink:href", "data", "srcset", "action"):
            assert attrs.get(name, "#").startswith(("#", "data:"))
    assert set(re.findall(r"https?://[^/]*", full.source)) == {"http://x.example"}
    assert "@import" not in full.source
    assert all(u.startswith("#") for u in re.findall(r"url\((.*?)\)", full.source))


def test_plots_take_the_colours_of_the_page(full):
    svgs = "".join(re.findall(r"<svg.*?</svg>", full.source, re.DOTALL))
    used = set(re.findall(r"var\((--\w+)\)", svgs))
    assert {"--muted", "--rule", "--blue", "--gold", "--green", "--red"} <= used
    for variable in used:
        assert full.source.count(f"{variable}: #") == 2  # light and dark
    assert "#000000" not in svgs and "<text" in svgs


def test_a_run_with_nothing_but_metrics(tmp_path):
    rows = [{"step": 1, "scores": 0.5}, {"step": 2, "scores": 0.25}]
    page = Page(make_run(tmp_path / "bare", rows=rows))
    assert page.titles("h2") == ["Curves"] and page.titles() == [
        "Before and after",
        "Reward",
    ]
    assert "the mean reward fell from 0.500 to 0.250 ." in page.text
    assert "Config" not in page.text and "gold" not in page.text.split("Curves")[0]


@pytest.mark.parametrize("rows", [[], [{"step": 1, "note": "text", "kl": None}]])
def test_a_run_without_numbers_still_has_a_page(tmp_path, rows):
    page = Page(make_run(tmp_path / "empty", rows=rows, samples=[], summary=[]))
    assert page.titles() == [] and "<svg" not in page.source


def test_a_missing_metrics_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        write_report(tmp_path)


def test_gaps_and_skipped_steps_are_shown(tmp_path):
    rows = [{"step": t, "scores": t / 2, "kl": 1.0 * t} for t in (1, 2, 3)]
    rows[1] |= {"scores": None, "kl": None, "skipped": 1}
    rows += [{"step": 4, "skipped": 2}, {"step": 4, "eval/extra": 1.0}]
    page = Page(make_run(tmp_path / "gaps", rows=rows))
    assert "3 optimizer steps were skipped" in page.text
    assert "nan" not in page.source.lower().split("<style>")[1]


def test_metrics_that_never_share_a_line_are_not_plotted_together(tmp_path):
    rows = [{"step": 1, name: 0.5} for name in ("scores", "kl", "gold")]
    page = Page(make_run(tmp_path / "apart", rows=rows))
    assert page.titles()[1:] == ["Reward", "Distance from the reference"]


def test_beta_is_plotted_only_if_it_changes(tmp_path):
    rows = [{"step": t, "scores": 0.5, "beta": 0.1 * t} for t in (1, 2)]
    assert "KL coefficient" in Page(make_run(tmp_path / "r", rows=rows)).titles()


def test_one_step_of_samples_and_repeated_prompts(tmp_path):
    samples = [
        {"step": 0, "prompt": "p", "completion": f"c{i}", "score": math.nan}
        for i in range(3)
    ]
    rows = [{"step": 1, "scores": 0.5}]
    page = Page(make_run(tmp_path / "a", rows=rows, samples=samples))
    assert all(f"step 0 c{i}" in page.text for i in range(3))
    late = [{"step": 9, "prompt": "p", "completion": f"d{i}"} for i in range(2)]
    page = Page(make_run(tmp_path / "a", rows=rows, samples=samples + late))
    assert "step 0 c1 step 9 d1" in page.text and "c2" not in page.text


def test_a_long_run_stays_small(tmp_path):
    rows = [step(t, scores=math.sin(t), gold=math.cos(t)) for t in range(4000)]
    text = "long \ud800 text " * 1000
    samples = [
        {"step": s, "prompt": f"p{i}", "completion": text}
        for s in (0, 9)
        for i in range(200)
    ]
    path = make_run(tmp_path / "long", rows=rows, samples=samples)
    assert path.stat().st_size < 1.5e6
    assert "24 of 200" in Page(path).text


def test_the_same_run_gives_the_same_page(tmp_path):
    rows = [{"step": t, "scores": t / 9, "kl": t / 3} for t in range(9)]
    first, again = (
        re.sub(
            "last step written .*", "", make_run(tmp_path / "r", rows=rows).read_text()
        )
        for _ in range(2)
    )
    assert first == again


def test_smoothing_is_centred_and_steps_over_gaps():
    x = np.arange(200.0)
    x[100] = np.nan
    y = smooth(x)  # over ±5
    np.testing.assert_allclose(y[5:95], x[5:95])
    assert y[0] == x[:6].mean() and y[199] == x[194:].mean()
    assert y[98] == np.nanmean(x[93:104])
    np.testing.assert_array_equal(smooth(x[:10]), x[:10])
    kept = thin(np.arange(4001))
    assert len(kept) == 500 and kept[0] == 0 and kept[-1] == 4000

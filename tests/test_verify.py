"""`turboquant verify`: the verdict, what is printed, the HTML page, and what is refused; on figures made by hand."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from turboquant.cli import app, report, verify
from turboquant.integration.verify import LayerError, Limits, Report, Trial, layer_errors, outliers, recommend

ERRORS = (0.01, 0.02, 0.09, 0.02, 0.05)


def layers(errors=ERRORS):
    return tuple(LayerError(f"model.layers.{i}.attn", i, i, error, 2 * error) for i, error in enumerate(errors))


def trial(preset="k4v4", size=260.0, kld=0.01, top1=0.97, skip=()):
    return Trial(preset, skip, size, 1000.0, kld, 1e-4, 0.1, top1, 500, True, layers())


def made(trials, best=None, protected=None):
    return Report("<model>", "0.0", "the package's text", 832, Limits(0.02, 0.95), trials, best, protected)


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


# ---- what is recommended ---------------------------------------------------------------------------------------
def test_the_smallest_within_the_limits_is_recommended():
    good, small, worse = trial(), trial("k3v2", 170.0), trial("k2v2", 140.0, kld=0.03)
    assert recommend([good, small, worse], Limits(0.02, 0.95)) is small
    assert recommend([good, small, worse], Limits(0.02, 0.98)) is None


def test_outliers_are_the_few_worst():
    assert [layer.index for layer in outliers(layers())] == [2, 4]
    assert [layer.index for layer in outliers(layers([0.1] * 9 + [2, 5, 3, 4, 6]))] == [10, 11, 12, 13]
    assert outliers(layers([0.1] * 4)) == []


def test_layers_are_placed_behind_those_that_stayed_native():
    pytest.importorskip("vllm")
    shadow = {"samples": 1, "mean": 0.1, "max": 0.2}
    found = {f"model.layers.{i}.attn": {"shadow_rel_error": shadow} for i in (1, 3, 4)}
    worse = {name: {"shadow_rel_error": shadow | {"mean": 0.3}} for name in found}
    errors = layer_errors([{"per_layer": found}, {"per_layer": worse}], skipped={0, 2})
    assert [(error.index, error.place, error.mean) for error in errors] == [(1, 1, 0.3), (3, 3, 0.3), (4, 4, 0.3)]


# ---- what is said ----------------------------------------------------------------------------------------------
def test_the_verdict_names_preset_layers_and_price():
    plain, protected = trial(), trial(size=400.0, kld=0.004, skip=(2, 4))
    text = "\n".join(verify.verdict(made([plain], plain, protected)))
    assert "recommended: k4v4" in text and "KLD up to 0.02 and top-1 from 95 %" in text
    assert "2, 4 (KLD 0.0100 to 0.0040, 3.85x to 2.50x)" in text and "--option skip_layers=2,4" in text
    text = "\n".join(verify.verdict(made([plain])))
    assert "none of these presets" in text and "layers to protect: none" in text


def test_a_changed_answer_in_capture_only_is_not_hidden():
    odd = Trial(**{**vars(trial()), "unchanged": False})
    assert any("capture_only changed" in line for line in verify.heading(made([odd])))


class References(HTMLParser):
    """Everything that a page loads or links to."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href")]


def test_the_page_holds_all_that_it_shows():
    pytest.importorskip("matplotlib")
    plain = trial()
    text = report.page(made([plain, trial("k2v2", 140.0, 0.05)], plain, trial(size=400.0, kld=0.004, skip=(2,))))
    references = References(text)
    assert references.tags.count("img") == len(references.found) == 2 and references.tags.count("table") == 2
    for reference in references.found:
        kind, data = reference.split(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")
    assert "&lt;model&gt;" in text and "<model>" not in text
    assert "k4v4, skip_layers=2" in text and "9.00 %" in text


# ---- the command -----------------------------------------------------------------------------------------------
@pytest.fixture
def measured(monkeypatch):
    """The command with figures of ours instead of an engine's; gives what it was asked to measure."""
    asked = []

    def measure(model, presets, limits, text, context, options):
        asked.append((model, presets, limits, text, context, options))
        trials = [trial(name) for name in presets]
        return made(trials, recommend(trials, Limits(*limits)))

    monkeypatch.setattr(verify, "measure", measure)
    return asked


def test_the_command_prints_tables_and_json(measured, tmp_path):
    (tmp_path / "text.txt").write_text("words")
    result = run("MODEL", "--preset", "k3v2", "--text", tmp_path / "text.txt", "--option", "buffer_size=64")
    assert result.exit_code == 0 and re.search(
        r"k3v2 +260 +3\.85x +0\.0100 ± 0\.0001 +0\.1000 +97\.00 % +yes", result.stdout
    )
    assert "2      9.00 %" in result.stdout
    assert measured == [("MODEL", ["k3v2"], (0.02, 0.95), "words", 832, {"buffer_size": 64})]
    found = json.loads(run("MODEL", "--json").stdout)
    assert [trial["preset"] for trial in found["trials"]] == list(verify.USUAL_PRESETS)
    assert found["trials"][0]["layers"][2]["mean"] == 0.09


def test_the_status_says_whether_a_preset_is_good_enough(measured):
    assert run("MODEL", "--preset", "k4v4").exit_code == 0
    assert run("MODEL", "--preset", "k4v4", "--max-kld", "0.005").exit_code == 1


def test_the_command_writes_a_page(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert run("MODEL", "--html", tmp_path / "page.html").exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("MODEL", "--html", tmp_path / "page.html")
    assert result.exit_code == 2 and "needs matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "k4v5"), "unknown preset 'k4v5'"),
        (("--option", "buffer_size=-1"), "buffer_size=-1"),
        (("--option", "skip_layers=1"), "--option skip_layers is chosen"),
        (("--max-kld", "much"), "--max-kld 'much'"),
        (("--min-top1", "95"), "--min-top1 '95'"),
        (("--context", "few"), "--context 'few'"),
        (("--text", "nothing.txt"), "nothing.txt"),
    ],
)
def test_the_command_refuses_what_cannot_be_meant(measured, arguments, said):
    result = run("MODEL", *arguments)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.startswith("error: ") and not measured


def test_progress_is_counted_to_its_end(capsys):
    with verify.progress_bar(3) as progress:
        for what in ("one", "two", "three"):
            progress(what)
    assert capsys.readouterr().out == ""

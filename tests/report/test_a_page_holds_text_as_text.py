"""The page's markup, policy and data without a browser; it names no folders of the machine that made it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from perturbkv.reporting.html import LIBRARIES, PLOT_CLASS, PLOT_STYLES, as_json, page
from perturbkv.reporting.page_blocks import Payload
from perturbkv.reporting.payload import payload, trace_name, without_folders
from perturbkv.trace import Trace
from tests.report.test_pages_of_traces_that_lack_parts import OPTIONAL, small, with_failures, without
from tests.support.decoded import trace_of
from tests.support.paged import configs
from tests.support.payloads import HOSTILE, small_payload

IDS = "choose verdict map scatter head prompt layers assumption budgets ablation answers".split()


class Seen(HTMLParser):
    """Tags with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and self.cdata_elem:
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)

    def content(self, name: str) -> str:
        (found,) = [one["content"] for tag, one in self.tags if tag == "meta" and one.get("http-equiv") == name]
        return str(found)


def test_every_part_has_its_id_a_title_a_sentence_and_panes() -> None:
    text = page(small_payload())
    seen = Seen(text)
    ids = [one["id"] for _, one in seen.tags if one.get("id")]
    assert [name for name in ids if name in IDS] == IDS
    assert len(ids) == len(set(ids))
    assert all(one["aria-labelledby"] in ids for _, one in seen.tags if "aria-labelledby" in one)
    assert text.count('<div class="panes"></div>') == text.count('<p class="about">') == len(IDS)
    assert seen.tags[0][0] == "html"
    assert seen.tags[0][1]["lang"] == "en"


def test_the_policy_lets_three_scripts_and_our_style_be_used_and_nothing_from_elsewhere() -> None:
    seen = Seen(page(small_payload()))
    rules = dict(rule.split(" ", 1) for rule in seen.content("Content-Security-Policy").split("; "))
    code = [text for about, text in seen.raw if about.get("type") in (None, "module")]
    assert len(code) == 1 + len(LIBRARIES) + 1
    assert rules["style-src"].split() == [source(text) for text in (code[0], *PLOT_STYLES)]
    assert rules["script-src"].split() == [source(text) for text in code[1:]]
    others = {name: said for name, said in rules.items() if name not in ("style-src", "script-src")}
    assert others == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    assert "unsafe" not in str(rules)
    addresses = [one.get(name) for _, one in seen.tags for name in ("src", "href", "action", "data", "poster")]
    assert [one for one in addresses if one] == ["#main"]


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_stands_before_all_that_it_rules() -> None:
    tags = Seen(page(small_payload())).tags
    (place,) = [place for place, (_, one) in enumerate(tags) if one.get("http-equiv")]
    assert [tag for tag, _ in tags[:place]] == ["html", "head", "meta"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_from_outside_makes_no_tag_and_arrives_as_it_is(hostile: str) -> None:
    harmless, seen = Seen(page(small_payload())), Seen(page(small_payload(hostile.replace("\ud800", ""))))
    assert [tag for tag, _ in seen.tags if tag != "h2"] == [tag for tag, _ in harmless.tags if tag != "h2"]
    (data,) = [text for about, text in seen.raw if about.get("id") == "page"]
    assert json.loads(data)["traces"][0]["name"] == hostile.replace("\ud800", "")


def test_a_document_in_a_page_is_the_same_document() -> None:
    for hostile in HOSTILE:
        text = as_json({hostile: [hostile]})
        assert not re.search("[<>&\u2028\u2029\ud800]", text)
        assert json.loads(text) == {hostile: [hostile]}
        text.encode()


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page(small_payload(mean=float("nan")))


@pytest.mark.parametrize("name", ["map", "page", "a b", '"><img>', "", "é"])
def test_a_block_has_an_id_of_its_own(name: str) -> None:
    one = small_payload()
    with pytest.raises(ValueError, match="expected a block's name"):
        page(Payload(one.title, one.headers, one.document, {name: b""}))


def test_a_title_is_one_plain_line() -> None:
    for bad in ("a\nb", "\x1b[31mred", "a\u202eb"):
        with pytest.raises(ValueError, match="a title of one line"):
            Payload(bad, (), {}, {})


def test_blocks_arrive_as_they_were() -> None:
    one = small_payload()
    blocks = {"b0": bytes(range(256)), "b1": b""}
    seen = Seen(page(Payload(one.title, one.headers, one.document, blocks)))
    held = {about["id"]: text for about, text in seen.raw if about.get("type") == "application/octet-stream"}
    assert {name: base64.b64decode(text) for name, text in held.items()} == blocks


def test_the_styles_of_plot_are_those_that_it_writes() -> None:
    """Each with the name of a class in place of the variable; a browser's test holds that there are no others."""
    from perturbkv.reporting.html import _library_source

    written = re.sub(r"\$\{[a-z]+\}", "${}", _library_source("plot.min.js"))
    for style in PLOT_STYLES:
        for rule in re.findall(r"[^}]+\}", style.replace(PLOT_CLASS, "${}")):
            assert rule.strip().replace("\n", "\\n") in written or rule.strip() in written
    assert len(re.findall(r'"style"(?:,"\*")?\)\.text\(', written)) == 3


FOLDER = "/home/ada/secret place"


def of(source: str = "", reason: str = "", **run: Any) -> Trace:
    made = with_failures(small(), "p1", reason=reason) if reason else small()
    return dataclasses.replace(made, source=source, run=dataclasses.replace(made.run, **run))


@pytest.mark.parametrize("lacking", [(), OPTIONAL, ("score_full", "score"), ("answer", "answer_full")])
@pytest.mark.parametrize("one_side", [False, True])
def test_no_sentence_names_the_folder_of_trace_model_or_data(lacking: tuple[str, ...], one_side: bool) -> None:
    made = small(of=configs(1)) if one_side else small()
    run = dataclasses.replace(made.run, model=f"{FOLDER}/m.gguf", dataset=f"{FOLDER}/d.jsonl")
    trace = dataclasses.replace(without(made, *lacking), source=f"{FOLDER}/deep/trace.h5", run=run)
    text = page(payload([trace, dataclasses.replace(trace, source="/home/ada/b.h5")]))
    assert "deep/trace.h5" in text and "b.h5" in text and "m.gguf" in text and "d.jsonl" in text
    assert "/home" not in text and "ada/" not in text and "secret place" not in text


def test_sentences_name_the_file_that_a_reader_is_told_of() -> None:
    told = trace_of(payload([of("/home/ada/needle/trace.h5")]))
    assert told["name"] == "needle/trace.h5" and dict(told["facts"])["Trace"] == "needle/trace.h5"
    assert " needle/trace.h5" in told["lacks"]["steps"] and "/home" not in told["lacks"]["steps"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/a/b/news.h5", "news.h5"),
        ("/a/b/trace.h5", "b/trace.h5"),
        ("/a/b/../c/trace.h5", "c/trace.h5"),
        ("/trace.h5", "trace.h5"),
        ("/a/\u202eb/trace.h5", "\\u202eb/trace.h5"),
        ("", "in memory"),
    ],
)
def test_a_trace_of_the_usual_name_has_its_folder_before_it(source: str, name: str) -> None:
    assert trace_name(of(source)) == name
    assert trace_name(of(without_folders(of(source)).source)) == name or source == "/trace.h5"


def test_a_trace_in_the_working_folder_has_that_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needle").mkdir()
    monkeypatch.chdir(tmp_path / "needle")
    assert trace_name(of("trace.h5")) == "needle/trace.h5"
    assert trace_name(of("../trace.h5")) == f"{tmp_path.name}/trace.h5"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("clients/acme/model", "model"), ("acme/secret.jsonl", "secret.jsonl"), (r"acme\m", "m"),
        ("needle", "needle"), ("/root/models/m/", "m"), ("~/m.gguf", "m.gguf"),
        ("../up/m", "m"), (r"C:\Users\ada\m.gguf", "m.gguf"), (r"\\host\share\m", "m"), ("/", "/"),
        ("<script>", "<script>"), ("__proto__", "__proto__"), ("ruler:vt", "ruler:vt"),
    ],
)  # fmt: skip
def test_models_and_data_that_are_files_are_told_by_their_names(given: str, shown: str) -> None:
    found = without_folders(of(model=given, dataset=given)).run
    assert (found.model, found.dataset) == (shown, shown)


@pytest.mark.parametrize(
    ("model", "revision", "shown"),
    [
        ("org/model", "0123456789" * 4, "org/model"),
        ("org/model:sub/m.gguf", "sha256:0123456789abcdef", "org/model:sub/m.gguf"),
        ("acme/model", "sha256:0123456789abcdef", "model"),
        ("acme/model", "", "model"),
        ("/home/model", "0123456789" * 4, "model"),
    ],
)
def test_a_model_of_the_hub_keeps_its_owner_and_a_folder_does_not(model: str, revision: str, shown: str) -> None:
    assert without_folders(of(model=model, revision=revision)).run.model == shown


def test_reasons_do_not_name_the_folders_of_the_runs_data() -> None:
    made = of(reason="acme/secret.jsonl, line 3: no text", dataset="acme/secret.jsonl")
    assert without_folders(made).failures == {"p1": "secret.jsonl, line 3: no text"}


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("cannot read '/home/ada/x/d.jsonl': no file", "cannot read 'd.jsonl': no file"),
        ("cannot read '/home/ada/my texts/d.jsonl'", "cannot read 'd.jsonl'"),
        ("File /usr/lib/a.py, line 3", "File a.py, line 3"),
        ("of file:///home/ada/a.h5 (/home/ada/b.h5)", "of file://a.h5 (b.h5)"),
        (r"open C:\Users\ada\d.bin failed", "open d.bin failed"),
        ("in ~/runs/a.h5 and ../b/c.h5", "in a.h5 and c.h5"),
        ("1/2/3 of 4/5, N/A; see https://a.org/b/c", "1/2/3 of 4/5, N/A; see https://a.org/b/c"),
        ("</script><img src=x onerror=alert(1)>", "</script><img src=x onerror=alert(1)>"),
    ],
)
def test_reasons_of_failures_name_files_alone(reason: str, shown: str) -> None:
    assert without_folders(of(reason=reason)).failures == {"p1": shown}

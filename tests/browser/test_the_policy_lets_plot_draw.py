"""Under the page's policy Plot draws whole, and nothing else that is inline is used; checked where it is enforced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perturbkv.reporting.html import page
from tests.support.payloads import reported

Open = Callable[..., Any]
DATA = "[{x: 1, y: 2, v: -1}, {x: 2, y: 1, v: 2}]"
GRADIENT = """() => {
  const made = d3.create("svg:linearGradient").attr("id", "gradient");
  made.append("stop").attr("stop-color", "red");
  return made.node();
}"""
DRAWN = {
    "points with tips": f"Plot.plot({{marks: [Plot.dot({DATA}, {{x: 'x', y: 'y', tip: true}})]}})",
    "cells with a ramp": f"Plot.plot({{color: {{type: 'diverging', legend: true}}, marks: [Plot.cell({DATA},"
    " {x: 'x', y: 'y', fill: 'v'})]})",
    "a threshold legend": "Plot.legend({color: {type: 'threshold', domain: [1, 2], range: ['red', 'blue', 'green']}})",
    "swatches": "Plot.legend({color: {type: 'categorical', domain: ['a', 'b']}})",
    "swatches in columns": "Plot.legend({color: {type: 'categorical', domain: ['a', 'b']}, columns: '2'})",
    "symbols": "Plot.legend({symbol: {domain: ['a', 'b']}})",
    "opacities": "Plot.legend({opacity: {domain: [0, 1]}, color: 'red'})",
    "a gradient": f"Plot.plot({{marks: [{GRADIENT}, Plot.areaY([1, 2, 3], {{fill: 'url(#gradient)', clip: true}})]}})",
    "a title, lines and markers": "Plot.plot({title: 't', caption: 'c', style: {fontSize: '20px'}, marks:"
    " [Plot.lineY([1, 2], {marker: 'circle', mixBlendMode: 'multiply'}), Plot.crosshair([{a: 1}], {x: 'a'})]})",
}


@pytest.mark.parametrize("asked", DRAWN.values(), ids=list(DRAWN))
def test_plot_draws_whole(opened: Open, asked: str) -> None:
    shown = opened(page(reported()))
    shown.ready()
    put = "drawn.id = 'drawn'; document.querySelector('#verdict .panes').append(drawn);"
    shown.page.evaluate(f"() => {{ const drawn = {asked}; {put} }}")
    shown.page.locator("#drawn").hover()
    assert shown.quiet()


REFUSED = {
    "a style attribute": "document.body.setAttribute('style', 'color: red')",
    "Plot with a class of its own": "document.body.append(Plot.plot({className: 'own', marks: [Plot.dot([1])]}))",
    "a style of others": "document.head.append(Object.assign(document.createElement('style'), {textContent: 'p {}'}))",
    "a script of others": "document.head.append(Object.assign(document.createElement('script'), {text: 'alert(1)'}))",
    "an event's attribute": "document.body.setAttribute('onclick', 'alert(1)'); document.body.click()",
    "a picture from elsewhere": "new Image().src = 'https://example.org/x.png'",
    "data from elsewhere": "fetch('https://example.org/x.json').catch(() => 0)",
    "a frame": "document.body.append(Object.assign(document.createElement('iframe'), {src: 'https://example.org'}))",
}


@pytest.mark.parametrize("planted", REFUSED.values(), ids=list(REFUSED))
def test_what_is_planted_is_refused(opened: Open, planted: str) -> None:
    shown = opened(page(reported()))
    shown.ready()
    shown.page.evaluate(f"() => {{ {planted} }}")
    assert shown.soon(lambda: shown.violations() != [])
    assert not shown.quiet()


@pytest.mark.parametrize(("name", "there"), [("eval", "eval('1')"), ("Function", "new Function('return 1')()")])
def test_no_text_becomes_code(opened: Open, name: str, there: str) -> None:
    shown = opened(page(reported()))
    shown.ready()
    shown.page.evaluate(f"() => setTimeout(() => {{ {there} }})")
    assert shown.soon(lambda: any("unsafe-eval" in one for one in shown.errors))


def test_the_page_needs_no_style_attribute_at_first(opened: Open) -> None:
    shown = opened(page(reported()))
    shown.ready()
    assert shown.quiet()

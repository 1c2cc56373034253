"""A page's blocks as NumPy arrays, read as a browser reads them: from what the document says, not by the library."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np

from perturbkv.reporting.page_blocks import Payload


def trace_of(made: Payload, place: int = 0) -> dict[str, Any]:
    """One trace's object, as JSON hands it over: NaN would not pass."""
    found: dict[str, Any] = json.loads(json.dumps(made.document, allow_nan=False))["traces"][place]
    return found


def inflated(made: Payload, block: str) -> bytes:
    return zlib.decompress(made.blocks[block], -15)


def array(made: Payload, name: str, place: int = 0) -> Any:
    """An array by its name, quantised ones as the numbers that they stand for."""
    told = trace_of(made, place)["arrays"][name]
    width = int(told["dtype"][1])
    raw = np.frombuffer(inflated(made, told["block"]), dtype=np.uint8)
    if told["shuffled"]:
        raw = np.ascontiguousarray(raw.reshape(width, -1).T).reshape(-1)
    if name == "verdict":
        return verdicts(raw, tuple(told["shape"]))
    flat = raw.view({"u1": "u1", "u2": "<u2", "f4": "<f4"}[told["dtype"]]).reshape(told["shape"])
    if told["scale"] is None:
        return flat.astype(np.float64)
    return np.stack([numbers(part, scale) for part, scale in zip(flat, told["scale"], strict=True)])


def numbers(codes: Any, scale: dict[str, Any]) -> Any:
    """Numbers from codes of two bytes."""
    told = codes.astype(np.float64)
    if scale["kind"] == "log":
        found = np.where(codes == 0, 0.0, np.exp(scale["low"] + (told - 1) * scale["step"]))
    else:
        found = scale["low"] + told * scale["step"]
    return np.where(codes == 65535, np.inf, np.where(codes == 65534, np.nan, found))


def verdicts(raw: Any, shape: tuple[int, ...]) -> Any:
    """1 better, 0 tied, −1 worse, from four of them in a byte."""
    every = [byte >> shift & 3 for byte in raw.tolist() for shift in (0, 2, 4, 6)][: int(np.prod(shape))]
    return np.array([0, 1, -1])[every].reshape(shape)


def text(made: Payload, sample: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inflated(made, trace_of(made)["prompts"][str(sample)]["text"]))
    return found


def shares(made: Payload, sample: int = 0) -> Any:
    """(config, token) of the heads that keep a token."""
    told = trace_of(made)
    raw = np.frombuffer(inflated(made, told["prompts"][str(sample)]["share"]), dtype=np.uint8)
    return raw.reshape(len(told["configs"]), -1) / 255


def bundle(made: Payload, sample: int, layer: int, head: int) -> dict[str, Any]:
    """One head of a sample: its kept positions by configuration, its losses, its attention."""
    told = trace_of(made)
    prompt, tokens = told["prompts"][str(sample)], told["samples"][sample]["tokens"]
    rank = prompt["held"].index(layer * told["heads"] + head)
    begin, end = ([0, *prompt["ends"]][rank], prompt["ends"][rank])
    raw = zlib.decompress(made.blocks[prompt["heads"]][begin:end], -15)
    configs, width, listed = len(told["configs"]), -(-tokens // 8), told["losses"]
    masks, before, at = [], bytes(width), 0
    for _ in range(configs):
        before = bytes(one ^ other for one, other in zip(raw[at : at + width], before, strict=True))
        masks.append([place for place in range(tokens) if before[place // 8] >> place % 8 & 1])
        at += width
    found: dict[str, Any] = {"kept": masks}
    if listed:
        found["lost"] = np.frombuffer(raw, "<i4", configs * listed, at).reshape(configs, listed)
        at += 4 * configs * listed
        codes = np.frombuffer(raw, "<u2", configs * listed, at).reshape(configs, listed).astype(float)
        found["share"] = np.where(codes == 0, 0, np.exp((codes - 65535) * 0.0005))
        at += 2 * configs * listed
    if len(raw) > at:
        codes = np.frombuffer(raw, np.uint8, tokens, at).astype(float)
        found["attention"] = np.where(codes == 0, 0, np.exp((codes - 255) * 0.08))
        at += tokens
    assert at == len(raw)
    return found

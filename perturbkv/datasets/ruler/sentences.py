"""Sentences of essays by nltk's tokenizer, whose data is a download that only its user makes."""

from __future__ import annotations

from typing import cast

from perturbkv.errors import DatasetError


def sentences(text: str) -> list[str]:
    """In place of `nltk.sent_tokenize`, imported when it is needed. Raises DatasetError where nltk lacks its data."""
    import nltk

    try:
        return cast("list[str]", nltk.sent_tokenize(text))
    except LookupError:
        msg = (
            "RULER's essays are split into sentences by nltk, which lacks its punkt_tab; bring it with "
            "`python -m nltk.downloader punkt_tab`, or name the folder that holds `tokenizers/punkt_tab` in NLTK_DATA"
        )
        raise DatasetError(msg) from None

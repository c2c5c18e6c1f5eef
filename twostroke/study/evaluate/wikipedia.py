"""Prose of English Wikipedia of 2016, from the pages that the Python package gensim ships for its own tests."""

import bz2
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from twostroke.models.checkpoints.catalog import CatalogEntry
from twostroke.models.checkpoints.fetch import fetch

# Fetched, verified and stored like a model of the catalog.
SOURCE = CatalogEntry(
    name="wikipedia-sample",
    description="106 pages of English Wikipedia",
    chat=False,
    licence="CC BY-SA 3.0",
    file="enwiki.xml.bz2",
    size=1_695_871,
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    packages=("gensim==4.4.0",),
    member=r"test_data/enwiki-latest-pages-articles1.*\.bz2$",
)
TITLE, TEXT = (f"{{http://www.mediawiki.org/xml/export-0.10/}}{one}" for one in ("title", "text"))

# Patterns of wikitext and their replacements, applied in this order. Nested markup is removed from the inside out.
MARKUP = (
    (r"(?s)<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>", ""),
    (r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", ""),  # templates and tables
    (r"\[\[(?!File:|Image:|Category:)(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1"),  # [[page|words]]
    (r"\[\[[^\[\]]*\]\]", ""),
    (r"\[https?://\S+ ?([^\]]*)\]", r"\1"),
    (r"'{2,}", ""),
    (r"&nbsp;", " "),
    (r" ?\([\s,;]*\)", ""),  # the brackets of a template that is gone
)
PROSE = re.compile(r"(?m)^[A-Z][^{}\[\]|<>=*#\n]{200,}$")  # a paragraph, not a heading, a list or leftover markup


def titled() -> Iterator[tuple[str, list[str]]]:
    """The title and the paragraphs of prose of each article that has any."""
    title = ""
    with bz2.open(fetch(SOURCE)) as stream:
        for _, element in ElementTree.iterparse(stream):
            title = element.text or "" if element.tag == TITLE else title
            if element.tag == TEXT and (paragraphs := PROSE.findall(plain(element.text or ""))):
                yield title, [paragraph.strip() for paragraph in paragraphs]
            element.clear()


def articles() -> Iterator[str]:
    """The prose of each article that has any, with a blank line between paragraphs."""
    return ("\n\n".join(paragraphs) for _, paragraphs in titled())


def plain(text: str) -> str:
    """Strip templates, references, tables and link targets."""
    for pattern, words in MARKUP:
        found = 1
        while found:
            text, found = re.subn(pattern, words, text)
    return text

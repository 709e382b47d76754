"""Updating a README.md in parts: merging an existing one with a newer one, or marking it outdated.

A card is a dict of parts: keys of its front matter ("license:"), the introduction ("") and
sections ("## Use"). An HTML comment at the end has a digest of each part as `vit` wrote it, so that
a later card replaces the parts that are unchanged and keeps those that a person has edited.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from typing import NamedTuple

from vitcli.config import Size
from vitcli.typed_json import parse

LICENSE, METRICS = "license:", "## Metrics"
"""Parts that a merge treats specially."""
_NOTE = "> Not the model that was measured:"


class Card(NamedTuple):
    """The parts of a README.md, and the digests of those that `vit` wrote; `str` joins them."""

    parts: dict[str, str]
    digests: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Card:
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        # Patterns that take linear time, whatever the card of another person contains.
        start = text.rfind("<!-- vit: ")
        comment = re.match(r"<!-- vit: (\{[^\n]*\}) -->\s*", text[start:])
        if comment:  # a person may have added text below it
            text = (text[:start] + text[start + comment.end() :]).rstrip("\n")
        front_matter = re.match(r"---[ \t]*\n(.*?\n)??---[ \t]*(\n|$)", text, re.DOTALL)
        # The name and link of a license belong to it.
        keys = r"((?!license_)[\w-]+:)"
        parts = _split_parts(front_matter[1] or "" if front_matter else "", keys, "#")
        parts |= _split_parts(text[front_matter.end() if front_matter else 0 :], r"(## .*\S)", "")
        try:
            recorded = dict(parse(comment[1])) if comment else {}
        except ValueError:
            recorded = {}
        digests = {k if _is_front_matter(k) or not k else f"## {k}": v for k, v in recorded.items()}
        return cls({key: text for key, text in parts.items() if text.strip()}, digests)

    def __str__(self) -> str:
        front_matter = [text for key, text in self.parts.items() if _is_front_matter(key)]
        body = [text.strip("\n") for key, text in self.parts.items() if not _is_front_matter(key)]
        head = "\n".join(["---", *front_matter, "---", "", ""]) if front_matter else ""
        digests = {key.removeprefix("## "): digest for key, digest in self.digests.items()}
        comment = [f"<!-- vit: {json.dumps(digests)} -->"] if digests else []
        return head + "\n\n".join([*body, *comment]) + "\n"

    @property
    def license(self) -> str | None:
        text = self.parts.get(LICENSE, "").removeprefix(LICENSE).partition("\nlicense_")[0]
        return text.strip(" \"'\n") or None

    @property
    def is_ours(self) -> bool:
        """Whether `vit` wrote the card, even if a person has edited it since."""
        tags = self.parts.get("tags:", "")
        return bool(self.digests or re.search(r"^ *- vitcli$", tags, re.MULTILINE))

    def edited(self) -> list[str]:
        """The parts that a person added or changed; all of them if there are no digests."""
        return [k for k, text in self.parts.items() if digest(text) != self.digests.get(k)]

    def merged_with(
        self, old: Card, keep: Collection[str] = (), replace: Collection[str] = ()
    ) -> Card:
        """Return this card with a person's edits of an older one.

        Args:
            keep: parts to take from the older card, edited or not.
            replace: parts to take from this card, edited or not.
        """
        parts, digests, edited = {}, dict(self.digests), set(old.edited()) - set(replace)
        for key, text in old.parts.items():
            if key in edited or key in keep:
                parts[key] = text
                if key not in edited or key in old.digests:
                    digests[key] = old.digests[key] if key in edited else digest(text)
            elif key in self.parts:
                parts[key] = self.parts[key]
        for key, text in self.parts.items():
            if key in parts:
                continue
            if key in old.digests and key not in replace:  # a person removed it
                digests[key] = old.digests[key]
            else:
                parts[key] = text
        return Card(parts, digests)


def _split_parts(text: str, heading: str, first: str) -> dict[str, str]:
    """Split a text at lines that match `heading` for the first time, outside code; before them, the
    part is `first`."""
    parts: dict[str, list[str]] = {first: []}
    key, in_code = first, False
    for line in text.removesuffix("\n").split("\n"):
        in_code ^= line.startswith(("```", "~~~"))
        match = None if in_code else re.match(heading, line)
        if match and match[1] not in parts:
            key = match[1]
        parts.setdefault(key, []).append(line)
    return {key: "\n".join(lines) for key, lines in parts.items()}


def _is_front_matter(key: str) -> bool:
    return key == "#" or key.endswith(":") and not key.startswith("## ")


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def images_in(text: str) -> list[str]:
    """The image files beside a card that it shows."""
    files = re.findall(r"!\[[^\[\]]*\]\(([\w.-]+\.(?:png|jpe?g|svg))\)", text)
    return list(dict.fromkeys(files))


def mark_resized(text: str, old: Size, new: Size) -> str:
    """Update the card, by any author, of a model that was resized without further training: metrics
    that can be recognized (the Hub's `model-index`, our section) are removed, and a note says which
    image size the rest describes."""
    card = Card.parse(text)
    measured = {"model-index:", *([METRICS] if card.is_ours else [])}
    parts = {key: part for key, part in card.parts.items() if key not in measured}
    body = parts.pop("", "").strip("\n")
    if earlier := re.search(rf"(?m)^{_NOTE}.*about images of (\d{{1,6}}) x (\d{{1,6}}) ", body):
        old = int(earlier[1]), int(earlier[2])  # resized before: the card still describes that size
    note = (
        f"{_NOTE} its position embeddings were resized for images of {new[0]} x {new[1]} pixels "
        f"without further training. What this card says about images of {old[0]} x {old[1]} "
        "pixels, and all metrics in it, describe the model before it was resized."
    )
    body = re.sub(rf"{_NOTE}.*\n*", "", body)
    return str(Card({"": f"{note}\n\n{body}", **parts}, card.digests))

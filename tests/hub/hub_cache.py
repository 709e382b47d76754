"""A cache of the Hub's, made by hand as the real client lays it out."""

from __future__ import annotations

import hashlib
from pathlib import Path

COMMIT = "c" * 40


def keep(root: Path, repo: str, files: dict[str, bytes], kind: str = "models") -> Path:
    """Puts a repo's files there, of one commit that is `main`; returns the snapshot."""
    folder = root / f"{kind}--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for part in (folder / "refs", folder / "blobs", snapshot):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot

"""The documentation as a site: pages link to files of the repository beside `docs/`; on the site those lie beside the pages.

mkdocs calls these (`hooks` in mkdocs.yml). `mkdocs serve` shows the site, `mkdocs build --strict` builds it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: A link that leaves `docs/`: its words, its path, its anchor.
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside `docs/` that its pages link to."""
    from mkdocs.structure.files import File

    wanted = {m[2] for page in files.documentation_pages() for m in OUTSIDE.finditer(page.content_string)}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where the files lie on the site; a link to a folder becomes its words."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")

    def link(match: re.Match[str]) -> str:
        words, path, anchor = match.groups()
        return f"[{words}]({path}{anchor or ''})" if (ROOT / path).is_file() else words

    return OUTSIDE.sub(link, markdown)

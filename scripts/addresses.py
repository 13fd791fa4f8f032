#!/usr/bin/env python3
"""Makes links of a source tree lead to the repository, for the package's page on an index: README.md and the metadata.

  python scripts/addresses.py TREE

The repository's address stands in one place, `url` in setup.cfg's [metadata]. The README's links are paths, which an index
cannot follow; in TREE, a copy that is about to be built, they become <url>/blob/v<version>/<path> (pictures: raw), the line
that clones gets the address, and setup.cfg gets `project_urls`. Without an address nothing is changed, and that is said. scripts/release.sh calls it.
"""

from __future__ import annotations

import argparse
import configparser
import re
from pathlib import Path


def absolute(text: str, url: str, version: str) -> str:
    """A page of the repository's root with its relative links made absolute; code blocks and anchors stay as they are."""

    def link(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if "://" in path or path.startswith(("#", "mailto:")):
            return match[0]
        return f"{picture}[{words}]({url}/{'raw' if picture else 'blob'}/v{version}/{path})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(
        part if i % 2 else re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, part) for i, part in enumerate(parts)
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a copy of the sources, which is changed")
    tree = parser.parse_args().tree
    setup = configparser.ConfigParser()
    setup.read(tree / "setup.cfg")
    url, version = setup["metadata"].get("url", "").rstrip("/"), setup["metadata"]["version"]
    if not url:
        print("setup.cfg has no url: the links of the package's page lead nowhere outside of the repository")
        return
    readme, config = tree / "README.md", tree / "setup.cfg"
    readme.write_text(absolute(readme.read_text(), url, version).replace("<this repository>", url))
    links = {"Changes": "CHANGELOG.md", "Documentation": "docs/README.md"}
    made = "".join(f"\n    {name} = {url}/blob/v{version}/{path}" for name, path in links.items())
    config.write_text(config.read_text().replace("[metadata]\n", f"[metadata]\nproject_urls ={made}\n", 1))
    print(f"links lead to {url}, v{version}")


if __name__ == "__main__":
    main()

"""What the documentation site shows beside ``docs/``: pages that stand elsewhere, and a page for each module.

MkDocs calls these functions (``hooks`` in mkdocs.yml). ``make docs`` builds the site for reading from the disk. A
version of it is published by ``FLY_DOCS_OFFLINE=false mike deploy --push --update-aliases VERSION latest``, which keeps
the versions before it.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

# Pages of the site that are files outside docs/.
ELSEWHERE = {"overview.md": "README.md", "changelog.md": "CHANGELOG.md", "benchmarks.md": "benchmarks/README.md"}

# The modules whose docstrings are the reference, in the order of docs/explanation/layout.md.
MODULES = [
    "fly", "fly.policies", "fly.policies.registry", "fly.drafts", "fly.drafts.base", "fly.testing", "fly.types",
    "fly.params", "fly.output", "fly.ops", "fly.cache", "fly.models", "fly.runner.request", "fly.runner.sampling",
    "fly.runner.constraints", "fly.runner.structured", "fly.runner.drafting", "fly.runner.executor",
    "fly.runner.runner", "fly.engine.step", "fly.engine.scheduler", "fly.backends.cpu", "fly.parallel", "fly.config",
    "fly.extras.eval", "fly.extras.eval.records", "fly.extras.statistics", "fly.serve", "fly.extras.train",
]  # fmt: skip

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation, from the two indexes that list every page: docs/README.md and docs/results/README.md."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, flags=re.MULTILINE | re.DOTALL))
    nav: list[dict[str, Any]] = [{"Home": ["README.md", "overview.md", "changelog.md"]}]
    nav += [{title: _list_pages(text, "")} for title, text in parts.items()]
    for part in nav:
        if "Reference" in part:
            part["Reference"].remove("results/README.md")
            part["Reference"] += [{"Modules": [{name: f"reference/modules/{name}.md"} for name in MODULES]}]
        if "Explanation" in part:
            part["Explanation"].append("benchmarks.md")
    results = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    nav.append({"Results": ["results/README.md", *_list_pages(results, "results/")]})
    config.nav = nav
    return config


def _list_pages(text: str, folder: str) -> list[Any]:
    """The pages that a text links to, in its order, each once."""
    links = re.findall(r"\]\(([\w/-]+\.md)(?:#[\w-]+)?\)", text)
    return [folder + link for link in dict.fromkeys(links)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that ``docs/`` does not hold."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for module in MODULES:
        files.append(File.generated(config, f"reference/modules/{module}.md", content=f"::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their files are on the site; a link to another file becomes its text."""
    here = page.file.src_uri
    stands = ELSEWHERE.get(here, join("docs", here))  # the page's path in the repository
    pages = {path: page for page, path in ELSEWHERE.items()}

    def lead(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = normpath(join(stands, "..", target))
        path = path + "/README.md" if (ROOT / path / "README.md").is_file() else path
        found = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if found is None or files.get_file_from_path(found) is None:
            return label[1:-1]
        return f"{label}({relpath(found, join(here, '..'))}{anchor})"

    return _LINK.sub(lead, markdown)

"""Formulas of the site: LaTeX in pages and docstrings becomes MathML, which browsers draw alone.

Lists are read as GitHub reads them. Notebooks become pages, with the outputs they are stored with.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ARITHMATEX = re.compile(
    r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL
)
MATH_BLOCK = re.compile(r"^( *)\.\. math::(.*\n?(?:\s*^\1 +\S.*\n?)*)", re.MULTILINE)
LIST_IN_PARAGRAPH = re.compile(r"^(?! *(?:[-*]|\d+\.) )(\S.*)\n(?=(?:[-*]|1\.) )", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook."""
    for path in sorted(Path(config.config_file_path).parent.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        content = "\n\n".join(part for cell in cells for part in cell_markdown(cell))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def cell_markdown(cell: dict[str, Any]) -> Iterator[str]:
    """A cell of a notebook and what it has printed or drawn."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        if "text" in output:
            yield f"```text\n{''.join(output['text'])}```"
        else:
            yield f"![Output](data:image/png;base64,{''.join(output['data']['image/png'].split())})"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let a list follow its paragraph without a blank line; link the pages of notebooks."""
    markdown = re.sub(r"\]\(\.\./(notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    parts = FENCED.split(markdown)  # code at odd places
    parts[::2] = [LIST_IN_PARAGRAPH.sub(r"\1\n\n", part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(content: str, **_: Any) -> str:
    """Replace what arithmatex has marked."""

    def mathml(match: re.Match[str]) -> str:
        block = match[1] == "["
        formula = convert(
            html.unescape(match[2]).strip(), display="block" if block else "inline"
        ).replace('<mo stretchy="false">&#x0007C;', '<mo stretchy="false" lspace="0" rspace="0">|')
        return f'<div class="formula">{formula}</div>' if block else formula

    return ARITHMATEX.sub(mathml, content)


class DollarMath(griffe.Extension):
    """Docstrings in the notation of the pages: `.. math::`, `:math:` and `Example:`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring:
            text = MATH_BLOCK.sub(lambda m: f"{m[1]}$$ {m[2].strip()} $$\n", obj.docstring.value)
            text = re.sub(r":math:`(.+?)`", r"$\1$", text, flags=re.DOTALL)
            text = re.sub(r":(?:func|class):`~?(.+?)`", r"`\1`", text)
            # griffe knows only the plural; it would read the code of another section as Markdown
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

"""What mkdocs does besides: comments of the tests are taken out of the pages."""

import re


def on_page_markdown(markdown: str, **_) -> str:
    """Without comments (`tests/doc_pages.py` says what they are for)."""
    return re.sub(r"^<!--.*?-->\n", "", markdown, flags=re.M | re.S)


def on_page_content(html: str, **_) -> str:
    """Docstrings say ``Example::``, as readers of source know it."""
    return html.replace("Example::</p>", "Example:</p>")

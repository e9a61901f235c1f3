"""Pages for a browser: one file, offline, light and dark, no script. A template, the common style sheet, and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup


def render(template: Path, **values: Any) -> str:
    """The page as text. Values are escaped unless they are Markup; a value that the template misses is an error."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    style = environment.from_string((Path(__file__).parent / "page.css.j2").read_text(encoding="utf-8")).render()
    text = template.read_text(encoding="utf-8")
    return environment.from_string(text).render(style=Markup(style), **values)

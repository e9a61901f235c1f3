"""Errors a user may see. Each message names the culprit and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TurbogrError(Exception):
    """Base of every error turbogr raises on purpose."""


class OptionError(TurbogrError):
    """An option, or its value, is not known."""


class PipelineError(TurbogrError):
    """Passes cannot be found, configured or ordered."""


class RuleError(TurbogrError):
    """A rule is ill-formed; raised where the rule is defined or first used."""


class PassError(TurbogrError):
    """A pass raised, or left a graph that does not hold its invariants."""

    def __init__(self, message: str, *, pass_name: str = "", node: str = "", line: str = "") -> None:
        super().__init__(message)
        self.pass_name, self.node, self.line = pass_name, node, line


class VerifyError(PassError):
    """The graph after a pass breaks an invariant."""


class TargetError(TurbogrError):
    """A target cannot run here; the message says what is missing."""


class ExpectationError(TurbogrError):
    """A pass fired less or more often than the user expected."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean 'x'?)' for the closest known name, or ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""

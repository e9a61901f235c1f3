"""A fixed sample of hostile programs gives what eager gives, but for those that are known to be wrong.

`known.txt` lists these by hash, with the class of the fault; the list only ever gets shorter. `python -m
tests.fuzz.test_sample` prints what the list would be today.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .generate import GENTLE, generate, words
from .judge import Verdict, judge
from .program import Program

KNOWN = Path(__file__).with_name("known.txt")
SEEDS = range(60)
EVERY = 11  # of the constructs of the vocabulary


def sample() -> Iterator[tuple[str, Program]]:
    for seed in SEEDS:
        yield f"seed {seed}", generate(seed)
    for word in words()[::EVERY]:
        yield word, generate(0, word, hostility=GENTLE)


@lru_cache(maxsize=1)
def verdicts() -> dict[str, tuple[str, Verdict]]:
    return {program.hash: (name, judge(program)) for name, program in sample()}


def known() -> dict[str, str]:
    lines = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return {line.split()[0]: line for line in lines}


def faulty(verdict: Verdict) -> bool:
    return verdict.wrong or verdict.status == "pass-error"


def test_the_sample_gives_what_eager_gives():
    found = [(name, v) for name, v in verdicts().values() if faulty(v) and v.program.hash not in known()]
    scripts = [v.program.script(f"{name}: {v.status}: {'; '.join(v.notes)[:300]}") for name, v in found[:3]]
    assert not found, "\n\n".join([f"{len(found)} programs differ: {[name for name, _ in found]}", *scripts])


def test_known_faults_are_still_there():
    """A list that names mended programs would hide them when they break again."""
    mended = [line for hash_, line in known().items() if hash_ not in verdicts() or not faulty(verdicts()[hash_][1])]
    assert not mended, "\n".join(["mended: remove from tests/fuzz/known.txt", *mended])


def test_most_of_the_sample_is_packed():
    """A generator whose programs are refused proves nothing."""
    asked = [v for _, v in verdicts().values() if v.status != "invalid"]
    assert sum(v.packed for v in asked) > 0.5 * len(asked)
    assert len(asked) > 0.9 * len(verdicts())


if __name__ == "__main__":
    for hash_, (name, verdict) in verdicts().items():
        if faulty(verdict):
            said = verdict.notes[0].splitlines()[0] if verdict.notes else ""
            print(f"{hash_} {verdict.status:10} {name:32} {said[:70]}".rstrip())

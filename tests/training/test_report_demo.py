"""The demo: ways take strict turns, and the whole of it trains, compares and writes the page."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
_spec = importlib.util.spec_from_file_location("demo", DEMO)
assert _spec and _spec.loader
demo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ways_take_turns(count):
    steps, order = 6, []
    turns = demo.Turns(threading, count, steps)

    def way(number: int) -> None:
        for step in range(1, steps + 1):
            order.append((step, number))
            turns.after_step(number, step)

    threads = [threading.Thread(target=way, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(order[:count]) == [(1, n) for n in range(count)]
    assert order[count:] == [(step, n) for step in range(2, steps + 1) for n in range(count)]


def test_too_few_steps_are_named():
    done = subprocess.run([sys.executable, str(DEMO), "--steps", "1"], capture_output=True, text=True)
    assert done.returncode == 1 and "--steps must be at least 2" in done.stderr


@pytest.mark.slow
def test_the_demo_trains_compares_and_writes_the_page(tmp_path):
    done = subprocess.run(
        [sys.executable, str(DEMO), "--steps", "6", "--out", str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout and "speed-up" in done.stdout and "pack-rows" in done.stdout
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "How far apart the curves are" in page and "recommender.py:" in page
    assert (tmp_path / "demo" / "turbogr" / "dump" / "index.html").exists()

"""expand-lookups in graphs without sharded tables; what it does to those with some is in tests/distributed."""

from __future__ import annotations

import pytest
import torch

import turbogr_compile
from turbogr_compile import Instrument, Pipeline
from turbogr_compile.errors import PipelineError


class Seen(Instrument):
    def __init__(self) -> None:
        self.pipelines: list[str] = []
        self.remarks: list[str] = []

    def finish(self, run) -> None:
        self.pipelines.append(run.pipeline.spec)
        self.remarks += [r.id for r in run.remarks]


def compiled(**options) -> Seen:
    torch._dynamo.reset()
    seen = Seen()
    step = torch.compile(lambda x: x.sin().sum(), backend="turbogr", options={"instruments": [seen], **options})
    step(torch.ones(3, requires_grad=True)).backward()
    return seen


def test_it_is_not_shown_where_no_table_is_sharded():
    assert "expand-lookups" in Pipeline.default("cpu").spec
    seen = compiled()
    assert len(seen.pipelines) >= 3 and not any("expand-lookups" in text for text in seen.pipelines)
    assert "no-lookups" not in seen.remarks


def test_who_sets_it_up_is_told():
    assert "no-lookups" in compiled(passes=["expand-lookups{staleness=1}"]).remarks


@pytest.mark.parametrize("options", ["staleness=2", "warmup=-1", "staleness=1, ahead=false"])
def test_options_that_cannot_be(options: str):
    with pytest.raises(PipelineError, match="expand-lookups"):
        turbogr_compile.Pipeline.parse(f"expand-lookups{{{options}}}")

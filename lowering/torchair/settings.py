"""`target_options` of the targets that end in GE: what torchair and GE are told beyond the graph.

    torch.compile(model, backend="turbogr", options={"target": "ascend", "target_options": {"oo_level": "O1"}})

Names are torchair's. What torchair has only for inference, or for its other mode, is refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import OptionError, did_you_mean

MODES = ("max-autotune",)
_NO_BACKWARD = "torchair's mode npugraph_ex, which captures no backward and no random numbers"


def _setting(path: str, default: Any, *takes: Any, ge: str = "") -> Any:
    """A field: where it goes in torchair's CompilerConfig, what it takes, and its key where GE fixes it for good."""
    return dataclasses.field(default=default, metadata={"path": path, "takes": takes, "ge": ge})


@dataclass(frozen=True)
class Settings:
    """None leaves a setting to torchair."""

    mode: str = _setting("mode", "max-autotune", *MODES)
    graph_dump: str | None = _setting("debug.graph_dump.type", None, "txt", "pbtxt", "py")
    graph_dump_path: str | None = _setting("debug.graph_dump.path", None, Path)
    deterministic: bool | None = _setting("", None, bool)
    enable_view_optimize: bool = _setting("", True, bool)
    pattern_fusion_pass: bool | None = _setting("experimental_config.pattern_fusion_pass", None, bool)
    topology_sorting_strategy: str | None = _setting(
        "experimental_config.topology_sorting_strategy", None, "DFS", "BFS", "RDFS", "StableRDFS"
    )
    memory_efficiency: bool | None = _setting("experimental_config.memory_efficiency", None, bool)
    tiling_schedule_optimize: bool | None = _setting("experimental_config.tiling_schedule_optimize", None, bool)
    static_model_ops_lower_limit: int | None = _setting("experimental_config.static_model_ops_lower_limit", None, int)
    multistream_parallel_mode: str | None = _setting("ge_config.multistream_parallel_mode", None, str)
    deadlock_check: bool | None = _setting("debug.deadlock_check", None, bool)
    cc_parallel_enable: bool | None = _setting(
        "experimental_config.cc_parallel_enable", None, bool, ge="ge.exec.enableEngineParallel"
    )
    enable_single_stream: bool | None = _setting(
        "ge_config.enable_single_stream", None, bool, ge="ge.enableSingleStream"
    )
    aicore_num: str | None = _setting("ge_config.aicore_num", None, str, ge="ge.aicoreNum")
    oo_level: str | None = _setting("ge_config.oo_level", None, "O1", "O3", ge="ge.oo.level")
    oo_constant_folding: bool | None = _setting("ge_config.oo_constant_folding", None, bool, ge="ge.oo.constantFolding")
    oo_dead_code_elimination: bool | None = _setting(
        "ge_config.oo_dead_code_elimination", None, bool, ge="ge.oo.deadCodeElimination"
    )
    optimization_switch: str | None = _setting("ge_config.optimization_switch", None, str, ge="ge.optimizationSwitch")
    fusion_switch_file: str | None = _setting("fusion_config.fusion_switch_file", None, Path, ge="ge.fusionSwitchFile")
    export_compile_stat: str | None = _setting(
        "ge_config.export_compile_stat", None, "0", "1", "2", ge="ge.exportCompileStat"
    )
    data_dump: str | None = _setting("dump_config.dump_path", None, Path, ge="ge.exec.dumpPath")
    data_dump_mode: str | None = _setting(
        "dump_config.dump_mode", None, "input", "output", "all", ge="ge.exec.dumpMode"
    )

    @staticmethod
    def read(given: Mapping[str, Any], target: str = "ascend") -> Settings:
        """One clear error for what is not known, not taken, or would have no effect."""
        fields = {f.name: f for f in dataclasses.fields(Settings)}
        if not isinstance(given, Mapping):
            raise OptionError(f"option 'target_options' takes a mapping of names to values, got {given!r}")
        for name, value in given.items():
            if name in REFUSED:
                raise OptionError(f"target_options {name!r}: {REFUSED[name]}")
            if name not in fields:
                near = did_you_mean(str(name), [*fields, *REFUSED])
                raise OptionError(
                    f"target '{target}' has no target_options {name!r}{near}; it has: {', '.join(fields)}"
                )
            _check(name, value, fields[name].metadata["takes"])
        made = Settings(**{k: _plain(v) for k, v in given.items() if v is not None})
        made._check_together(target)
        return made

    def _check_together(self, target: str) -> None:
        if self.graph_dump_path is not None and self.graph_dump is None:
            raise OptionError("target_options 'graph_dump_path' needs 'graph_dump': txt, pbtxt or py")
        if self.data_dump_mode is not None and self.data_dump is None:
            raise OptionError("target_options 'data_dump_mode' needs 'data_dump', an existing folder")
        if self.oo_level == "O1" and self.topology_sorting_strategy not in (None, "StableRDFS"):
            raise OptionError(
                f"target_options 'topology_sorting_strategy' {self.topology_sorting_strategy!r}: with oo_level 'O1' GE "
                "sorts by StableRDFS; leave out one of the two"
            )
        if self.data_dump is not None:
            if target == "ascend-sim":
                raise OptionError(
                    "target_options 'data_dump' is written by the device, and target 'ascend-sim' has none: "
                    "verify='shadow' names the first GE node that differs"
                )
            if not Path(self.data_dump).is_dir():
                raise OptionError(f"target_options 'data_dump' takes an existing folder, and {self.data_dump} is none")
        if self.fusion_switch_file is not None and not Path(self.fusion_switch_file).is_file():
            raise OptionError(f"target_options 'fusion_switch_file': there is no file {self.fusion_switch_file}")

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default}

    def config(self, torchair: ModuleType) -> Any:
        """torchair's CompilerConfig; GE's settings for the whole process are compared with those it started with."""
        config = torchair.CompilerConfig()
        for field in dataclasses.fields(self):
            value, path = getattr(self, field.name), field.metadata["path"]
            if value is not None and path:
                _assign(config, path, value)
        if self.graph_dump_path is not None:
            Path(self.graph_dump_path).mkdir(parents=True, exist_ok=True)
        config.dump_config.enable_dump = self.data_dump is not None
        config.experimental_config.remove_noop_ops = False  # would undo the copies of `results.py`
        _check_process(torchair, config)
        return config

    @contextmanager
    def loading(self) -> Iterator[None]:
        """GE reads at the first call of a graph whether torch's algorithms must be deterministic."""
        if self.deterministic is None:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        # warn_only: what runs on the host meanwhile, as in the simulator, is not the user's to change.
        torch.use_deterministic_algorithms(self.deterministic, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


_GEARS = (
    "dynamic gears are for inference (torchair.inference.set_dim_gears), and the number of packed rows is no size of "
    "an input; in training, option 'capacity' gives rows in buckets"
)
_STATIC = f"static kernels belong to {_NO_BACKWARD}; GE graphs have no such switch"
_CACHE = (
    "torchair's compile cache (torchair.inference.cache_compile) keeps forward graphs for inference only: no backward, "
    "no random numbers, no guards; each training process compiles anew"
)
_EXPORT = "exporting is for inference: torchair.dynamo_export"
# Names that a reader of torchair's documentation may try.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("static_kernel", "static_kernels", "static_kernel_compile"), _STATIC),
    **dict.fromkeys(("compile_cache", "cache", "cache_dir", "cache_compile"), _CACHE),
    **dict.fromkeys(("dynamic_gears", "dim_gears", "set_dim_gears", "dynamic_gears_merge_policy"), _GEARS),
    **dict.fromkeys(("export_mode", "export_path_dir", "export_name", "export"), _EXPORT),
    "frozen_parameter": "it tells GE that parameters stay as they are, and training changes them",
    "keep_inference_input_mutations": "turbogr's own AOTAutograd decides it; training graphs have none",
    "enable_ref_data": "it is for graphs that write to their inputs, and turbogr hands GE functional ones",
    "aot_config_enable_joint_graph": "turbogr makes forward and backward graphs itself",
    "aot_config_output_loss_index": "turbogr makes forward and backward graphs itself",
    "remove_noop_ops": "it stays off: it would undo copies that results need",
    "run_eagerly": "use target='eager' or target='cpu', which run the same graphs without GE",
    "fx_summary": "turbogr has its own report of what does not convert: option dump, or turbogr explain",
    "super_kernel_optimize": f"super kernels of whole graphs belong to {_NO_BACKWARD}",
    "jit_compile": "torchair knows one value only, 'auto', and sets it",
    "npu_fx_pass": "torchair has it for inference; turbogr's passes do this work",
}
_MODES = {
    "npugraph_ex": f"target_options 'mode': turbogr trains, and that is {_NO_BACKWARD}; leave mode at 'max-autotune' "
    "(GE graphs). To serve a model: torch.compile(model, backend='npugraph_ex')",
    "reduce-overhead": "target_options 'mode': torchair has given up 'reduce-overhead' for npugraph_ex, which captures "
    "no backward; leave mode at 'max-autotune' (GE graphs)",
}


def _check(name: str, value: Any, takes: tuple[Any, ...]) -> None:
    if value is None:
        return
    if name == "mode" and isinstance(value, str) and value in _MODES:
        raise OptionError(_MODES[value])
    if len(takes) == 1 and isinstance(takes[0], type):
        (kind,) = takes
        kinds = (str, Path) if kind is Path else (kind,)
        fits = isinstance(value, kinds) and not (kind is int and isinstance(value, bool))
        wanted = {bool: "True or False", int: "a whole number", str: "a text", Path: "a path"}[kind]
    else:
        fits, wanted = value in takes, ", ".join(map(repr, takes))
    if not fits:
        near = did_you_mean(value, [t for t in takes if isinstance(t, str)]) if isinstance(value, str) else ""
        raise OptionError(f"target_options {name!r} takes {wanted}; got {value!r}{near}")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _assign(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    setattr(config, name, value)


def _check_process(torchair: ModuleType, config: Any) -> None:
    """GE starts once in a process, with its options; torchair would raise in the midst of a conversion."""
    from torchair.core import _backend

    started: dict[str, Any] | None = getattr(_backend, "_GLOBAL_COMPILE_OPTION", None)
    if started is None:
        return
    names = {f.metadata["ge"]: f.name for f in dataclasses.fields(Settings) if f.metadata["ge"]}
    for key, value in config.as_dict()[1].items():
        if started.get(key) != value:
            earlier = f"an earlier compilation of this process set it to {started[key]!r}" if key in started else (
                "an earlier compilation of this process did not set it"
            )  # fmt: skip
            raise OptionError(
                f"target_options {names.get(key, key)!r} would make GE's option {key} {value!r}, and {earlier}: GE "
                "starts once in a process\n  try: the same value for all models of this process, or a process of its "
                "own; target='cpu' has no such settings"
            )

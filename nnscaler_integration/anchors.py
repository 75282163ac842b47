"""Every place of nnScaler that the integration wraps or leans on, and the check that it is as it was tested."""

from __future__ import annotations

import importlib
import inspect
import operator
from dataclasses import dataclass
from types import CodeType

TESTED_VERSIONS = ("0.8", "0.9")


@dataclass(frozen=True)
class Anchor:
    """One function or method.

    Args:
        module: where it is defined.
        name: its qualified name in the module.
        parameters: the names of its parameters, separated by blanks.
        versions: the nnScaler versions in which it matters.
        mentions: attributes that its code reads or sets and that the integration relies on, separated by blanks.
    """

    module: str
    name: str
    parameters: str
    versions: tuple[str, ...] = TESTED_VERSIONS
    mentions: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def difference(self) -> str | None:
        """What is not as tested, or ``None``."""
        try:
            found = operator.attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return f"{self}: not there"
        parameters = " ".join(inspect.signature(found).parameters)
        if parameters != self.parameters:
            return f"{self}: takes ({parameters}), tested with ({self.parameters})"
        missing = set(self.mentions.split()) - _mentioned(found.__code__)
        return f"{self}: no longer uses {', '.join(sorted(missing))}" if missing else None


def _mentioned(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _mentioned(constant)
    return names


ANCHORS = (
    Anchor("nnscaler.ir.cten", "IRCell.__init__", "self name signature input_length output_length"),
    Anchor(
        "nnscaler.ir.adapter.adapter",
        "IRAdapter.__init__",
        "self inputs outputs",
        mentions="_inputs _outputs _forward _cached_dispatch _recompute",
    ),
    Anchor("nnscaler.ir.adapter.adapter", "IRAdapter.dispatch", "self devid _mirror", mentions="_cached_dispatch _id"),
    Anchor("nnscaler.ir.adapter.prim", "CommPrim.__init__", "self itensors otensors kwargs"),
    Anchor("nnscaler.graph.segment", "IRSegment.insert", "self node index"),
    Anchor("nnscaler.graph.segment", "IRSegment.full_objects", "self"),
    Anchor("nnscaler.graph.graph", "IRGraph.depends", "self pre_node succ_node"),
    Anchor("nnscaler.graph.gener.gen", "IRAdapterGener.gen_activation", "graph allow_recompute cost_fn"),
    Anchor("nnscaler.graph.gener.gen", "IRAdapterGener._gen_activation", "graph allow_recompute cost_fn", ("0.9",)),
    Anchor("nnscaler.graph.schedule.schedplan", "Block.__init__", "self cell micro_batch_id span", ("0.8",)),
    Anchor(
        "nnscaler.graph.schedule.schedplan", "Block.__init__", "self cell micro_batch_id span stream_context", ("0.9",)
    ),
    Anchor(
        "nnscaler.graph.schedule.schedplan",
        "ScheduleDependency.build",
        "self",
        mentions="adapters senders recvers dataloaders segments",
    ),
    Anchor(
        "nnscaler.graph.schedule.schedplan",
        "PlanBase._place_dataloader",
        "self",
        mentions="_step_blocks _block_start_step start_blocks _num_microbatches",
    ),
    Anchor(
        "nnscaler.graph.schedule.schedplan",
        "SchedulePlan._place_adapters",
        "self",
        mentions="_dependency adapters senders recvers",
    ),
    Anchor("nnscaler.execplan.execplan", "ExeReuseCell.__init__", "self cell inputs outputs"),
    Anchor(
        "nnscaler.execplan.execplan", "ExeReuseCell.dispatch", "self devid _mirror", mentions="_cached_dispatched _id"
    ),
    Anchor(
        "nnscaler.execplan.planpass.grouping",
        "Grouping.group",
        "execplan",
        ("0.8",),
        mentions="differentiable mirror seq devices",
    ),
    Anchor("nnscaler.codegen.emit", "FuncEmission.emit_adapter", "self node prefix_attr async_op"),
    Anchor(
        "nnscaler.codegen.module.module",
        "ModuleCodeGen.__init__",
        "self execplan runtime_ndevs scale_ndevs",
        mentions="init_code execplan devices",
    ),
    Anchor(
        "nnscaler.codegen.module.module", "ModuleCodeGen.emit_comm_groups", "self", mentions="model_init_statements"
    ),
    Anchor("nnscaler.codegen.module.module", "ModuleCodeGen.scale", "self node device"),
    Anchor("nnscaler.codegen.schedule.schedule", "ScheduleCodeGen.gen", "self device outfile attach"),
    Anchor(
        "nnscaler.codegen.schedule.schedule",
        "ScheduleCodeGen.__init__",
        "self execplan runtime_ndevs scale_ndevs",
        mentions="devices",
    ),
    Anchor("nnscaler.codegen.schedule.schedule", "ScheduleCodeGen.emit_node", "self node force_no_grad", ("0.8",)),
    Anchor(
        "nnscaler.codegen.schedule.schedule", "ScheduleCodeGen.emit_node", "self execplan node force_no_grad", ("0.9",)
    ),
    Anchor(
        "nnscaler.parallel",
        "_prepare_and_check_reusable",
        "gen_savedir module_or_module_class compute_config instance_name reuse",
    ),
    Anchor("nnscaler.parallel", "_prepare_namespace", "gen_savedir module_or_module_class instance_name"),
    Anchor("nnscaler.parallel", "_is_any_gencode_loaded", "namespace"),
    Anchor(
        "nnscaler.parallel",
        "_load_parallel_module_class",
        "module_class gen_savedir instance_name rank",
        mentions="_prepare_namespace GenModel __name__ __qualname__ runtime_version _train_step _infer_step",
    ),
    Anchor(
        "nnscaler.parallel",
        "parallelize",
        "module_or_module_class dummy_forward_args pas_policy compute_config gen_savedir reuse instance_name "
        "load_module module_dtype module_fn init_module_params broadcast_strategy",
        ("0.8",),
        mentions="_prepare_and_check_reusable _load_parallel_module_class",
    ),
    Anchor(
        "nnscaler.parallel",
        "parallelize",
        "module_or_module_class dummy_forward_args pas_policy compute_config gen_savedir reuse instance_name "
        "load_module module_dtype module_fn init_module_params build_module_buckets broadcast_strategy "
        "autoset_requires_grad",
        ("0.9",),
        mentions="_prepare_and_check_reusable _load_parallel_module_class",
    ),
    Anchor("nnscaler.runtime.module", "ParallelModule._post_init", "self init_params", ("0.8",)),
    Anchor("nnscaler.runtime.module", "ParallelModule._post_init", "self init_params build_buckets", ("0.9",)),
    Anchor("nnscaler.runtime.module", "ParallelModule.__init__", "self", mentions="_nreplicas2localparams"),
    Anchor("nnscaler.runtime.module", "CubeModule.__init__", "self", mentions="_reducers"),
    Anchor(
        "nnscaler.runtime.module",
        "CubeModule.add_full_map",
        "self attr tid is_param orig_name shape slicers val_chunks",
    ),
    Anchor("nnscaler.parallel", "_contains_uncommutable_data", "ir_outputs"),
    Anchor("nnscaler.graph.tracer.torch_fx_patcher", "TorchFXPatcher.is_impure_new", "node", ("0.8",)),
)


def anchors_of(version: str) -> list[Anchor]:
    """The anchors that matter for a version; for an untested one, those of the latest tested version."""
    known = version if version in TESTED_VERSIONS else TESTED_VERSIONS[-1]
    return [anchor for anchor in ANCHORS if known in anchor.versions]


def differences(version: str) -> list[str]:
    """What is not as tested in the nnScaler that is installed; empty where all is."""
    found = [anchor.difference() for anchor in anchors_of(version)]
    return [text for text in found if text is not None]

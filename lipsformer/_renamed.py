"""Names of earlier checkouts: using one raises an ImportError that says the new name.

The table is removed after the first release.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

MODULES = {
    "lipsformer.analysis.attention_bounds": "lipsformer.analysis.bounds",
    "lipsformer.analysis.confusion": "lipsformer.analysis.errors",
    "lipsformer.analysis.control": "lipsformer.analysis.instruments",
    "lipsformer.analysis.instrument": "lipsformer.analysis.instruments",
    "lipsformer.analysis.layer_bounds": "lipsformer.analysis.bounds",
    "lipsformer.analysis.lipschitz": "lipsformer.analysis.bounds",
    "lipsformer.analysis.memory": "lipsformer.analysis.cost",
    "lipsformer.analysis.model_bounds": "lipsformer.analysis.bounds",
    "lipsformer.analysis.monitor": "lipsformer.analysis.instruments",
    "lipsformer.analysis.orthogonal": "lipsformer.analysis.instruments",
    "lipsformer.analysis.profile": "lipsformer.analysis.cost",
    "lipsformer.analysis.timm_bounds": "lipsformer.analysis.bounds",
    "lipsformer.engine.instrument": "lipsformer.analysis.instruments",
    "lipsformer.engine.loop": "lipsformer.engine.steps",
    "lipsformer.engine.run": "lipsformer.engine.trainer",
    "lipsformer.engine.runtime": "lipsformer.engine.distributed",
    "lipsformer.engine.snapshot": "lipsformer.engine.train_state",
    "lipsformer.graph.conv": "lipsformer.graph",
    "lipsformer.graph.csr": "lipsformer.graph.edge_attention.csr",
    "lipsformer.layers.attention": "lipsformer.layers.cosine_attention",
    "lipsformer.layers.frozen": "lipsformer.models.folded_layers",
    "lipsformer.layers.norm": "lipsformer.layers.center_norm",
    "lipsformer.layers.score_norm": "lipsformer.layers.lipschitz_norm",
    "lipsformer.layers.window": "lipsformer.layers.windows",
    "lipsformer.models.convert": "lipsformer.models.official_weights",
    "lipsformer.models.lipschitz_form": "lipsformer.models.timm_conversion",
    "scripts.convert_checkpoint": "scripts.import_weights",
    "scripts.stability_sweep": "benchmarks.league",
}
NAMES = {
    "lipsformer.analysis.bounds.largest": "max_abs",
    "lipsformer.analysis.bounds.rule": "bound_rule",
    "lipsformer.analysis.bounds.unchanged": "require_unchanged",
    "lipsformer.analysis.robustness.withstood": "robust_mask",
    "lipsformer.analysis.sigma.assign": "lipsformer._sharding.assign",
    "lipsformer.analysis.sigma.full_tensor": "lipsformer._sharding.full_tensor",
    "lipsformer.analysis.sigma.krylov_sigma": "krylov_sigma_estimate",
    "lipsformer.config.config_identity": "lipsformer.engine.resume.config_identity",
    "lipsformer.config.load_config": "lipsformer._configfile.read_config(Config, ...)",
    "lipsformer.engine.build.load_initial_weights": (
        "lipsformer.engine.initial_weights.load_initial_weights"
    ),
    "lipsformer.engine.checkpoint.find_fault": "lipsformer.engine.run_files.find_fault",
    "lipsformer.engine.checkpoint.load_weights": "lipsformer.engine.weights.load_weights",
    "lipsformer.engine.checkpoint.locate": "lipsformer.engine.run_folder.find_weights",
    "lipsformer.engine.checkpoint.read_state": "lipsformer.engine.run_files.read_state",
    "lipsformer.engine.checkpoint.read_weights": "lipsformer.engine.weights.read_weights",
    "lipsformer.engine.checkpoint.strip_wrappers": "lipsformer.engine.weights.strip_wrappers",
    "lipsformer.engine.checkpoint.write_atomically": "lipsformer._files.write_atomically",
    "lipsformer.engine.metrics.Window": "StepMetrics",
    "lipsformer.engine.metrics.summarise": "summarize",
    "lipsformer.engine.parts.Parts": "TrainingParts",
    "lipsformer.engine.run_folder.create_model": "lipsformer.engine.weights.create_model",
    "lipsformer.engine.run_folder.load_model": "lipsformer.engine.weights.load_model",
    "lipsformer.engine.run_folder.load_weights": "lipsformer.engine.weights.load_weights",
    "lipsformer.engine.run_folder.read_weights": "lipsformer.engine.weights.read_weights",
    "lipsformer.engine.run_folder.strip_wrappers": "lipsformer.engine.weights.strip_wrappers",
    "lipsformer.engine.run_folder.EXIT": "lipsformer.engine.run_files.EXIT",
    "lipsformer.engine.run_folder.INSTRUMENTS": "lipsformer.engine.run_files.INSTRUMENTS",
    "lipsformer.engine.run_folder.OPTIMIZER": "lipsformer.engine.run_files.OPTIMIZER",
    "lipsformer.engine.run_folder.PLOTS": "lipsformer.engine.run_files.PLOTS",
    "lipsformer.engine.run_folder.REPLAY": "lipsformer.engine.run_files.REPLAY",
    "lipsformer.engine.run_folder.REPORT": "lipsformer.engine.run_files.REPORT",
    "lipsformer.engine.run_folder.SKIPPED": "lipsformer.engine.run_files.SKIPPED",
    "lipsformer.engine.run_folder.STATE": "lipsformer.engine.run_files.STATE",
    "lipsformer.engine.run_folder.TENSORBOARD": "lipsformer.engine.run_files.TENSORBOARD",
    "lipsformer.engine.steps.evaluate": "lipsformer.engine.evaluation.evaluate",
    "lipsformer.graph.config.DataConfig": "GraphDataConfig",
    "lipsformer.graph.config.ModelConfig": "GraphModelConfig",
    "lipsformer.graph.config.RunConfig": "GraphRunConfig",
    "lipsformer.graph.config.SweepConfig": "GraphSweepConfig",
    "lipsformer.graph.config.TrainConfig": "GraphTrainConfig",
    "lipsformer.graph.diagnostics.adjacency_norm": (
        "lipsformer.graph.operator_bounds.adjacency_sigma_bound"
    ),
    "lipsformer.graph.diagnostics.attention_column_sum": (
        "lipsformer.graph.operator_bounds.attention_column_sum"
    ),
    "lipsformer.graph.diagnostics.mu": "distance_from_mean",
    "lipsformer.graph.diagnostics.normalized_adjacency": (
        "lipsformer.graph.operator_bounds.normalized_adjacency"
    ),
    "lipsformer.graph.training.NodeBatch": "lipsformer.graph.batches.NodeBatch",
    "lipsformer.layers.ContractiveResidual": (
        "lipsformer.models.lipsformer_contractive.ContractiveResidual"
    ),
    "lipsformer.layers.contractive.ContractiveResidual": (
        "lipsformer.models.lipsformer_contractive.ContractiveResidual"
    ),
    "lipsformer.layers.cosine_windows": "attend_in_windows",
    "lipsformer.layers.fit_window": "lipsformer.models.lipsformer.fit_window",
    "lipsformer.layers.kept_samples": "WeightedResidual(branch, ...), which owns its branch",
    "lipsformer.layers.spectral.conv_sigma_bound": (
        "lipsformer.analysis.conv_norms.conv_sigma_bound"
    ),
    "lipsformer.layers.spectral.depthwise_operator": (
        "lipsformer.analysis.conv_norms.depthwise_operator"
    ),
    "lipsformer.models.inference.FoldedConv": "lipsformer.models.folded_layers.FoldedConv",
    "lipsformer.models.inference.FoldedResidual": "lipsformer.models.folded_layers.FoldedResidual",
    "lipsformer.models.inference.fold_norm_before": "lipsformer.models.folding.fold_norm_before",
    "lipsformer.models.inference.fold_norm_behind": "lipsformer.models.folding.fold_norm_behind",
    "lipsformer.models.inference.register_fold": "lipsformer.models.folding.register_fold",
}


class _RenamedModules(MetaPathFinder):
    """Raise for the modules of the table; it is asked after all finders that can find anything."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in MODULES:
            raise ImportError(f"{fullname} has a new name: {MODULES[fullname]}")


def renamed(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which raises for the names of the table.

    Args:
        module: Dotted name of the module.
    """

    def attribute(name: str) -> Any:
        if new := NAMES.get(f"{module}.{name}"):
            raise ImportError(f"{module}.{name} has a new name: {new}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


if not any(isinstance(finder, _RenamedModules) for finder in sys.meta_path):
    sys.meta_path.append(_RenamedModules())

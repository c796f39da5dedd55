"""The geometry of normalization: pure torch on rows (..., n), batched, differentiable, finite where it can be."""

from __future__ import annotations

from importlib import import_module

_FILES = {
    "centring": "angle_between angle_to_ones centre centring_matrix energy_along_ones project_out",
    "scaling": "affine agreement_scale inside_equivalent shrink_factor to_sphere",
    "decomposition": "Decomposition Invariant Step decompose",
    "inversion": "Fiber ScaleShift fiber idempotence scale_shift_defects",
    "paths": "chordal_distance exponential geodesic_distance interpolate logarithm",
    "hyperplane": "Hyperplane",
    "sphere": "CentredSphere Sphere",
    "ellipsoid": "Ellipsoid",
    "axes": "downdate_eigenvalues downdate_eigenvectors",
    "image": "Image image_of",
    "differential": "euler_defect jacobian jvp tangent_projection vjp",
    "spectrum": "JacobianSpectrum jacobian_norm jacobian_norm_bound jacobian_spectrum",
    "conditioning": "Preconditioning gauss_newton_condition preconditioning",
    "invariance": "Cell InvarianceRow InvarianceTable invariances",
    "batches": "batch_size_dependence centre_over_batch cross_sample_jacobian future_leakage padding_dependence "
    "scale_over_batch train_eval_difference",
    "step_sizes": "effective_learning_rate radial_cosine",
    "invariant_groups": "InvariantGroup scale_invariant_groups",
    "tangent_optimizer": "TangentOptimizer",
    "scores": "attention_entropy entropy_over_scale logit_bound",
    "selection": "selectable selecting_query uniform_query",
    "contribution": "Contributions contributions",
    "features": "Rogue outlier_indices recurring_indices rogue_dimensions",
    "gauge": "centred_defect reader_defect weightless_defect",
}
_HOME = {name: f"normkit.geometry.{file}" for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(name)
    return getattr(import_module(_HOME[name]), name)

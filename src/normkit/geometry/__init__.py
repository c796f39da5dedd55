"""The geometry of normalization: pure torch on rows (..., n), batched, differentiable, finite where it can be.

rows.py               which norms have a geometry of single rows, and how long a normalized row is
scaling.py            the second and third map: onto the sphere, with eps; gain and bias
centring.py           the first map: onto a hyperplane; angles
decomposition.py      the rows after each map of a norm, and the laws that hold there
inversion.py          the inputs behind an output; scale, shift, norm after norm
paths.py              distances, great circles and transport on a sphere
quotient.py           the rows that a norm cannot tell apart, as points of a manifold
axes.py ellipsoid.py image.py     the sets that rows land on: hyperplane, spheres, ellipsoid, and all outputs of a norm
differential.py spectrum.py       Jacobians in closed form, their singular values, the condition number behind a norm
batches.py invariance.py          what an output depends on; the table of Ba et al.
step_sizes.py invariant_groups.py tangent_optimizer.py   weights whose scale a model ignores
scores.py selection.py            attention logits, and the keys that can win
contribution.py features.py gauge.py   models: parts of a stream, outliers, how far weights are folded
figures.py space_figures.py animation.py   all of it as figures; `normkit.plots` is their public door
"""

from normkit.geometry.axes import downdate_eigenvalues, downdate_eigenvectors
from normkit.geometry.batches import (
    batch_size_dependence,
    centre_over_batch,
    cross_sample_jacobian,
    future_leakage,
    padding_dependence,
    scale_over_batch,
    train_eval_difference,
)
from normkit.geometry.centring import (
    angle_between,
    angle_to_ones,
    centre,
    centring_matrix,
    energy_along_ones,
    project_out,
)
from normkit.geometry.contribution import Contributions, contributions
from normkit.geometry.decomposition import Decomposition, Invariant, Step, decompose
from normkit.geometry.differential import euler_defect, jacobian, jvp, tangent_projection, vjp
from normkit.geometry.ellipsoid import Ellipsoid
from normkit.geometry.features import Rogue, outlier_indices, recurring_indices, rogue_dimensions
from normkit.geometry.gauge import centred_defect, reader_defect, weightless_defect
from normkit.geometry.image import CentredSphere, Hyperplane, Image, Sphere, image_of
from normkit.geometry.invariance import Cell, InvarianceRow, InvarianceTable, invariances
from normkit.geometry.invariant_groups import InvariantGroup, scale_invariant_groups
from normkit.geometry.inversion import Fiber, ScaleShift, fiber, idempotence, scale_shift_defects
from normkit.geometry.paths import (
    chordal_distance,
    exponential,
    geodesic_distance,
    interpolate,
    logarithm,
    parallel_transport,
)
from normkit.geometry.quotient import Quotient
from normkit.geometry.scaling import affine, agreement_scale, inside_equivalent, shrink_factor, to_sphere
from normkit.geometry.scores import attention_entropy, entropy_over_scale, logit_bound
from normkit.geometry.selection import selectable, selecting_query, uniform_query
from normkit.geometry.spectrum import (
    JacobianSpectrum,
    Preconditioning,
    gauss_newton_condition,
    jacobian_norm,
    jacobian_norm_bound,
    jacobian_spectrum,
    preconditioning,
)
from normkit.geometry.step_sizes import effective_learning_rate, equilibrium_length, radial_cosine
from normkit.geometry.tangent_optimizer import TangentOptimizer

__all__ = [
    "Cell",
    "CentredSphere",
    "Contributions",
    "Decomposition",
    "Ellipsoid",
    "Fiber",
    "Hyperplane",
    "Image",
    "InvarianceRow",
    "InvarianceTable",
    "Invariant",
    "InvariantGroup",
    "JacobianSpectrum",
    "Preconditioning",
    "Quotient",
    "Rogue",
    "ScaleShift",
    "Sphere",
    "Step",
    "TangentOptimizer",
    "affine",
    "agreement_scale",
    "angle_between",
    "angle_to_ones",
    "attention_entropy",
    "batch_size_dependence",
    "centre",
    "centre_over_batch",
    "centred_defect",
    "centring_matrix",
    "chordal_distance",
    "contributions",
    "cross_sample_jacobian",
    "decompose",
    "downdate_eigenvalues",
    "downdate_eigenvectors",
    "effective_learning_rate",
    "energy_along_ones",
    "entropy_over_scale",
    "equilibrium_length",
    "euler_defect",
    "exponential",
    "fiber",
    "future_leakage",
    "gauss_newton_condition",
    "geodesic_distance",
    "idempotence",
    "image_of",
    "inside_equivalent",
    "interpolate",
    "invariances",
    "jacobian",
    "jacobian_norm",
    "jacobian_norm_bound",
    "jacobian_spectrum",
    "jvp",
    "logarithm",
    "logit_bound",
    "outlier_indices",
    "padding_dependence",
    "parallel_transport",
    "preconditioning",
    "project_out",
    "radial_cosine",
    "reader_defect",
    "recurring_indices",
    "rogue_dimensions",
    "scale_invariant_groups",
    "scale_over_batch",
    "scale_shift_defects",
    "selectable",
    "selecting_query",
    "shrink_factor",
    "tangent_projection",
    "to_sphere",
    "train_eval_difference",
    "uniform_query",
    "vjp",
    "weightless_defect",
]

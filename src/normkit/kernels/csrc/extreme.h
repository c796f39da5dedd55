// Rows whose numbers leave float32's range on the way, one number at a time in float64: rare, and never wrong.
//
// The kernels see them by their sums and leave them to these functions, which are compiled once, for every CPU.
#pragma once

#include "kernels.h"

namespace normkit {

// What is known of a row. The mean is kept in two parts: where it dwarfs the deviations, what its rounding leaves counts.
struct RowScale {
    double mean = 0;
    double remainder = 0;
    double inverse = 1;  // 1 / s
    bool is_extreme = false;
};

// 1 / s of a row from the v of the row times `power`.
double inverse_scale(double v, double power, const Norm& norm);

RowScale extreme_scale(const void* x, Type type, const Norm& norm);

// Gain and bias in the arithmetic type, or null.
void normalize_extreme_row(const void* x, Type x_type, void* y, Type y_type, const RowScale& scale, const void* gain,
                           const void* bias, const Norm& norm, const Casts& casts);

// q * v / (s * s) of the gradient's last term; see backward.h.
double root_ratio(double inverse, const Norm& norm);

// Row r of dx, if wanted, and its part of dgain, if not null.
void extreme_gradient(const Backward& task, const void* gain, int64_t r, double* dgain);

}  // namespace normkit

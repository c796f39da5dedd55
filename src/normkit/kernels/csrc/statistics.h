// Mean and scale of one row.
//
//   s = sqrt(v + eps), sqrt(v) + eps or max(sqrt(v), eps);  v = sum(d * d) / divisor,  d = x - mean or x
//
// Sums of squares leave float32's range long before the row does. Rows where that happens are rare: they are seen by
// their sums, and measured again by extreme.h.
#pragma once

#include "extreme.h"
#include "kernels.h"
#include "lanes.h"
#include "sums.h"

namespace normkit {
namespace {

// Mean squares outside of these are not to be trusted.
template <class A>
struct Trusted;
template <>
struct Trusted<float> {
    static constexpr double least = 0x1p-90, most = 0x1p100;
};
template <>
struct Trusted<double> {
    static constexpr double least = 0x1p-900, most = 0x1p1000;
};

template <class A>
inline bool is_trusted(double mean_square, double mean, const Norm& norm) {
    if (!(mean_square <= Trusted<A>::most && __builtin_fabs(mean) <= Trusted<A>::most)) return false;
    if (mean_square >= Trusted<A>::least) return true;
    // Nearly constant rows, that is: beside an eps of the usual size what their squares lose cannot be seen.
    bool has_eps = norm.eps_placement == EpsPlacement::inside && norm.eps >= 1e-11;
    return has_eps && __builtin_fabs(mean) >= Trusted<A>::least;
}

[[gnu::always_inline]] inline double scale_of(double v, const Norm& norm) {
    if (norm.eps_placement == EpsPlacement::inside) return 1 / __builtin_sqrt(v + norm.eps);
    return inverse_scale(v, 1, norm);
}

template <class T>
[[gnu::always_inline]] inline double square_sum(const T* x, int64_t n) {
    using A = Arithmetic<T>;
    return sum_over_row<A, 1>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
               Lanes<A> value = read.template any<A>(x + i);
               sums[0] = fused(value, value, sums[0]);
           }).value[0];
}

// Sums of x - pivot and its square.
template <class T, class A>
[[gnu::noinline]] Sums<2> deviation_sums(const T* x, int64_t n, A pivot) {
    return sum_over_row<A, 2>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
        Lanes<A> deviation = read.any(x + i, pivot) - Lanes<A>::all(pivot);
        sums[0] = sums[0] + deviation;
        sums[1] = fused(deviation, deviation, sums[1]);
    });
}

// Rows of zeros are padding, and common.
template <class T>
[[gnu::noinline]] bool is_zero(const T* x, int64_t n) {
    using A = Arithmetic<T>;
    return sum_over_row<A, 1>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
               Lanes<A> value = read.template get<A>(x + i);
               for (auto& part : value.part) part = part < 0 ? -part : part;
               sums[0] = sums[0] + value;
           }).value[0] == 0;
}

template <class T>
[[gnu::noinline]] RowScale untrusted_scale(const T* x, Type type, const Norm& norm) {
    if (is_zero(x, norm.n)) return {0, 0, inverse_scale(0 / norm.divisor, 1, norm)};
    return extreme_scale(x, type, norm);
}

template <class T>
[[gnu::always_inline]] inline RowScale row_scale(const T* x, Type type, const Norm& norm) {
    using A = Arithmetic<T>;
    int64_t n = norm.n;
    if (!norm.centred) {
        double square = square_sum(x, n);
        if (!is_trusted<A>(square / n, 0, norm)) return untrusted_scale(x, type, norm);
        return {0, 0, scale_of(square / norm.divisor, norm)};
    }
    Sums<2> sums = sum_and_square(x, n);
    double mean = sums.value[0] / n, v = sums.value[1] / n - mean * mean;
    A pivot = mean;
    double remainder = mean - pivot;
    // Where the mean is of the size of the deviations, the difference of squares loses nothing that shows.
    if (sizeof(A) == 8 || !(4 * v >= mean * mean)) {
        sums = deviation_sums(x, n, pivot);
        // float64 has no wider type to take the mean in: its remainder is the mean of the deviations.
        if (sizeof(A) == 8) remainder = sums.value[0] / n;
        v = sums.value[1] / n - remainder * remainder;
        v = v < 0 ? 0 : v;
    }
    if (!is_trusted<A>(v, pivot, norm)) return untrusted_scale(x, type, norm);
    return {pivot, remainder, scale_of(v * (n / norm.divisor), norm)};
}

}  // namespace
}  // namespace normkit

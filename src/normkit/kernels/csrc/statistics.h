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

// Sums of x - pivot and its square.
template <class T, class A>
[[gnu::noinline]] Sums deviation_sums(const T* x, int64_t n, A pivot) {
    const Lanes<A> pivots = Lanes<A>::all(pivot);
    Lanes<double> sums[2];
    sum_over_row<A>(
        n, sums, [&](int64_t i, auto read, Lanes<A>& sum) { sum = sum + (read.any(x + i, pivot) - pivots); },
        [&](int64_t i, auto read, Lanes<A>& square) {
            Lanes<A> deviation = read.any(x + i, pivot) - pivots;
            square = fused(deviation, deviation, square);
        });
    return {total(sums[0]), total(sums[1])};
}

// Rows of zeros are padding, and common.
template <class T>
[[gnu::noinline]] bool is_zero(const T* x, int64_t n) {
    using A = Arithmetic<T>;
    Lanes<double> sum;
    sum_over_row<A>(n, &sum, [&](int64_t i, auto read, Lanes<A>& sum) {
        Lanes<A> value = read.template get<A>(x + i);
        for (auto& part : value.part) part = part < 0 ? -part : part;
        sum = sum + value;
    });
    return total(sum) == 0;
}

template <class T>
[[gnu::noinline]] RowScale untrusted_scale(const T* x, Type type, const Norm& norm) {
    if (is_zero(x, norm.n)) return {0, 0, inverse_scale(0 / norm.divisor, 1, norm)};
    return extreme_scale(x, type, norm);
}

// From the sums of x, if the norm centres, and of x * x.
template <class T>
[[gnu::noinline]] RowScale scale_of_sums(const T* x, Type type, const Norm& norm, double sum, double square) {
    using A = Arithmetic<T>;
    const int64_t n = norm.n;
    if (!norm.centred) {
        if (!is_trusted<A>(square / n, 0, norm)) return untrusted_scale(x, type, norm);
        return {0, 0, scale_of(square / norm.divisor, norm)};
    }
    double mean = sum / n, v = square / n - mean * mean;
    A pivot = mean;
    double remainder = mean - pivot;
    // Where the mean is of the size of the deviations, the difference of squares loses nothing that shows.
    if (sizeof(A) == 8 || !(4 * v >= mean * mean)) {
        Sums sums = deviation_sums(x, n, pivot);
        // float64 has no wider type to take the mean in: its remainder is the mean of the deviations.
        if (sizeof(A) == 8) remainder = sums.value[0] / n;
        v = sums.value[1] / n - remainder * remainder;
        v = v < 0 ? 0 : v;
    }
    if (!is_trusted<A>(v, pivot, norm)) return untrusted_scale(x, type, norm);
    return {pivot, remainder, scale_of(v * (n / norm.divisor), norm)};
}

template <class T>
[[gnu::noinline]] RowScale row_scale(const T* x, Type type, const Norm& norm) {
    Lanes<double> sums[2] = {Lanes<double>::all(0)};
    if (norm.centred) sum_and_square_lanes(x, norm.n, sums);
    else square_lanes(x, norm.n, sums + 1);
    return scale_of_sums(x, type, norm, total(sums[0]), total(sums[1]));
}

// Four rows: what a row costs beside its numbers (sums across lanes, divisions, a square root) is done once for all.
struct FourScales {
    Four sums, squares;  // of x and of x * x
    Four mean, remainder, inverse;
};

// False if one of the rows is not of the usual size, or eps is not inside the root: then no more than the sums are found.
template <class T>
[[gnu::always_inline]] inline bool measure_four(const T* const* x, const Norm& norm, FourScales& to) {
    Quarters sum, square;
    const double n = norm.n;
    if (norm.centred) {
        for (int r = 0; r < 4; ++r) {
            Lanes<double> sums[2];
            sum_and_square_lanes(x[r], norm.n, sums);
            quarter(sums[0], sum.row[r]);
            quarter(sums[1], square.row[r]);
        }
        totals(sum, to.sums);
    } else {
        for (int r = 0; r < 4; ++r) {
            Lanes<double> sums;
            square_lanes(x[r], norm.n, &sums);
            quarter(sums, square.row[r]);
        }
        to.sums = Four{};
    }
    totals(square, to.squares);
    const Four mean = to.sums / n, v = to.squares / n - mean * mean;
    const auto is_usual = (4 * v >= mean * mean) & (v >= Trusted<float>::least) & (v <= Trusted<float>::most);
    if (sizeof(T) == 8 || norm.eps_placement != EpsPlacement::inside || !all_four(is_usual)) return false;
    to.mean = __builtin_convertvector(__builtin_convertvector(mean, FourFloats), Four);
    to.remainder = mean - to.mean;
    Four root = (norm.centred ? v * (n / norm.divisor) : to.squares / norm.divisor) + norm.eps;
    for (int r = 0; r < 4; ++r) root[r] = __builtin_sqrt(root[r]);
    to.inverse = 1 / root;
    return true;
}

}  // namespace
}  // namespace normkit

// Moments of rows, in float64: what a watch counts of what enters and leaves a norm. And whether all is finite.
#pragma once

#include "sums.h"

namespace normkit {
namespace {

template <class A>
[[gnu::always_inline]] inline Lanes<A> larger(Lanes<A> a, const Lanes<A>& b) {
    for (int i = 0; i < Lanes<A>::registers; ++i) a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return a;
}

template <class A>
[[gnu::always_inline]] inline double largest(const Lanes<A>& value) {
    A some[lanes];
    store(some, value);
    for (int width = lanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) some[i] = some[i] > some[i + width] ? some[i] : some[i + width];
    }
    return some[0];
}

template <bool are_central, class T>
[[gnu::always_inline]] inline RowMoments row_moments(const T* x, int64_t n) {
    using A = Arithmetic<T>;
    const Lanes<A> nothing = Lanes<A>::all(0);
    Lanes<double> sum = Lanes<double>::all(0), square = sum, fourth = sum;
    Lanes<A> top = nothing, bottom = nothing;
    by_sixteens(0, n, [&](int64_t i, auto read) {
        Lanes<A> value = read.template get<A>(x + i);
        top = larger(top, value);
        bottom = larger(bottom, nothing - value);
        Lanes<double> wide = widened(value);
        sum = sum + wide;
        if constexpr (!are_central) square = fused(wide, wide, square);
    });
    RowMoments row;
    row.absmax = largest(larger(top, bottom));
    row.mean = total(sum) / n;
    if constexpr (are_central) {
        const Lanes<double> mean = Lanes<double>::all(row.mean);
        by_sixteens(0, n, [&](int64_t i, auto read) {
            Lanes<double> deviation = read.template get<double>(x + i, row.mean) - mean;
            Lanes<double> squared = deviation * deviation;
            square = square + squared;
            fourth = fused(squared, squared, fourth);
        });
        row.fourth = total(fourth) / n;
    }
    row.square = total(square) / n;
    return row;
}

template <class T>
void find_moments(const Moments& task, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(task.x);
    for (int64_t row = begin; row < end; ++row) {
        const T* from = x + task.x_rows.offset(row);
        RowMoments& to = task.rows[row - task.first];
        to = task.are_central ? row_moments<true>(from, task.n) : row_moments<false>(from, task.n);
    }
}

// A number times 0 is 0 if it is finite, else NaN.
template <class T>
bool is_finite(const Elements& task, int64_t begin, int64_t end) {
    using A = Arithmetic<T>;
    const Lanes<A> zero = Lanes<A>::all(0);
    Lanes<A> some = zero;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(task.x) + task.x_rows.offset(row);
        by_sixteens(0, task.n, [&](int64_t i, auto read) { some = fused(read.template get<A>(x + i), zero, some); });
    }
    return total(widened(some)) == 0;
}

}  // namespace
}  // namespace normkit

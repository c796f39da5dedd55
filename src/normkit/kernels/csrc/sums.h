// Sums over a row, in an order that depends on its length alone.
#pragma once

#include "positions.h"

namespace normkit {
namespace {

// The lanes added up by halves, until four numbers are left.
[[gnu::always_inline]] inline void quarter(Lanes<double> value, double* to) {
    constexpr int in_register = Lanes<double>::in_register, least = in_register < 4 ? 4 / in_register : 1;
    for (int width = Lanes<double>::registers / 2; width >= least; width /= 2) {
        for (int i = 0; i < width; ++i) value.part[i] += value.part[i + width];
    }
    double some[least * in_register];
    for (int i = 0; i < least; ++i) store_register(some + i * in_register, value.part[i]);
    for (int i = 0; i < 4; ++i) to[i] = in_register > 4 ? some[i] + some[i + 4 < in_register ? i + 4 : i] : some[i];
}

// The halves of what is left added again.
[[gnu::always_inline]] inline double total(const double* quarter) {
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// The sum of the lanes.
[[gnu::always_inline]] inline double total(const Lanes<double>& value) {
    double some[4];
    quarter(value, some);
    return total(some);
}

// One number of each of four rows.
typedef double Four __attribute__((vector_size(32)));
typedef float FourFloats __attribute__((vector_size(16)));

// Whether every one of four is.
template <class Mask>
[[gnu::always_inline]] inline bool all_four(const Mask& mask) {
    return mask[0] & mask[1] & mask[2] & mask[3];
}

// What `quarter` leaves of a sum of each of four rows.
struct Quarters {
    alignas(32) double row[4][4];
};

// `total` of each.
[[gnu::always_inline]] inline void totals(const Quarters& from, Four& to) {
    Four a, b, c, d;
    __builtin_memcpy(&a, from.row[0], sizeof a);
    __builtin_memcpy(&b, from.row[1], sizeof b);
    __builtin_memcpy(&c, from.row[2], sizeof c);
    __builtin_memcpy(&d, from.row[3], sizeof d);
    const Four ac = __builtin_shufflevector(a, c, 0, 1, 4, 5) + __builtin_shufflevector(a, c, 2, 3, 6, 7);
    const Four bd = __builtin_shufflevector(b, d, 0, 1, 4, 5) + __builtin_shufflevector(b, d, 2, 3, 6, 7);
    to = __builtin_shufflevector(ac, bd, 0, 4, 2, 6) + __builtin_shufflevector(ac, bd, 1, 5, 3, 7);
}

// Two sums over a row.
struct Sums {
    double value[2];
};

constexpr int unrolled = 4;
constexpr int64_t block_size = lanes * unrolled * 16;

// add(position, read, sums[count]) adds the terms of columns start <= i < stop, sixteen at a time or fewer, as `read`
// reads; where it reads none they must be 0.
template <class A, int count, class Add>
[[gnu::always_inline]] inline void add_block(int64_t start, int64_t stop, Lanes<double>* wide, const Add& add) {
    Lanes<A> narrow[unrolled][count];
    for (auto& sums : narrow) {
        for (auto& sum : sums) sum = Lanes<A>::all(0);
    }
    int64_t i = start;
    for (; i + lanes * unrolled <= stop; i += lanes * unrolled) {
#pragma GCC unroll 4
        for (int j = 0; j < unrolled; ++j) {
            add(i + j * lanes, Turn(j), narrow[j]);
        }
    }
    for (; i + lanes <= stop; i += lanes) add(i, Whole{}, narrow[0]);
    // After the loops, so that only rows of such a length wait for what the call moves out of the registers.
    if (i < stop) add(i, Part{stop - i}, narrow[0]);
    for (int k = 0; k < count; ++k) {
        wide[k] = wide[k] + widened((narrow[0][k] + narrow[1][k]) + (narrow[2][k] + narrow[3][k]));
    }
}

// Four accumulators for each of two sums are all the registers that AVX2 has; then each is taken by itself.
constexpr bool sums_together = Instructions::bytes >= 64;

// Lanes of sums over a row: of blocks in the arithmetic type, of the blocks in float64. A block is short, so that the
// sum of a million numbers is as good as that of a thousand, and equal numbers sum without any rounding.
//
// Each add(position, read, sum) adds the terms of one sum.
template <class A, class... Add>
[[gnu::always_inline]] inline void sum_over_row(int64_t n, Lanes<double>* wide, const Add&... add) {
    constexpr int count = sizeof...(Add);
    for (int k = 0; k < count; ++k) wide[k] = Lanes<double>::all(0);
    for (int64_t start = 0; start < n; start += block_size) {
        const int64_t stop = n - start < block_size ? n : start + block_size;
        if constexpr (sums_together) {
            add_block<A, count>(start, stop, wide, [&](int64_t i, auto read, Lanes<A>* sums) {
                (add(i, read, *sums++), ...);
            });
        } else {
            Lanes<double>* of = wide;
            (add_block<A, 1>(start, stop, of++, [&](int64_t i, auto read, Lanes<A>* sum) { add(i, read, *sum); }), ...);
        }
    }
}

// Lanes of the sum of x * x.
template <class T>
[[gnu::always_inline]] inline void square_lanes(const T* x, int64_t n, Lanes<double>* sum) {
    using A = Arithmetic<T>;
    sum_over_row<A>(n, sum, [&](int64_t i, auto read, Lanes<A>& square) {
        Lanes<A> value = read.template any<A>(x + i);
        square = fused(value, value, square);
    });
}

// Lanes of the sums of x, in float64 throughout, and of x * x.
[[gnu::always_inline]] inline void sum_and_square_lanes(const float* x, int64_t n, Lanes<double>* sums) {
    Lanes<double> sum[2] = {Lanes<double>::all(0), Lanes<double>::all(0)};
    sum_over_row<float>(
        n, sums,
        [&](int64_t i, auto read, Lanes<float>&) {
            Lanes<double>& half = sum[read.turn % 2];
            half = half + read.template get<double>(x + i);
        },
        [&](int64_t i, auto read, Lanes<float>& square) {
            Lanes<float> value = read.template get<float>(x + i);
            square = fused(value, value, square);
        });
    sums[0] = sum[0] + sum[1];
}

// The same of 16-bit numbers, which are short enough for a block of them to sum with hardly a rounding, and of float64.
template <class T>
[[gnu::always_inline]] inline void sum_and_square_lanes(const T* x, int64_t n, Lanes<double>* sums) {
    using A = Arithmetic<T>;
    sum_over_row<A>(
        n, sums,
        [&](int64_t i, auto read, Lanes<A>& sum) { sum = sum + read.template any<A>(x + i); },
        [&](int64_t i, auto read, Lanes<A>& square) {
            Lanes<A> value = read.template any<A>(x + i);
            square = fused(value, value, square);
        });
}

}  // namespace
}  // namespace normkit

// Sums over a row, in an order that depends on its length alone.
#pragma once

#include "lanes.h"

namespace normkit {
namespace {

// The sum of the lanes: halves are added until one number is left.
[[gnu::always_inline]] inline double total(Lanes<double> value) {
    constexpr int in_register = Lanes<double>::in_register;
    for (int width = Lanes<double>::registers / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) value.part[i] += value.part[i + width];
    }
    double some[in_register];
    store_register(some, value.part[0]);
    for (int width = in_register / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) some[i] += some[i + width];
    }
    return some[0];
}

// Sums over a row: of blocks in the arithmetic type, of the blocks in float64. A block is short, so that the sum
// of a million numbers is as good as that of a thousand, and equal numbers sum without any rounding.
template <int count>
struct Sums {
    double value[count];
};

constexpr int unrolled = 4;
constexpr int64_t block_size = lanes * unrolled * 16;

// add(position, read, sums[count]) adds the terms at 16 positions, or fewer, as `read` reads; where it reads none they
// must be 0.
template <class A, int count, class Add>
[[gnu::always_inline]] inline Sums<count> sum_over_row(int64_t n, const Add& add) {
    Lanes<double> wide[count];
    for (int k = 0; k < count; ++k) wide[k] = Lanes<double>::all(0);
    for (int64_t start = 0; start < n; start += block_size) {
        int64_t stop = n - start < block_size ? n : start + block_size;
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
        for (; i < stop; i += lanes) {
            if (i + lanes <= stop) add(i, Whole{}, narrow[0]);
            else add(i, Part{stop - i}, narrow[0]);
        }
        for (int k = 0; k < count; ++k) {
            wide[k] = wide[k] + widened((narrow[0][k] + narrow[1][k]) + (narrow[2][k] + narrow[3][k]));
        }
    }
    Sums<count> sums;
    for (int k = 0; k < count; ++k) sums.value[k] = total(wide[k]);
    return sums;
}

// Sums of x, in float64 throughout, and of x * x.
[[gnu::always_inline]] inline Sums<2> sum_and_square(const float* x, int64_t n) {
    Lanes<double> sum[2] = {Lanes<double>::all(0), Lanes<double>::all(0)};
    auto square = sum_over_row<float, 1>(n, [&](int64_t i, auto read, Lanes<float>* sums) {
        Lanes<float> value = read.template get<float>(x + i);
        Lanes<double>& half = sum[read.turn % 2];
        half = half + read.template get<double>(x + i);
        sums[0] = fused(value, value, sums[0]);
    });
    return {total(sum[0] + sum[1]), square.value[0]};
}

// The same of 16-bit numbers, which are short enough for a block of them to sum with hardly a rounding, and of float64.
template <class T>
[[gnu::always_inline]] inline Sums<2> sum_and_square(const T* x, int64_t n) {
    using A = Arithmetic<T>;
    return sum_over_row<A, 2>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
        Lanes<A> value = read.template any<A>(x + i);
        sums[0] = sums[0] + value;
        sums[1] = fused(value, value, sums[1]);
    });
}

}  // namespace
}  // namespace normkit

// What the columns of backward need of each row: its statistics, and sums over the row; four rows at once where they are
// of the usual size. backward.h has the formula.
#pragma once

#include "extreme.h"
#include "kernels.h"
#include "lanes.h"
#include "sums.h"

namespace normkit {
namespace {

// `RowTerms` of four rows in the arithmetic type; `whole_mean` and `whole_inverse` are not rounded to it.
template <class A>
struct RowGradients {
    A mean[rows_at_once], centre[rows_at_once], slope[rows_at_once], minus_slope[rows_at_once], inverse[rows_at_once];
    A scale[rows_at_once], scale_rest[rows_at_once];  // together more digits than one has
    double whole_mean[rows_at_once], remainder[rows_at_once], whole_inverse[rows_at_once];

    void set(int r, const RowTerms& row) {
        mean[r] = row.mean;
        centre[r] = row.centre;
        slope[r] = row.slope;
        minus_slope[r] = -slope[r];
        inverse[r] = row.inverse;
        scale[r] = row.scale;
        scale_rest[r] = row.scale - scale[r];
        whole_mean[r] = row.mean;
        remainder[r] = row.remainder;
        whole_inverse[r] = row.inverse;
    }
};

// Rows whose products might leave the arithmetic type.
template <class A>
inline bool is_extreme(double inverse) {
    if (sizeof(A) == 8) return !(inverse <= 0x1p500 && inverse >= 0x1p-500);
    return !(inverse <= 0x1p24 && inverse >= 0x1p-30);
}

// Too small for its digits to fit a float32.
template <class A>
inline bool is_lost(A value) {
    return sizeof(A) == 4 && value != 0 && __builtin_fabs(value) < 0x1p-100;
}

// What `quarter` leaves of the sums of h, if the norm centres, and of h * (x - mean).
template <bool centred, class T, class D, class A>
[[gnu::noinline]] void gradient_sums(const T* x, const D* dy, const A* gains, A mean, int64_t n, double* of_h,
                                     double* of_product) {
    auto h_at = [&](int64_t i, auto read) __attribute__((always_inline)) {
        Lanes<A> h = read.template get<A>(dy + i);
        if (gains) h = h * read.template get<A>(gains + i);
        return h;
    };
    Lanes<double> sums[2];
    if constexpr (centred) {
        const Lanes<A> means = Lanes<A>::all(mean);
        sum_over_row<A>(
            n, sums, [&](int64_t i, auto read, Lanes<A>& sum) { sum = sum + h_at(i, read); },
            [&](int64_t i, auto read, Lanes<A>& sum) { sum = fused(h_at(i, read), read.get(x + i, mean) - means, sum); });
        quarter(sums[0], of_h);
        quarter(sums[1], of_product);
    } else {
        sum_over_row<A>(n, sums, [&](int64_t i, auto read, Lanes<A>& sum) {
            sum = fused(h_at(i, read), read.template get<A>(x + i), sum);
        });
        quarter(sums[0], of_product);
    }
}

// What the columns of row r need.
template <class T, class D>
RowTerms row_terms(const Backward& task, const Arithmetic<T>* gains, int64_t r) {
    using A = Arithmetic<T>;
    const Norm& norm = task.norm;
    const int64_t width = statistics_width(task.x_type);
    const double* kept = task.statistics + r * width;
    const double inverse = kept[width - 1], remainder = width == 3 ? kept[1] : 0;
    RowTerms row;
    row.is_extreme = is_extreme<A>(inverse);
    if (row.is_extreme) return row;
    row.mean = kept[0];
    row.remainder = remainder;
    row.inverse = inverse;
    if (!task.dx) return row;
    const A mean = kept[0];
    const double left = (kept[0] - mean) + remainder;
    const T* x = static_cast<const T*>(task.x) + task.x_rows.offset(r);
    const D* dy = static_cast<const D*>(task.dy) + task.dy_rows.offset(r);
    double of_h[4] = {}, of_product[4];
    if (norm.centred) gradient_sums<true>(x, dy, gains, mean, norm.n, of_h, of_product);
    else gradient_sums<false>(x, dy, gains, mean, norm.n, of_h, of_product);
    const double sum = total(of_h);
    const double centre = norm.centred ? sum / norm.n : 0;
    const double product = total(of_product) - left * sum;
    const double ratio = norm.eps_placement == EpsPlacement::inside ? 1 : root_ratio(inverse, norm);
    row.slope = ratio * product * inverse * inverse / norm.divisor;
    row.centre = centre - left * row.slope;
    row.scale = norm.multiplier * inverse;
    row.is_extreme = is_lost<A>(centre) || is_lost<A>(row.slope);
    return row;
}

// Four rows, or one of the last of a block.
template <class T, class D>
struct Tile {
    int count;
    const T* x[rows_at_once];
    const D* dy[rows_at_once];
    T* dx[rows_at_once];  // null where it is not wanted, or written already
    const T* addend[rows_at_once];
    RowGradients<Arithmetic<T>> rows;
    bool is_extreme[rows_at_once];
    bool is_usual;    // no row is
    bool may_be_nan;  // some number of dx
    // The rows of the next tile are fetched from memory meanwhile.
    bool is_next;
    const T* next_x[rows_at_once];
    const D* next_dy[rows_at_once];
};

// `row_terms` of four rows at once; false if one of them is extreme, not finite, or has eps outside of the root.
template <class T, class D>
[[gnu::always_inline]] inline bool four_terms(const Backward& task, const Arithmetic<T>* gains, int64_t first,
                                              Tile<T, D>& tile) {
    const Norm& norm = task.norm;
    if (sizeof(T) == 8 || norm.eps_placement != EpsPlacement::inside || !task.dx) return false;
    RowGradients<Arithmetic<T>>& rows = tile.rows;
    const double* kept = task.statistics + first * 2;
    const Four mean = {kept[0], kept[2], kept[4], kept[6]}, inverse = {kept[1], kept[3], kept[5], kept[7]};
    const FourFloats short_mean = __builtin_convertvector(mean, FourFloats);
    auto is_usual = (inverse <= 0x1p24) & (inverse >= 0x1p-30);
    Four centre, slope;
    {
        Quarters of_h, of_product;
        Four sum = {}, product;
        for (int r = 0; r < rows_at_once; ++r) {
            const Arithmetic<T> pivot = short_mean[r];
            if (norm.centred) {
                gradient_sums<true>(tile.x[r], tile.dy[r], gains, pivot, norm.n, of_h.row[r], of_product.row[r]);
            } else {
                gradient_sums<false>(tile.x[r], tile.dy[r], gains, pivot, norm.n, of_h.row[r], of_product.row[r]);
            }
        }
        totals(of_product, product);
        if (norm.centred) totals(of_h, sum);
        const Four left = mean - __builtin_convertvector(short_mean, Four);
        const Four whole = sum / static_cast<double>(norm.n);
        slope = (product - left * sum) * inverse * inverse / norm.divisor;
        centre = whole - left * slope;
        for (const Four& value : {whole, slope}) {
            const Four size = value < 0 ? -value : value;
            is_usual &= (size == 0) | ((size >= 0x1p-100) & (size <= 0x1p120));
        }
    }
    if (!all_four(is_usual)) return false;
    const Four scale = norm.multiplier * inverse;
    const FourFloats short_scale = __builtin_convertvector(scale, FourFloats);
    auto keep = [](auto* to, const auto& from) __attribute__((always_inline)) {
        for (int r = 0; r < rows_at_once; ++r) to[r] = from[r];
    };
    keep(rows.mean, short_mean);
    keep(rows.centre, __builtin_convertvector(centre, FourFloats));
    keep(rows.slope, __builtin_convertvector(slope, FourFloats));
    keep(rows.minus_slope, -__builtin_convertvector(slope, FourFloats));
    keep(rows.inverse, __builtin_convertvector(inverse, FourFloats));
    keep(rows.scale, short_scale);
    keep(rows.scale_rest, __builtin_convertvector(scale - __builtin_convertvector(short_scale, Four), FourFloats));
    keep(rows.whole_mean, mean);
    keep(rows.remainder, Four{});
    keep(rows.whole_inverse, inverse);
    tile.is_usual = true;
    tile.may_be_nan = task.addend;
    return true;
}

// Short rows are fetched by the CPU itself, and long ones must leave the second cache room for those in work.
constexpr int64_t least_bytes_ahead = 6144, most_bytes_ahead = 65536;

// Rows first <= r < last of a block, whose terms are not known yet.
template <class T, class D>
[[gnu::always_inline]] inline void place_tile(const Backward& task, int64_t first, int64_t last, Tile<T, D>& tile) {
    const int64_t bytes = task.norm.n * static_cast<int64_t>(sizeof(T));
    tile.count = last - first;
    tile.is_next = bytes >= least_bytes_ahead && bytes <= most_bytes_ahead && last + rows_at_once <= task.rows;
    for (int r = 0; r < tile.count; ++r) {
        const int64_t row = first + r;
        tile.x[r] = static_cast<const T*>(task.x) + task.x_rows.offset(row);
        tile.dy[r] = static_cast<const D*>(task.dy) + task.dy_rows.offset(row);
        tile.dx[r] = task.dx ? static_cast<T*>(task.dx) + task.dx_rows.offset(row) : nullptr;
        tile.addend[r] = task.addend ? static_cast<const T*>(task.addend) + task.addend_rows.offset(row) : nullptr;
        tile.is_extreme[r] = false;
        if (!tile.is_next) continue;
        tile.next_x[r] = static_cast<const T*>(task.x) + task.x_rows.offset(row + rows_at_once);
        tile.next_dy[r] = static_cast<const D*>(task.dy) + task.dy_rows.offset(row + rows_at_once);
    }
}

template <class T, class D>
[[gnu::noinline]] void set_tile(const RowTerms* terms, Tile<T, D>& tile) {
    tile.is_usual = tile.may_be_nan = true;
    for (int r = 0; r < tile.count; ++r) {
        tile.is_extreme[r] = terms[r].is_extreme;
        tile.rows.set(r, tile.is_extreme[r] ? RowTerms() : terms[r]);
        if (!tile.is_extreme[r]) continue;
        // Of such a row the columns take no more than its part of dbias.
        tile.dx[r] = nullptr;
        tile.is_usual = false;
    }
}

}  // namespace
}  // namespace normkit

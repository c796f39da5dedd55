// Backward of a block of rows, and its part of the gradients of gain and bias.
//
//   z = (x - m) / s, h = dy * gain
//   dx = multiplier / s * (h - mean(h) - z * q * sum(h * z) / divisor) + addend
//   dgain = multiplier * sum over rows of dy * z,  dbias = sum over rows of dy
//
// q = s * ds/dv * 2: 1 with eps inside the root. Four rows at a time: first the two sums of each, then all four column
// by column, so that gain, and the sums of its gradient, are read and written once for four rows.
#pragma once

#include "extreme.h"
#include "kernels.h"
#include "lanes.h"
#include "parameters.h"
#include "sums.h"

namespace normkit {
namespace {

// `RowTerms` in the arithmetic type; `whole_mean` and `whole_inverse` are not rounded to it.
template <class A>
struct RowGradient {
    A mean, centre, slope, inverse;
    A scale, scale_rest;  // together more digits than one has
    double whole_mean, remainder, whole_inverse;
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

// Sums of h and h * (x - mean).
template <bool centred, class T, class D, class A>
[[gnu::noinline]] Sums<2> gradient_sums(const T* x, const D* dy, const A* gains, A mean, int64_t n) {
    auto h_at = [&](int64_t i, auto read) __attribute__((always_inline)) {
        Lanes<A> h = read.template get<A>(dy + i);
        if (gains) h = h * read.template get<A>(gains + i);
        return h;
    };
    if constexpr (centred) {
        return sum_over_row<A, 2>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
            Lanes<A> h = h_at(i, read);
            sums[0] = sums[0] + h;
            sums[1] = fused(h, read.get(x + i, mean) - Lanes<A>::all(mean), sums[1]);
        });
    } else {
        auto sum = sum_over_row<A, 1>(n, [&](int64_t i, auto read, Lanes<A>* sums) {
            sums[0] = fused(h_at(i, read), read.template get<A>(x + i), sums[0]);
        });
        return {0, sum.value[0]};
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
    Sums<2> sums = norm.centred ? gradient_sums<true>(x, dy, gains, mean, norm.n)
                                : gradient_sums<false>(x, dy, gains, mean, norm.n);
    const double centre = norm.centred ? sums.value[0] / norm.n : 0;
    const double product = sums.value[1] - left * sums.value[0];
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
    const T* x[rows_at_once];
    const D* dy[rows_at_once];
    T* dx[rows_at_once];  // null where it is not wanted, or written already
    const T* addend[rows_at_once];
    RowGradient<Arithmetic<T>> row[rows_at_once];
    // The rows of the next tile, which are fetched from memory meanwhile; null where there are none.
    const T* next_x[rows_at_once];
    const D* next_dy[rows_at_once];
};

// Sums over the rows of a block so far; null where they are not wanted. The first tile begins them.
struct BlockSums {
    double* dgain;
    double* dbias;
    bool is_first;
};

// `width` sixteens of columns of `count` rows from row `first` on. S is the type in which rows are added up.
template <class S, int width, class T, class D, class Read>
[[gnu::always_inline]] inline void tile_columns(const Tile<T, D>& tile, bool centred, int first, int count,
                                                const Arithmetic<T>* gains, const BlockSums& sums, int64_t start,
                                                Read read) {
    using A = Arithmetic<T>;
    const bool wants_sums = sums.dgain || sums.dbias;
    Lanes<A> gain[width], dx[rows_at_once][width] = {};
    Lanes<S> of_gain[width], of_bias[width];
#pragma GCC unroll 2
    for (int w = 0; w < width; ++w) {
        const int64_t i = start + w * lanes;
        gain[w] = gains ? read.template get<A>(gains + i) : Lanes<A>::all(1);
        of_gain[w] = of_bias[w] = Lanes<S>::all(0);
#pragma GCC unroll unrolled_rows
        for (int r = first; r < first + count; ++r) {
            const RowGradient<A>& row = tile.row[r];
            const Lanes<A> dy = read.template get<A>(tile.dy[r] + i);
            Lanes<A> d = read.template get<A>(tile.x[r] + i);
            if (wants_sums) {
                if constexpr (std::is_same_v<S, A> && sizeof(A) == 4) {
                    Lanes<A> z = centred ? d - Lanes<A>::all(row.mean) : d;
                    of_gain[w] = fused(dy, z * Lanes<A>::all(row.inverse), of_gain[w]);
                    if (centred) of_bias[w] = of_bias[w] + dy;
                } else {
                    const Lanes<S> wide = read.template get<S>(tile.dy[r] + i);
                    Lanes<S> z = read.template get<S>(tile.x[r] + i);
                    if (centred) z = z - Lanes<S>::all(row.whole_mean);
                    if (centred && sizeof(A) == 8) z = z - Lanes<S>::all(row.remainder);
                    of_gain[w] = fused(wide, z * Lanes<S>::all(row.whole_inverse), of_gain[w]);
                    if (centred) of_bias[w] = of_bias[w] + wide;
                }
            }
            Lanes<A> whole;
            if (centred) {
                // Not fused with the product: h less its own mean is 0 where it should be.
                d = d - Lanes<A>::all(row.mean);
                whole = dy * gain[w] - fused(d, Lanes<A>::all(row.slope), Lanes<A>::all(row.centre));
            } else {
                whole = fused(dy, gain[w], d * Lanes<A>::all(-row.slope));
            }
            Lanes<A>& result = dx[r - first][w];
            if constexpr (sizeof(T) == 4) {
                result = fused(whole, Lanes<A>::all(row.scale), whole * Lanes<A>::all(row.scale_rest));
            } else {
                result = whole * Lanes<A>::all(row.scale);
            }
            if (tile.addend[r]) result = result + read.template get<A>(tile.addend[r] + i);
        }
    }
#pragma GCC unroll unrolled_rows
    for (int r = first; r < first + count; ++r) {
        if (tile.next_x[r]) {
            __builtin_prefetch(tile.next_x[r] + start, 0, 2);
            __builtin_prefetch(tile.next_dy[r] + start, 0, 2);
        }
        if (!tile.dx[r]) continue;
        if constexpr (width == 2) store_two(tile.dx[r] + start, dx[r - first][0], dx[r - first][1]);
        else read.put(tile.dx[r] + start, dx[r - first][0]);
    }
    auto keep = [&](double* sum, const Lanes<S>& term) __attribute__((always_inline)) {
        const Lanes<double> wide = widened(term);
        read.put(sum, sums.is_first && first == 0 ? wide : read.template get<double>(sum) + wide);
    };
    for (int w = 0; w < width; ++w) {
        if (sums.dgain) keep(sums.dgain + start + w * lanes, of_gain[w]);
        if (sums.dbias) keep(sums.dbias + start + w * lanes, of_bias[w]);
    }
}

// As many columns of four rows as whole registers take; where they end.
template <bool centred, class S, class T, class D>
[[gnu::noinline]] int64_t tile_most(const Tile<T, D>& tile, const Arithmetic<T>* gains, const BlockSums& sums,
                                    Columns columns) {
    constexpr int width = sizeof(T) == 2 ? 2 : 1;
    int64_t i = columns.begin;
    for (; i + width * lanes <= columns.end; i += width * lanes) {
        tile_columns<S, width>(tile, centred, 0, rows_at_once, gains, sums, i, Whole{});
    }
    return i;
}

// Any number of rows, one by one, or of all four what `tile_most` leaves.
template <class S, class T, class D>
[[gnu::noinline]] void tile_rest(const Tile<T, D>& tile, bool centred, int count, const Arithmetic<T>* gains,
                                 const BlockSums& sums, Columns columns) {
    const int together = count == rows_at_once ? rows_at_once : 1;
    by_sixteens(columns.begin, columns.end, [&](int64_t i, auto read) {
        for (int r = 0; r < count; r += together) {
            tile_columns<S, 1>(tile, centred, r, together, gains, sums, i, read);
        }
    });
}

template <class S, class T, class D>
void tile_by(const Tile<T, D>& tile, bool centred, int count, const Arithmetic<T>* gains, const BlockSums& sums,
             Columns columns) {
    if (count == rows_at_once) {
        columns.begin = centred ? tile_most<true, S>(tile, gains, sums, columns)
                                : tile_most<false, S>(tile, gains, sums, columns);
    }
    tile_rest<S>(tile, centred, count, gains, sums, columns);
}

// Short rows are fetched by the CPU itself, and long ones must leave the second cache room for those in work.
constexpr int64_t least_bytes_ahead = 6144, most_bytes_ahead = 65536;

// Some columns of one tile: rows first <= r < last of a block, whose terms are given.
template <class T, class D>
void tile_rows(const Backward& task, const Arithmetic<T>* gains, const BlockSums& sums, int64_t first, int64_t last,
               const RowTerms* terms, Columns columns) {
    using A = Arithmetic<T>;
    const int64_t bytes = task.norm.n * static_cast<int64_t>(sizeof(T));
    const bool fetches = bytes >= least_bytes_ahead && bytes <= most_bytes_ahead;
    auto x_at = [&](int64_t r) { return static_cast<const T*>(task.x) + task.x_rows.offset(r); };
    auto dy_at = [&](int64_t r) { return static_cast<const D*>(task.dy) + task.dy_rows.offset(r); };
    Tile<T, D> tile;
    for (int64_t r = first; r < last; ++r) {
        const int64_t k = r - first;
        RowTerms row = terms[k];
        tile.x[k] = x_at(r);
        tile.dy[k] = dy_at(r);
        tile.dx[k] = task.dx ? static_cast<T*>(task.dx) + task.dx_rows.offset(r) : nullptr;
        tile.addend[k] = task.addend ? static_cast<const T*>(task.addend) + task.addend_rows.offset(r) : nullptr;
        const bool is_next = fetches && r + rows_at_once < task.rows;
        tile.next_x[k] = is_next ? x_at(r + rows_at_once) : nullptr;
        tile.next_dy[k] = is_next ? dy_at(r + rows_at_once) : nullptr;
        if (row.is_extreme) {
            // Of such a row the columns take no more than its part of dbias.
            row = {};
            tile.dx[k] = nullptr;
        }
        const A scale = row.scale;
        tile.row[k] = {static_cast<A>(row.mean), static_cast<A>(row.centre), static_cast<A>(row.slope),
                       static_cast<A>(row.inverse), scale, static_cast<A>(row.scale - scale), row.mean, row.remainder,
                       row.inverse};
    }
    const bool centred = task.norm.centred || sums.dbias;
    const int count = last - first;
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, D>) {
        if (task.sums_in_float32) return tile_by<float>(tile, centred, count, gains, sums, columns);
    }
    tile_by<double>(tile, centred, count, gains, sums, columns);
}

inline BlockSums block_sums(const Backward& task, int64_t block, bool is_first) {
    const int64_t start = block * task.norm.n;
    return {task.dgain ? task.dgain + start : nullptr, task.dbias ? task.dbias + start : nullptr, is_first};
}

template <class T, class D>
void backward_blocks(const Backward& task, int64_t first_block, int64_t last_block) {
    const Expanded<Arithmetic<T>> gain(task.norm.gain, task.norm.n);
    const int64_t in_block = rows_per_block(task.rows);
    for (int64_t block = first_block; block < last_block; ++block) {
        const int64_t begin = block * in_block, end = begin + in_block < task.rows ? begin + in_block : task.rows;
        for (int64_t first = begin; first < end; first += rows_at_once) {
            const int64_t last = first + rows_at_once < end ? first + rows_at_once : end;
            const BlockSums sums = block_sums(task, block, first == begin);
            RowTerms terms[rows_at_once];
            for (int64_t r = first; r < last; ++r) terms[r - first] = row_terms<T, D>(task, gain.values(), r);
            tile_rows<T, D>(task, gain.values(), sums, first, last, terms, {0, task.norm.n});
            for (int64_t r = first; r < last; ++r) {
                if (terms[r - first].is_extreme) extreme_gradient(task, gain.values(), r, sums.dgain);
            }
        }
    }
}

template <class T, class D>
void measure_rows(const Backward& task, int64_t begin, int64_t end, RowTerms* terms) {
    const Expanded<Arithmetic<T>> gain(task.norm.gain, task.norm.n);
    for (int64_t r = begin; r < end; ++r) terms[r] = row_terms<T, D>(task, gain.values(), r);
}

template <class T, class D>
void backward_columns(const Backward& task, const RowTerms* terms, Columns columns) {
    const Expanded<Arithmetic<T>> gain(task.norm.gain, task.norm.n);
    for (int64_t first = 0; first < task.rows; first += rows_at_once) {
        const int64_t last = first + rows_at_once < task.rows ? first + rows_at_once : task.rows;
        tile_rows<T, D>(task, gain.values(), block_sums(task, 0, first == 0), first, last, terms + first, columns);
    }
}

// The sums of all blocks, in their order, as a gradient of a parameter's dtype.
template <class P>
void add_blocks(const Reduction& task, Columns columns) {
    P* to = static_cast<P*>(task.result);
    by_sixteens(columns.begin, columns.end, [&](int64_t i, auto read) {
        Lanes<double> sum = Lanes<double>::all(0);
        for (int64_t block = 0; block < task.count; ++block) {
            sum = sum + read.template get<double>(task.blocks + block * task.n + i);
        }
        read.put(to + i, sum * Lanes<double>::all(task.multiplier));
    });
}

}  // namespace
}  // namespace normkit

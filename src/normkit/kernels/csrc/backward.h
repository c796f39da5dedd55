// Backward of a block of rows, and its part of the gradients of gain and bias.
//
//   z = (x - m) / s, h = dy * gain
//   dx = multiplier / s * (h - mean(h) - z * q * sum(h * z) / divisor) + addend
//   dgain = multiplier * sum over rows of dy * z,  dbias = sum over rows of dy
//
// q = s * ds/dv * 2: 1 with eps inside the root. Four rows at a time: first the two sums of each, then all four column
// by column, so that gain, and the sums of its gradient, are read and written once for four rows.
#pragma once

#include "alternating.h"
#include "parameters.h"
#include "row_terms.h"

namespace normkit {
namespace {

// Sums over the rows of a block so far; null where they are not wanted. The first tile begins them.
struct BlockSums {
    double* dgain;
    double* dbias;
    bool is_first;
};

// How columns of four usual rows are taken, or of any rows. Alternating: as their even and their odd numbers.
enum class Way { usual, alternating, any };

// `width` sixteens of columns of `count` rows from row `first` on. S is the type in which rows are added up.
template <class S, int width, Way way, class T, class D, class Read>
[[gnu::always_inline]] inline void tile_columns(const Tile<T, D>& tile, bool centred, int first, int count,
                                                const Arithmetic<T>* gains, const BlockSums& sums, int64_t start,
                                                Read read) {
    using A = Arithmetic<T>;
    constexpr bool alternating = way == Way::alternating;
    const bool wants_sums = sums.dgain || sums.dbias;
    const RowGradients<A>& rows = tile.rows;
    auto at = [&]<class As>(As, const auto* from, int w) __attribute__((always_inline)) {
        if constexpr (alternating) return alternate<As>(from + start, w);
        else return read.template get<As>(from + start + w * lanes);
    };
    Lanes<A> gain[width], of_row[rows_at_once][width];
    Lanes<S> of_gain[width], of_bias[width];
#pragma GCC unroll 2
    for (int w = 0; w < width; ++w) {
        gain[w] = gains ? at(A(), gains, w) : Lanes<A>::all(1);
        of_gain[w] = of_bias[w] = Lanes<S>::all(0);
    }
#pragma GCC unroll unrolled_rows
    for (int r = first; r < first + count; ++r) {
        auto& dx = of_row[r - first];
#pragma GCC unroll 2
        for (int w = 0; w < width; ++w) {
            const Lanes<A> dy = at(A(), tile.dy[r], w);
            Lanes<A> d = at(A(), tile.x[r], w);
            if (wants_sums) {
                if constexpr (std::is_same_v<S, A> && sizeof(A) == 4) {
                    Lanes<A> z = centred ? d - Lanes<A>::all(rows.mean[r]) : d;
                    of_gain[w] = fused(dy, z * Lanes<A>::all(rows.inverse[r]), of_gain[w]);
                    if (centred) of_bias[w] = of_bias[w] + dy;
                } else {
                    const Lanes<S> wide = at(S(), tile.dy[r], w);
                    Lanes<S> z = at(S(), tile.x[r], w);
                    if (centred) z = z - Lanes<S>::all(rows.whole_mean[r]);
                    if (centred && sizeof(A) == 8) z = z - Lanes<S>::all(rows.remainder[r]);
                    of_gain[w] = fused(wide, z * Lanes<S>::all(rows.whole_inverse[r]), of_gain[w]);
                    if (centred) of_bias[w] = of_bias[w] + wide;
                }
            }
            Lanes<A> whole;
            if (centred) {
                // Not fused with the product: h less its own mean is 0 where it should be.
                d = d - Lanes<A>::all(rows.mean[r]);
                whole = dy * gain[w] - fused(d, Lanes<A>::all(rows.slope[r]), Lanes<A>::all(rows.centre[r]));
            } else {
                whole = fused(dy, gain[w], d * Lanes<A>::all(rows.minus_slope[r]));
            }
            if constexpr (sizeof(T) == 4) {
                dx[w] = fused(whole, Lanes<A>::all(rows.scale[r]), whole * Lanes<A>::all(rows.scale_rest[r]));
            } else {
                dx[w] = whole * Lanes<A>::all(rows.scale[r]);
            }
            if (tile.addend[r]) dx[w] = dx[w] + at(A(), tile.addend[r], w);
        }
        if constexpr (alternating) {
            if (tile.dx[r]) store_alternate(tile.dx[r] + start, dx[0], dx[1], tile.may_be_nan);
        }
    }
    // Not each behind its row, if registers suffice: where rows are a multiple of 4 KB apart, the CPU takes the next row's
    // loads for readings of what was just stored.
#pragma GCC unroll unrolled_rows
    for (int r = first; r < first + count && !alternating; ++r) {
        const auto& dx = of_row[r - first];
        // Of usual rows all are wanted, or none.
        if (!tile.dx[way == Way::any ? r : first]) continue;
        if constexpr (width == 2) store_two(tile.dx[r] + start, dx[0], dx[1]);
        else read.put(tile.dx[r] + start, dx[0]);
    }
    if (tile.is_next) {
        for (int r = first; r < first + count; ++r) {
            __builtin_prefetch(tile.next_x[r] + start, 0, 2);
            __builtin_prefetch(tile.next_dy[r] + start, 0, 2);
        }
    }
    auto keep = [&](double* to, const Lanes<S>* terms, int w) __attribute__((always_inline)) {
        double* sum = to + start + w * lanes;
        Lanes<double> wide;
        if constexpr (alternating) wide = widened(in_order(terms[0], terms[1], w));
        else wide = widened(terms[w]);
        read.put(sum, sums.is_first && first == 0 ? wide : read.template get<double>(sum) + wide);
    };
    for (int w = 0; w < width; ++w) {
        if (sums.dgain) keep(sums.dgain, of_gain, w);
        if (sums.dbias) keep(sums.dbias, of_bias, w);
    }
}

// As many columns of four usual rows, or of one, as whole registers take; where they end.
template <bool centred, int count, class S, class T, class D>
[[gnu::noinline]] int64_t tile_most(const Tile<T, D>& tile, int first, const Arithmetic<T>* gains,
                                    const BlockSums& sums, Columns columns) {
    constexpr bool is_alternating = alternates<T, D> && std::is_same_v<S, float> && count == rows_at_once;
    constexpr Way way = is_alternating ? Way::alternating : Way::usual;
    constexpr int width = way == Way::alternating || (sizeof(T) == 2 && Instructions::converts_bfloat16) ? 2 : 1;
    int64_t i = columns.begin;
    for (; i + width * lanes <= columns.end; i += width * lanes) {
        tile_columns<S, width, way>(tile, centred, first, count, gains, sums, i, Whole{});
    }
    return i;
}

// Any number of rows, one by one, or of all four what `tile_most` leaves.
template <class S, class T, class D>
[[gnu::noinline]] void tile_rest(const Tile<T, D>& tile, bool centred, const Arithmetic<T>* gains, const BlockSums& sums,
                                 Columns columns) {
    const int together = tile.count == rows_at_once ? rows_at_once : 1;
    by_sixteens(columns.begin, columns.end, [&](int64_t i, auto read) {
        for (int r = 0; r < tile.count; r += together) {
            tile_columns<S, 1, Way::any>(tile, centred, r, together, gains, sums, i, read);
        }
    });
}

template <class S, class T, class D>
void tile_by(const Tile<T, D>& tile, bool centred, const Arithmetic<T>* gains, const BlockSums& sums, Columns columns) {
    int64_t done = columns.begin;
    if (tile.is_usual && tile.count == rows_at_once) {
        done = centred ? tile_most<true, rows_at_once, S>(tile, 0, gains, sums, columns)
                       : tile_most<false, rows_at_once, S>(tile, 0, gains, sums, columns);
    } else if (tile.is_usual) {
        for (int r = 0; r < tile.count; ++r) {
            done = centred ? tile_most<true, 1, S>(tile, r, gains, sums, columns)
                           : tile_most<false, 1, S>(tile, r, gains, sums, columns);
        }
    }
    columns.begin = done;
    if (columns.begin < columns.end) tile_rest<S>(tile, centred, gains, sums, columns);
}

// Some columns of one tile.
template <class T, class D>
void tile_rows(const Backward& task, const Arithmetic<T>* gains, const BlockSums& sums, const Tile<T, D>& tile,
               Columns columns) {
    const bool centred = task.norm.centred || sums.dbias;
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, D>) {
        if (task.sums_in_float32) return tile_by<float>(tile, centred, gains, sums, columns);
    }
    tile_by<double>(tile, centred, gains, sums, columns);
}

inline BlockSums block_sums(const Backward& task, int64_t block, bool is_first) {
    const int64_t start = block * task.norm.n;
    return {task.dgain ? task.dgain + start : nullptr, task.dbias ? task.dbias + start : nullptr, is_first};
}

template <class T, class D>
void backward_blocks(const Backward& task, int64_t first_block, int64_t last_block) {
    const Expanded<Arithmetic<T>> gain(task.norm.gain, task.norm.n);
    const int64_t in_block = rows_per_block(task.rows);
    const int tiles = tiles_together(task.norm.n * sizeof(T));
    for (int64_t block = first_block; block < last_block; ++block) {
        const int64_t begin = block * in_block, end = begin + in_block < task.rows ? begin + in_block : task.rows;
        for (int64_t first = begin; first < end; first += tiles * rows_at_once) {
            Tile<T, D> tile[most_tiles];
            int count = 0;
            for (int64_t at = first; at < end && count < tiles; at += rows_at_once, ++count) {
                const int64_t last = at + rows_at_once < end ? at + rows_at_once : end;
                place_tile(task, at, last, tile[count]);
                if (last - at == rows_at_once && four_terms(task, gain.values(), at, tile[count])) continue;
                RowTerms terms[rows_at_once];
                for (int64_t r = at; r < last; ++r) terms[r - at] = row_terms<T, D>(task, gain.values(), r);
                set_tile(terms, tile[count]);
            }
            for (int k = 0; k < count; ++k) {
                const int64_t at = first + k * rows_at_once;
                const BlockSums sums = block_sums(task, block, at == begin);
                tile_rows(task, gain.values(), sums, tile[k], {0, task.norm.n});
                for (int r = 0; r < tile[k].count; ++r) {
                    if (tile[k].is_extreme[r]) extreme_gradient(task, gain.values(), at + r, sums.dgain);
                }
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
        Tile<T, D> tile;
        place_tile(task, first, last, tile);
        set_tile(terms + first, tile);
        tile_rows(task, gain.values(), block_sums(task, 0, first == 0), tile, columns);
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

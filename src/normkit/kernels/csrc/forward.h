// Forward: rows are measured, then normalized, scaled and rounded while they are still in the cache.
//
// Four rows at a time where there are as many: gain and bias are then read once for four.
#pragma once

#include "kernels.h"
#include "lanes.h"
#include "parameters.h"
#include "statistics.h"

namespace normkit {
namespace {

// The programs that have loops of their own. `any` is the whole of the spec, with roundings that are known at run time.
enum class Program { scaled, shifted, early, any };

// What is the same for every element of a row, in the arithmetic type.
template <class A>
struct RowProgram {
    A mean, remainder, scale;
    A shift;  // of the remainder, scaled
    A late_multiplier;  // where the rounding of 1 / s lets it not be part of the scale
};

template <class A>
[[gnu::always_inline]] inline RowProgram<A> row_program(const RowScale& scale, const Norm& norm, const Casts& casts) {
    RowProgram<A> row;
    row.mean = scale.mean;
    row.remainder = scale.remainder + (scale.mean - row.mean);
    row.scale = scale.inverse * norm.multiplier;
    row.shift = -(row.remainder * row.scale);
    row.late_multiplier = 1;
    if (casts.rstd_type != Type::float32) {
        row.scale = rounded_to(casts.rstd_type, Lanes<double>::all(scale.inverse)).part[0][0];
        row.late_multiplier = norm.multiplier;
    }
    return row;
}

// Null where there is none.
template <class A>
struct Affine {
    int64_t n;
    const A* gain;
    const A* bias;
};

// Without a mean and a bias these are `scaled`, bit by bit: a missing gain is 1 and a missing bias -0, which change no
// number and no sign.
template <class T, class A>
[[gnu::always_inline]] inline Lanes<A> normalized(Program program, Lanes<A> value, const RowProgram<A>& row,
                                                  const Casts& casts, const Lanes<A>& gain, const Lanes<A>& bias) {
    const Lanes<A> scale = Lanes<A>::all(row.scale);
    if (program == Program::scaled) return value * scale * gain;
    if constexpr (sizeof(T) == 2) {
        if (program == Program::early) return rounded_number<T>(value * scale) * gain;
    }
    value = value - Lanes<A>::all(row.mean);
    if (program == Program::shifted) return fused(fused(value, scale, Lanes<A>::all(row.shift)), gain, bias);
    value = rounded_to(casts.rstd_type, value - Lanes<A>::all(row.remainder)) * scale;
    value = rounded_to(casts.rstd_type, value) * Lanes<A>::all(row.late_multiplier);
    if (casts.rounds >= 1) value = rounded_to(casts.type, value);
    value = value * gain;
    if (casts.rounds >= 2) value = rounded_to(casts.type, value);
    value = value + bias;
    return casts.rounds >= 3 ? rounded_to(casts.type, value) : value;
}

// Some rows that are measured.
template <class T, class Out>
struct MeasuredRows {
    int count = 0;
    const T* x[rows_at_once];
    Out* y[rows_at_once];
    RowProgram<Arithmetic<T>> program[rows_at_once];
};

// `width` sixteens of columns of `count` rows from row `first` on.
template <int width, class T, class Out, class Read>
[[gnu::always_inline]] inline void normalize_columns(Program program, const MeasuredRows<T, Out>& rows, int first,
                                                     int count, const Affine<Arithmetic<T>>& affine,
                                                     const Casts& casts, int64_t i, Read read) {
    using A = Arithmetic<T>;
    Lanes<A> gain[width], bias[width];
    for (int w = 0; w < width; ++w) {
        gain[w] = affine.gain ? read.template get<A>(affine.gain + i + w * lanes) : Lanes<A>::all(1);
        bias[w] = affine.bias ? read.template get<A>(affine.bias + i + w * lanes) : Lanes<A>::all(-0.0);
    }
#pragma GCC unroll unrolled_rows
    for (int r = first; r < first + count; ++r) {
        Lanes<A> value[width];
        for (int w = 0; w < width; ++w) {
            value[w] = read.template get<A>(rows.x[r] + i + w * lanes);
            value[w] = normalized<T>(program, value[w], rows.program[r], casts, gain[w], bias[w]);
        }
        if constexpr (width == 2) store_two(rows.y[r] + i, value[0], value[1]);
        else read.put(rows.y[r] + i, value[0]);
    }
}

// As many columns as two registers each take; the number of them.
template <Program program, int count, class T, class Out>
[[gnu::noinline]] int64_t normalize_most(const MeasuredRows<T, Out>& rows, int first,
                                         const Affine<Arithmetic<T>>& affine, const Casts& casts) {
    int64_t i = 0;
    for (; i + 2 * lanes <= affine.n; i += 2 * lanes) {
        normalize_columns<2>(program, rows, first, count, affine, casts, i, Whole{});
    }
    return i;
}

// Any rows by any program, from column `begin` on.
template <class T, class Out>
[[gnu::noinline]] void normalize_rest(Program program, const MeasuredRows<T, Out>& rows,
                                      const Affine<Arithmetic<T>>& affine, const Casts& casts, int64_t begin) {
    by_sixteens(begin, affine.n, [&](int64_t i, auto read) {
        for (int r = 0; r < rows.count; ++r) normalize_columns<1>(program, rows, r, 1, affine, casts, i, read);
    });
}

// The program of a call.
template <class T, class Out>
Program program_of(const Norm& norm, const Casts& casts, Type type) {
    bool is_plain = casts.rounds == 0 && casts.rstd_type == Type::float32;
    if (is_plain) return norm.centred || norm.bias.values ? Program::shifted : Program::scaled;
    // Of 16-bit gain and output, that is: the product's rounding is the store.
    bool is_early = casts.rounds == 2 && casts.type == type && casts.rstd_type == Type::float32;
    if (is_early && std::is_same_v<T, Out> && !norm.centred && !norm.bias.values) return Program::early;
    return Program::any;
}

template <int count, class T, class Out>
int64_t normalize_most_by(Program program, const MeasuredRows<T, Out>& rows, int first,
                          const Affine<Arithmetic<T>>& affine, const Casts& casts) {
    if constexpr (std::is_same_v<T, Out>) {
        if (program == Program::scaled) return normalize_most<Program::scaled, count>(rows, first, affine, casts);
        if constexpr (sizeof(T) == 2) {
            if (program == Program::early) return normalize_most<Program::early, count>(rows, first, affine, casts);
        }
    }
    if (program == Program::any) return 0;
    return normalize_most<Program::shifted, count>(rows, first, affine, casts);
}

template <class T, class Out>
void normalize_rows(Program program, const MeasuredRows<T, Out>& rows, const Affine<Arithmetic<T>>& affine,
                    const Casts& casts) {
    int64_t done = 0;
    if (rows.count == rows_at_once) {
        done = normalize_most_by<rows_at_once>(program, rows, 0, affine, casts);
    } else {
        for (int r = 0; r < rows.count; ++r) done = normalize_most_by<1>(program, rows, r, affine, casts);
    }
    if (done < affine.n) normalize_rest(program, rows, affine, casts, done);
}

template <class T, class Out>
void forward_rows(const Forward& task, int64_t begin, int64_t end, void (*add_row)(const Addition&, int64_t, int64_t)) {
    using A = Arithmetic<T>;
    const Norm norm = task.norm;
    const Program program = program_of<T, Out>(norm, task.casts, task.x_type);
    const int64_t width = statistics_width(task.x_type);
    const Type rounded_type = task.casts.rounds_parameters ? task.casts.type : Type::float32;
    const Expanded<A> gain(norm.gain, norm.n, rounded_type), bias(norm.bias, norm.n, rounded_type);
    const Affine<A> affine{norm.n, gain.values(), bias.values()};
    for (int64_t first = begin; first < end; first += rows_at_once) {
        const int64_t last = first + rows_at_once < end ? first + rows_at_once : end;
        MeasuredRows<T, Out> rows;
        for (int64_t r = first; r < last; ++r) {
            if (task.addition) add_row(*task.addition, norm.n, r);
            const T* x = static_cast<const T*>(task.x) + task.x_rows.offset(r);
            Out* y = static_cast<Out*>(task.y) + task.y_rows.offset(r);
            RowScale scale = row_scale(x, task.x_type, norm);
            if (task.statistics) {
                double* kept = task.statistics + r * width;
                kept[0] = width == 2 ? scale.mean + scale.remainder : scale.mean;
                kept[1] = scale.remainder;
                kept[width - 1] = scale.inverse;
            }
            if (scale.is_extreme) {
                normalize_extreme_row(x, task.x_type, y, task.y_type, scale, affine.gain, affine.bias, norm, task.casts);
                continue;
            }
            rows.x[rows.count] = x;
            rows.y[rows.count] = y;
            rows.program[rows.count++] = row_program<A>(scale, norm, task.casts);
        }
        normalize_rows(program, rows, affine, task.casts);
    }
}

template <class T, class R>
inline void add_row(const T* x, const R* residual, R* sum, int64_t n) {
    using A = Arithmetic<R>;
    by_sixteens(0, n, [&](int64_t i, auto read) {
        read.put(sum + i, read.template get<A>(x + i) + read.template get<A>(residual + i));
    });
}

template <class T, class R>
void add(const Addition& task, int64_t n, int64_t row) {
    add_row(static_cast<const T*>(task.x) + task.x_rows.offset(row),
            static_cast<const R*>(task.residual) + task.residual_rows.offset(row),
            static_cast<R*>(task.sum) + task.sum_rows.offset(row), n);
}

}  // namespace
}  // namespace normkit

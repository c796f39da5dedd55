// Forward: rows are measured, then normalized, scaled and rounded while they are still in the cache.
//
// Four rows at a time where there are as many: gain and bias are then read once for four.
#pragma once

#include "alternating.h"
#include "kernels.h"
#include "lanes.h"
#include "parameters.h"
#include "statistics.h"

namespace normkit {
namespace {

// The programs that have loops of their own. `any` is the whole of the spec, with roundings that are known at run time.
enum class Program { scaled, shifted, early, any };

// What is the same for every element of a row, of up to four rows, in the arithmetic type.
template <class A>
struct RowPrograms {
    A mean[rows_at_once], remainder[rows_at_once], scale[rows_at_once];
    A shift[rows_at_once];  // of the remainder, scaled
    A late_multiplier[rows_at_once];  // where the rounding of 1 / s lets it not be part of the scale
};

template <class A>
[[gnu::always_inline]] inline void set_program(RowPrograms<A>& to, int r, const RowScale& scale, const Norm& norm,
                                               const Casts& casts) {
    to.mean[r] = scale.mean;
    to.remainder[r] = scale.remainder + (scale.mean - to.mean[r]);
    to.scale[r] = scale.inverse * norm.multiplier;
    to.shift[r] = -(to.remainder[r] * to.scale[r]);
    to.late_multiplier[r] = 1;
    if (casts.rstd_type != Type::float32) {
        to.scale[r] = rounded_to(casts.rstd_type, Lanes<double>::all(scale.inverse)).part[0][0];
        to.late_multiplier[r] = norm.multiplier;
    }
}

// The same of four rows.
template <class A>
[[gnu::always_inline]] inline void set_programs(RowPrograms<A>& to, const FourScales& scales, const Norm& norm) {
    const FourFloats mean = __builtin_convertvector(scales.mean, FourFloats);
    const FourFloats remainder = __builtin_convertvector(scales.remainder, FourFloats);
    const FourFloats scale = __builtin_convertvector(scales.inverse * norm.multiplier, FourFloats);
    const FourFloats shift = -(remainder * scale);
    for (int r = 0; r < rows_at_once; ++r) {
        to.mean[r] = mean[r];
        to.remainder[r] = remainder[r];
        to.scale[r] = scale[r];
        to.shift[r] = shift[r];
        to.late_multiplier[r] = 1;
    }
}

// Mean and 1 / s of four rows.
[[gnu::always_inline]] inline void keep_four(const FourScales& scales, double* kept) {
    const Four mean = scales.mean + scales.remainder;
    for (int r = 0; r < rows_at_once; ++r) {
        kept[2 * r] = mean[r];
        kept[2 * r + 1] = scales.inverse[r];
    }
}

// Null where there is none.
template <class A>
struct Affine {
    int64_t n;
    const A* gain;
    const A* bias;
    bool is_finite;  // no number of them is NaN or infinite
};

// Without a mean and a bias these are `scaled`, bit by bit: a missing gain is 1 and a missing bias -0, which change no
// number and no sign.
template <class T, class A>
[[gnu::always_inline]] inline Lanes<A> normalized(Program program, Lanes<A> value, const RowPrograms<A>& rows,
                                                  int r, const Casts& casts, const Lanes<A>& gain,
                                                  const Lanes<A>& bias) {
    const Lanes<A> scale = Lanes<A>::all(rows.scale[r]);
    if (program == Program::scaled) return value * scale * gain;
    if constexpr (sizeof(T) == 2) {
        if (program == Program::early) return rounded_number<T>(value * scale) * gain;
    }
    value = value - Lanes<A>::all(rows.mean[r]);
    if (program == Program::shifted) return fused(fused(value, scale, Lanes<A>::all(rows.shift[r])), gain, bias);
    value = rounded_to(casts.rstd_type, value - Lanes<A>::all(rows.remainder[r])) * scale;
    value = rounded_to(casts.rstd_type, value) * Lanes<A>::all(rows.late_multiplier[r]);
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
    RowPrograms<Arithmetic<T>> programs;
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
            value[w] = normalized<T>(program, value[w], rows.programs, r, casts, gain[w], bias[w]);
        }
        if constexpr (width == 2) store_two(rows.y[r] + i, value[0], value[1]);
        else read.put(rows.y[r] + i, value[0]);
    }
}

// 32 columns likewise, where they alternate.
template <class T, class Out>
[[gnu::always_inline]] inline void alternate_columns(Program program, const MeasuredRows<T, Out>& rows, int first,
                                                     int count, const Affine<float>& affine, const Casts& casts,
                                                     int64_t i) {
    Lanes<float> gain[2], bias[2];
    for (int odd = 0; odd < 2; ++odd) {
        gain[odd] = affine.gain ? alternate<float>(affine.gain + i, odd) : Lanes<float>::all(1);
        bias[odd] = affine.bias ? alternate<float>(affine.bias + i, odd) : Lanes<float>::all(-0.0);
    }
#pragma GCC unroll unrolled_rows
    for (int r = first; r < first + count; ++r) {
        Lanes<float> value[2];
        for (int odd = 0; odd < 2; ++odd) {
            value[odd] = alternate<float>(rows.x[r] + i, odd);
            value[odd] = normalized<T>(program, value[odd], rows.programs, r, casts, gain[odd], bias[odd]);
        }
        store_alternate(rows.y[r] + i, value[0], value[1]);
    }
}

// As many columns as two registers each take; the number of them.
template <Program program, int count, class T, class Out>
[[gnu::noinline]] int64_t normalize_most(const MeasuredRows<T, Out>& rows, int first,
                                         const Affine<Arithmetic<T>>& affine, const Casts& casts) {
    int64_t i = 0;
    for (; i + 2 * lanes <= affine.n; i += 2 * lanes) {
        if constexpr (alternates<T, Out> && count == rows_at_once) {
            alternate_columns(program, rows, first, count, affine, casts, i);
        } else {
            normalize_columns<2>(program, rows, first, count, affine, casts, i, Whole{});
        }
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
    if (alternates<T, Out> && count == rows_at_once && !affine.is_finite) return 0;
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

// Measures rows first <= r < last one by one: those that are extreme are done then, the others are in `rows`. `sums` are
// those of four rows, if they are known.
template <class T, class Out>
[[gnu::noinline]] void measure_singly(const Forward& task, const Affine<Arithmetic<T>>& affine, int64_t first, int count,
                                      const FourScales* sums, MeasuredRows<T, Out>& rows) {
    const Norm& norm = task.norm;
    const int64_t width = statistics_width(task.x_type);
    for (int r = 0; r < count; ++r) {
        const T* x = rows.x[r];
        Out* y = rows.y[r];
        const RowScale scale = sums ? scale_of_sums(x, task.x_type, norm, sums->sums[r], sums->squares[r])
                                    : row_scale(x, task.x_type, norm);
        if (task.statistics) {
            double* kept = task.statistics + (first + r) * width;
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
        set_program(rows.programs, rows.count++, scale, norm, task.casts);
    }
}

// Likewise, four together where there are as many.
template <class T, class Out>
[[gnu::always_inline]] inline void measure(const Forward& task, const Affine<Arithmetic<T>>& affine, int64_t first,
                                           int64_t last, MeasuredRows<T, Out>& rows) {
    const int count = last - first;
    for (int r = 0; r < count; ++r) {
        rows.x[r] = static_cast<const T*>(task.x) + task.x_rows.offset(first + r);
        rows.y[r] = static_cast<Out*>(task.y) + task.y_rows.offset(first + r);
    }
    FourScales scales;
    if (count != rows_at_once) return measure_singly(task, affine, first, count, nullptr, rows);
    if (!measure_four(rows.x, task.norm, scales) || task.casts.rstd_type != Type::float32) {
        return measure_singly(task, affine, first, count, &scales, rows);
    }
    if (task.statistics) keep_four(scales, task.statistics + 2 * first);
    rows.count = rows_at_once;
    set_programs(rows.programs, scales, task.norm);
}

template <class T, class Out>
void forward_rows(const Forward& task, int64_t begin, int64_t end, void (*add_row)(const Addition&, int64_t, int64_t)) {
    using A = Arithmetic<T>;
    const Norm norm = task.norm;
    const Program program = program_of<T, Out>(norm, task.casts, task.x_type);
    const Type rounded_type = task.casts.rounds_parameters ? task.casts.type : Type::float32;
    const Expanded<A> gain(norm.gain, norm.n, rounded_type), bias(norm.bias, norm.n, rounded_type);
    const bool is_finite = alternates<T, Out> && end - begin >= rows_at_once && are_finite(gain.values(), norm.n) &&
                           are_finite(bias.values(), norm.n);
    const Affine<A> affine{norm.n, gain.values(), bias.values(), is_finite};
    const int tiles = tiles_together(norm.n * sizeof(T));
    auto last_of = [end](int64_t first) { return first + rows_at_once < end ? first + rows_at_once : end; };
    for (int64_t first = begin; first < end; first += tiles * rows_at_once) {
        MeasuredRows<T, Out> rows[most_tiles];
        for (int tile = 0; tile < tiles && first + tile * rows_at_once < end; ++tile) {
            const int64_t at = first + tile * rows_at_once;
            if (task.addition) {
                for (int64_t r = at; r < last_of(at); ++r) add_row(*task.addition, norm.n, r);
            }
            measure(task, affine, at, last_of(at), rows[tile]);
        }
        for (int tile = 0; tile < tiles && first + tile * rows_at_once < end; ++tile) {
            normalize_rows(program, rows[tile], affine, task.casts);
        }
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

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

template <class A>
[[gnu::always_inline]] inline Lanes<A> rounded_to(Type type, const Lanes<A>& value) {
    if (type == Type::bfloat16) return rounded<bfloat16>(value);
    if (type == Type::float16) return rounded<float16>(value);
    return value;
}

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

template <Program program, class T, class A>
[[gnu::always_inline]] inline Lanes<A> normalized(Lanes<A> value, const RowProgram<A>& row, const Casts& casts,
                                                  const Lanes<A>& gain, const Lanes<A>& bias) {
    if constexpr (program == Program::scaled) {
        return value * Lanes<A>::all(row.scale) * gain;
    } else if constexpr (program == Program::early) {
        return rounded_number<T>(value * Lanes<A>::all(row.scale)) * gain;
    } else if constexpr (program == Program::shifted) {
        value = value - Lanes<A>::all(row.mean);
        return fused(fused(value, Lanes<A>::all(row.scale), Lanes<A>::all(row.shift)), gain, bias);
    } else {
        value = (value - Lanes<A>::all(row.mean)) - Lanes<A>::all(row.remainder);
        value = rounded_to(casts.rstd_type, value) * Lanes<A>::all(row.scale);
        value = rounded_to(casts.rstd_type, value) * Lanes<A>::all(row.late_multiplier);
        if (casts.rounds >= 1) value = rounded_to(casts.type, value);
        value = value * gain;
        if (casts.rounds >= 2) value = rounded_to(casts.type, value);
        value = value + bias;
        return casts.rounds >= 3 ? rounded_to(casts.type, value) : value;
    }
}

// `count` rows. A missing gain is 1 and a missing bias -0, which change no number and no sign.
template <Program program, int count, class T, class Out>
[[gnu::noinline]] void normalize_rows(const T* const* x, Out* const* y, const RowProgram<Arithmetic<T>>* rows,
                                      const Affine<Arithmetic<T>>& affine, const Casts& casts) {
    using A = Arithmetic<T>;
    const A* gains = affine.gain;
    const A* biases = affine.bias;
    // `width` sixteens of columns.
    auto columns = [&]<int width>(int64_t i, auto read, std::integral_constant<int, width>)
                       __attribute__((always_inline)) {
        Lanes<A> gain[width], bias[width];
        for (int w = 0; w < width; ++w) {
            gain[w] = gains ? read.template get<A>(gains + i + w * lanes) : Lanes<A>::all(1);
            bias[w] = biases ? read.template get<A>(biases + i + w * lanes) : Lanes<A>::all(-0.0);
        }
#pragma GCC unroll 4
        for (int r = 0; r < count; ++r) {
            Lanes<A> value[width];
            for (int w = 0; w < width; ++w) {
                value[w] = read.template get<A>(x[r] + i + w * lanes);
                value[w] = normalized<program, T>(value[w], rows[r], casts, gain[w], bias[w]);
            }
            if constexpr (width == 2) store_two(y[r] + i, value[0], value[1]);
            else read.put(y[r] + i, value[0]);
        }
    };
    const int64_t n = affine.n;
    int64_t i = 0;
    constexpr int width = 2;
    for (; i + width * lanes <= n; i += width * lanes) columns(i, Whole{}, std::integral_constant<int, width>());
    for (; i + lanes <= n; i += lanes) columns(i, Whole{}, std::integral_constant<int, 1>());
    if (i < n) columns(i, Part{n - i}, std::integral_constant<int, 1>());
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
void normalize_by(Program program, const T* const* x, Out* const* y, const RowProgram<Arithmetic<T>>* rows,
                  const Affine<Arithmetic<T>>& affine, const Casts& casts) {
    switch (program) {
        case Program::scaled: return normalize_rows<Program::scaled, count>(x, y, rows, affine, casts);
        case Program::shifted: return normalize_rows<Program::shifted, count>(x, y, rows, affine, casts);
        case Program::early:
            if constexpr (sizeof(T) == 2 && std::is_same_v<T, Out>) {
                return normalize_rows<Program::early, count>(x, y, rows, affine, casts);
            }
            [[fallthrough]];
        case Program::any:
            for (int r = 0; r < count; ++r) normalize_rows<Program::any, 1>(x + r, y + r, rows + r, affine, casts);
    }
}

template <class T, class Out>
void forward_rows(const Forward& task, int64_t begin, int64_t end, void (*add_row)(const Addition&, int64_t, int64_t)) {
    using A = Arithmetic<T>;
    const Norm norm = task.norm;
    const Program program = program_of<T, Out>(norm, task.casts, task.x_type);
    const int64_t width = statistics_width(task.x_type);
    const Expanded<A> gain(norm.gain, norm.n), bias(norm.bias, norm.n);
    const Affine<A> affine{norm.n, gain.values(), bias.values()};
    auto x_at = [&](int64_t r) { return static_cast<const T*>(task.x) + task.x_rows.offset(r); };
    auto y_at = [&](int64_t r) { return static_cast<Out*>(task.y) + task.y_rows.offset(r); };
    for (int64_t first = begin; first < end; first += rows_at_once) {
        const int64_t last = first + rows_at_once < end ? first + rows_at_once : end;
        const T* x[rows_at_once];
        Out* y[rows_at_once];
        RowProgram<A> rows[rows_at_once];
        int count = 0;
        for (int64_t r = first; r < last; ++r) {
            if (task.addition) add_row(*task.addition, norm.n, r);
            x[count] = x_at(r);
            y[count] = y_at(r);
            RowScale scale = row_scale(x[count], task.x_type, norm);
            if (task.statistics) {
                double* kept = task.statistics + r * width;
                kept[0] = width == 2 ? scale.mean + scale.remainder : scale.mean;
                kept[1] = scale.remainder;
                kept[width - 1] = scale.inverse;
            }
            if (scale.is_extreme) {
                normalize_extreme_row(x[count], task.x_type, y[count], task.y_type, scale, affine.gain, affine.bias, norm, task.casts);
            } else {
                rows[count++] = row_program<A>(scale, norm, task.casts);
            }
        }
        if (count == rows_at_once) {
            normalize_by<rows_at_once>(program, x, y, rows, affine, task.casts);
        } else {
            for (int r = 0; r < count; ++r) normalize_by<1>(program, x + r, y + r, rows + r, affine, task.casts);
        }
    }
}

template <class T, class R>
inline void add_row(const T* x, const R* residual, R* sum, int64_t n) {
    using A = std::conditional_t<sizeof(T) == 8 || sizeof(R) == 8, double, float>;
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + lanes <= n; i += lanes) store(sum + i, load<A>(x + i) + load<A>(residual + i));
    if (i < n) store(sum + i, load<A>(x + i, n - i, A(0)) + load<A>(residual + i, n - i, A(0)), n - i);
}

template <class T, class R>
void add(const Addition& task, int64_t n, int64_t row) {
    add_row(static_cast<const T*>(task.x) + task.x_rows.offset(row),
            static_cast<const R*>(task.residual) + task.residual_rows.offset(row),
            static_cast<R*>(task.sum) + task.sum_rows.offset(row), n);
}

}  // namespace
}  // namespace normkit

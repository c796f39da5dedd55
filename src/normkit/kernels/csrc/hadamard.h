// Hadamard matrices times rows and columns, in float64, rounded once: what `normkit fold --ops rotate` writes.
//
//   run -> H (signs * run) / sqrt(size)
//
// H of order 2^k m is k levels of butterflies and then a matrix of order m. normkit/checkpoint/hadamard.py does the same
// with torch, bit for bit: each level adds the same pairs, and the sums of the last step are exact in any order.
#pragma once

#include <cmath>
#include <limits>

#include "moments.h"

namespace normkit {
namespace {

// Numbers that stay in the fastest cache between levels, and neighbours that pass all higher levels together.
constexpr int64_t block = 2048, piece = 64;

template <class V, int levels>
[[gnu::always_inline]] inline void combine(double* x, int64_t apart) {
    constexpr int count = 1 << levels;
    V part[count];
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) __builtin_memcpy(&part[i], x + i * apart, sizeof(V));
#pragma GCC unroll 3
    for (int level = 1; level < count; level *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
            if (i & level) continue;
            const V sum = part[i] + part[i + level];
            part[i + level] = part[i] - part[i + level];
            part[i] = sum;
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) __builtin_memcpy(x + i * apart, &part[i], sizeof(V));
}

// Levels step, 2 step, ... of `count` lines of `width` numbers that begin `stride` apart.
template <int levels>
void pass(double* x, int64_t count, int64_t stride, int64_t width, int64_t step) {
    using V = Native<double>::type;
    constexpr int64_t together = Lanes<double>::in_register;
    if (stride == width) {
        // Lines that follow each other are one.
        count /= step;
        stride = width = step * stride;
        step = 1;
    }
    for (int64_t base = 0; base < count; base += step << levels) {
        for (int64_t line = base; line < base + step; ++line) {
            double* first = x + line * stride;
            int64_t i = 0;
            for (; i + together <= width; i += together) combine<V, levels>(first + i, step * stride);
            for (; i < width; ++i) combine<double, levels>(first + i, step * stride);
        }
    }
}

void all_levels(double* x, int64_t count, int64_t stride, int64_t width) {
    int64_t step = 1;
    for (; 8 * step <= count; step *= 8) pass<3>(x, count, stride, width, step);
    if (4 * step == count) pass<2>(x, count, stride, width, step);
    if (2 * step == count) pass<1>(x, count, stride, width, step);
}

// All levels of a power of two of lines that follow each other, as many as possible in the fastest cache.
void butterflies(double* x, int64_t count, int64_t width) {
    int64_t inner = count;
    while (inner > 1 && inner * width > block) inner /= 2;
    for (int64_t line = 0; line < count; line += inner) all_levels(x + line * width, inner, width, width);
    if (inner == count) return;
    const int64_t stride = inner * width;
    for (int64_t i = 0; i < stride; i += piece) {
        all_levels(x + i, count / inner, stride, piece < stride - i ? piece : stride - i);
    }
}

typedef int64_t Bits __attribute__((vector_size(Instructions::bytes)));

template <int level, size_t... i>
[[gnu::always_inline]] inline Native<double>::type neighbours(Native<double>::type x, std::index_sequence<i...>) {
    constexpr Bits minus = {(i & level ? std::numeric_limits<int64_t>::min() : 0)...};
    const auto other = __builtin_shufflevector(x, x, (i ^ level)...);
    // a - b is a + (-b), bit for bit.
    return other + same_bits<Native<double>::type>(same_bits<Bits>(x) ^ minus);
}

// The four lowest levels of each sixteen numbers times their signs.
void butterflies_of_sixteen(double* x, int64_t count, const double* signs) {
    constexpr int registers = Lanes<double>::registers, in_register = Lanes<double>::in_register;
    constexpr auto all = std::make_index_sequence<in_register>();
    for (int64_t at = 0; at < count; at += lanes) {
        Lanes<double> value = load<double>(x + at) * load<double>(signs + at);
        for (int i = 0; i < registers; ++i) {
            auto& part = value.part[i];
            part = neighbours<1>(part, all);
            if constexpr (in_register > 2) part = neighbours<2>(part, all);
            if constexpr (in_register > 4) part = neighbours<4>(part, all);
        }
#pragma GCC unroll 3
        for (int level = 1; level < registers; level *= 2) {
#pragma GCC unroll 8
            for (int i = 0; i < registers; ++i) {
                if (i & level) continue;
                const auto sum = value.part[i] + value.part[i + level];
                value.part[i + level] = value.part[i] - value.part[i + level];
                value.part[i] = sum;
            }
        }
        store(x + at, value);
    }
}

[[gnu::always_inline]] inline Lanes<double> magnitude(Lanes<double> x) {
    constexpr int64_t most = std::numeric_limits<int64_t>::max();
    for (auto& part : x.part) part = same_bits<Native<double>::type>(same_bits<Bits>(part) & most);
    return x;
}

// Whether any bit of some registers is set.
template <class Register>
[[gnu::always_inline]] inline bool is_any(const Register& x) {
    uint64_t words[sizeof x / 8], all = 0;
    __builtin_memcpy(words, &x, sizeof x);
    for (uint64_t word : words) all |= word;
    return all != 0;
}

// a * b + c of a sign b: the same bits fused and not.
[[gnu::always_inline]] inline Lanes<double> added(const Lanes<double>& a, const Lanes<double>& b, const Lanes<double>& c) {
    // Fusing is a call for each number where registers are narrow, but for ARM64.
#if !defined(__aarch64__)
    if constexpr (Instructions::bytes < 32) return a * b + c;
#endif
    return fused(a, b, c);
}

// 1.5 * 2^(52 - bits) times the power of two above a number, or 1 for 0: adding and subtracting it rounds the number to
// a multiple of 2^-bits of that power.
double unit_shift(double largest, int bits) {
    const int64_t biased = same_bits<int64_t>(largest) >> 52;
    if (biased > 0 && biased < 1900) return same_bits<double>((biased + 53 - bits) << 52 | int64_t{1} << 51);
    int exponent;
    std::frexp(largest, &exponent);
    return std::ldexp(1.5, exponent + 52 - bits);
}

// The matrix of `order` times as many lines of sixteen numbers, in place. Each number is cut in two that are multiples
// of units so large that float64 holds every partial sum. `room` is for 2 * order lines.
void mix(double* x, const Hadamard& turn, double* room) {
    const int64_t order = turn.order;
    const int bits = 51 - (64 - __builtin_clzll(order - 1));
    Lanes<double> top = Lanes<double>::all(0);
    for (int64_t j = 0; j < order; ++j) top = larger(top, magnitude(load<double>(x + j * lanes)));
    double shifts[lanes];
    store(shifts, top);
    for (double& shift : shifts) shift = unit_shift(shift, bits);
    const Lanes<double> shift = load<double>(shifts), narrow = shift * Lanes<double>::all(std::ldexp(1, -bits));
    double *upper = room, *lower = room + order * lanes;
    Bits rest{};
    for (int64_t j = 0; j < order; ++j) {
        const Lanes<double> value = load<double>(x + j * lanes), high = (value + shift) - shift;
        const Lanes<double> low = ((value - high) + narrow) - narrow;
        store(upper + j * lanes, high);
        store(lower + j * lanes, low);
        for (const auto& part : low.part) rest |= same_bits<Bits>(part);
    }
    const auto sums = [&](const double* parts, bool is_added) {
        // The order of a matrix is a multiple of four.
        for (int64_t i = 0; i < order; i += 2) {
            Lanes<double> first = Lanes<double>::all(0), second = first;
            for (int64_t j = 0; j < order; ++j) {
                const Lanes<double> part = load<double>(parts + j * lanes);
                const double* signs = turn.columns + j * order + i;
                first = added(part, Lanes<double>::all(signs[0]), first);
                second = added(part, Lanes<double>::all(signs[1]), second);
            }
            if (is_added) {
                first = load<double>(x + i * lanes) + first;
                second = load<double>(x + (i + 1) * lanes) + second;
            }
            store(x + i * lanes, first);
            store(x + (i + 1) * lanes, second);
        }
    };
    sums(upper, false);
    if (is_any(rest)) sums(lower, true);
}

// From rows of T to float64, times their factors and one sign for each row, if there are any.
template <class T>
void widen(const Turning& task, int64_t row, int64_t count, int64_t column, int64_t width, const double* signs,
           double* to, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) {
        const T* from = static_cast<const T*>(task.x) + (row + i) * task.x_stride + column;
        const Lanes<double> all = Lanes<double>::all((task.row_factors ? task.row_factors[row + i] : 1) *
                                                     (signs ? signs[i] : 1));
        by_sixteens(0, width, [&](int64_t j, auto read) __attribute__((always_inline)) {
            Lanes<double> value = read.template get<double>(from + j) * all;
            if (task.column_factors) value = value * read.template get<double>(task.column_factors + column + j);
            read.put(to + i * stride + j, value);
        });
    }
}

// Bits of a float32 in the middle between two neighbours of 16 bits, or of more than these.
template <class Out>
constexpr uint32_t middle_mask = std::is_same_v<Out, bfloat16> ? 0xffff : 0xfff;
template <class Out>
constexpr uint32_t middle_bits = std::is_same_v<Out, bfloat16> ? 0x8000 : 0;

// Where a float32 is in such a middle and the number is not: one step towards the number.
template <class Out>
[[gnu::noinline]] Lanes<float> off_middles(const Lanes<double>& exact, const Lanes<float>& rounded) {
    double numbers[lanes];
    float near[lanes];
    store(numbers, exact);
    store(near, rounded);
    for (int i = 0; i < lanes; ++i) {
        if ((same_bits<uint32_t>(near[i]) & middle_mask<Out>) != middle_bits<Out> || numbers[i] == near[i]) continue;
        constexpr float most = std::numeric_limits<float>::infinity();
        near[i] = std::nextafter(near[i], numbers[i] > near[i] ? most : -most);
    }
    return load<float>(near);
}

// float64 in another dtype, rounded once; and what it is then.
template <class Out, class How>
[[gnu::always_inline]] inline Lanes<double> put_rounded(Out* to, const Lanes<double>& value, const How& how) {
    if constexpr (sizeof(Out) == 8) {
        how.put(to, value);
        return value;
    } else {
        Lanes<float> near = narrowed(value);
        if constexpr (sizeof(Out) == 2) {
            auto hits = (same_bits<Words>(near.part[0]) & middle_mask<Out>) == middle_bits<Out>;
            for (int i = 1; i < Lanes<float>::registers; ++i) {
                hits |= (same_bits<Words>(near.part[i]) & middle_mask<Out>) == middle_bits<Out>;
            }
            if (is_any(hits)) near = off_middles<Out>(value, near);
            near = rounded<Out>(near);
        }
        how.put(to, near);
        return widened(near);
    }
}

struct Measure {
    Lanes<double> largest = Lanes<double>::all(0), error = largest;
};

template <class Out>
void narrow(const Turning& task, int64_t row, int64_t count, int64_t column, int64_t width, const double* from,
            int64_t stride, Measure& measure) {
    Measure found = measure;
    for (int64_t i = 0; i < count; ++i) {
        Out* to = static_cast<Out*>(task.y) + (row + i) * task.y_stride + column;
        by_sixteens(0, width, [&](int64_t j, auto how) __attribute__((always_inline)) {
            const Lanes<double> value = how.template get<double>(from + i * stride + j);
            const Lanes<double> written = put_rounded(to + j, value, how);
            found.largest = larger(found.largest, magnitude(value));
            found.error = larger(found.error, magnitude(value - written));
        });
    }
    measure = found;
}

// x[i] times by(i, read).
template <class By>
[[gnu::always_inline]] inline void multiply(double* x, int64_t count, const By& by) {
    by_sixteens(0, count, [&](int64_t i, auto read) __attribute__((always_inline)) {
        read.put(x + i, read.template get<double>(x + i) * by(i, read));
    });
}

void scale(double* x, int64_t size, int64_t count) {
    const Lanes<double> by = Lanes<double>::all(1 / std::sqrt(static_cast<double>(size)));
    multiply(x, count, [&](int64_t, auto) { return by; });
}

// step(first number, whether it begins a run) over the runs of an axis and the numbers beside them, one by one.
template <class Step>
void over_runs(const Hadamard& turn, int64_t length, const Step& step) {
    const int64_t whole = length / turn.blocks, first = turn.tail ? whole - turn.tail : 0;
    for (int64_t start = 0; start < length; start += whole) {
        if (first > 0) step(start, first, false);
        for (int64_t at = first; at < whole; at += turn.size) step(start + at, turn.size, true);
    }
}

// One run of a row. `room` is for 3 * order lines of sixteen numbers.
void turn_run(double* x, const Hadamard& turn, double* room) {
    const int64_t order = turn.order, count = turn.size / order;
    if (order == 1 && count >= lanes) {
        butterflies_of_sixteen(x, count, turn.signs);
        butterflies(x, count / lanes, lanes);
    } else {
        multiply(x, turn.size, [&](int64_t i, auto read) __attribute__((always_inline)) {
            return read.template get<double>(turn.signs + i);
        });
        butterflies(x, count, order);
    }
    if (order > 1) {
        // Sixteen groups side by side.
        for (int64_t first = 0; first < count; first += lanes) {
            const int64_t held = count - first < lanes ? count - first : lanes;
            double* group = x + first * order;
            for (int64_t j = 0; j < order; ++j) {
                for (int64_t i = 0; i < lanes; ++i) room[j * lanes + i] = i < held ? group[i * order + j] : 0;
            }
            mix(room, turn, room + order * lanes);
            for (int64_t i = 0; i < held; ++i) {
                for (int64_t j = 0; j < order; ++j) group[i * order + j] = room[j * lanes + i];
            }
        }
    }
    scale(x, turn.size, turn.size);
}

// One run along the other axis, sixteen columns of it: lines of sixteen numbers, times their signs already.
void turn_lines(double* x, const Hadamard& turn, double* room) {
    const int64_t line = turn.order * lanes;
    butterflies(x, turn.size / turn.order, line);
    if (turn.order > 1) {
        for (int64_t at = 0; at < turn.size * lanes; at += line) mix(x + at, turn, room);
    }
    scale(x, turn.size, turn.size * lanes);
}

struct Turned {
    const Turning& task;
    // Sixteen columns of a run; rows between the two steps, or one row; and what the steps themselves need.
    double *tile, *held, *room;
    Measure measure;

    // From float64 rows, turned along the other axis if they are to be, to the result.
    void finish(int64_t row, int64_t count, int64_t column, int64_t width, double* from, int64_t stride) {
        if (task.across.size) {
            for (int64_t i = 0; i < count; ++i) {
                over_runs(task.across, width, [&](int64_t at, int64_t, bool is_run) {
                    if (is_run) turn_run(from + i * stride + at, task.across, room);
                });
            }
        }
        with_type(task.y_type, [&]<class Out>() { narrow<Out>(task, row, count, column, width, from, stride, measure); });
    }

    // A row beside the runs of the other axis, or where none is turned.
    void row(int64_t row) {
        with_type(task.x_type, [&]<class T>() { widen<T>(task, row, 1, 0, task.columns, nullptr, held, task.columns); });
        finish(row, 1, 0, task.columns, held, task.columns);
    }

    // All rows of a run along the other axis, the first of which is given.
    void run(int64_t row) {
        const int64_t size = task.down.size;
        for (int64_t left = 0; left < task.columns; left += task.strip) {
            const int64_t width = task.strip < task.columns - left ? task.strip : task.columns - left;
            for (int64_t column = 0; column < width; column += lanes) {
                const int64_t some = lanes < width - column ? lanes : width - column;
                with_type(task.x_type, [&]<class T>() {
                    widen<T>(task, row, size, left + column, some, task.down.signs, tile, lanes);
                });
                turn_lines(tile, task.down, room);
                if (!task.across.size) {
                    finish(row, size, left + column, some, tile, lanes);
                } else {
                    for (int64_t i = 0; i < size; ++i) {
                        __builtin_memcpy(held + i * width + column, tile + i * lanes, some * sizeof(double));
                    }
                }
            }
            if (task.across.size) finish(row, size, left, width, held, width);
        }
    }
};

void turn(Turning& task, double* room) {
    const int64_t order = task.down.order > task.across.order ? task.down.order : task.across.order;
    Turned turned{task, room + 3 * order * lanes, room + (3 * order + task.down.size) * lanes, room, {}};
    const int64_t length = task.down.size ? task.length : task.rows;
    for (int64_t start = 0; start < task.rows; start += length) {
        if (!task.down.size) {
            for (int64_t row = 0; row < length; ++row) turned.row(row);
            continue;
        }
        over_runs(task.down, length, [&](int64_t first, int64_t count, bool is_run) {
            if (is_run) return turned.run(start + first);
            for (int64_t row = 0; row < count; ++row) turned.row(start + first + row);
        });
    }
    task.largest = largest(turned.measure.largest);
    task.error = largest(turned.measure.error);
}

}  // namespace
}  // namespace normkit

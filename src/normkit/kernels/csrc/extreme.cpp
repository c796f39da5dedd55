// Rows that float32 cannot hold, in float64.
#include "extreme.h"

#include <cmath>
#include <cstring>

namespace normkit {
namespace {

template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

double read(const void* from, Type type, int64_t i) {
    switch (type) {
        case Type::float32: return static_cast<const float*>(from)[i];
        case Type::bfloat16: return same_bits<float>(uint32_t{static_cast<const uint16_t*>(from)[i]} << 16);
        case Type::float16: return same_bits<Half>(static_cast<const uint16_t*>(from)[i]);
        case Type::float64: return static_cast<const double*>(from)[i];
    }
    return 0;
}

// To the nearest, ties to even; a NaN stays one.
uint16_t bfloat16_bits(float value) {
    uint32_t bits = same_bits<uint32_t>(value);
    if (value != value) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void write(void* to, Type type, int64_t i, double value) {
    switch (type) {
        case Type::float32: static_cast<float*>(to)[i] = value; return;
        case Type::bfloat16: static_cast<uint16_t*>(to)[i] = bfloat16_bits(value); return;
        case Type::float16: static_cast<uint16_t*>(to)[i] = same_bits<uint16_t>(static_cast<Half>(value)); return;
        case Type::float64: static_cast<double*>(to)[i] = value; return;
    }
}

double rounded_to(Type type, double value) {
    if (type != Type::bfloat16 && type != Type::float16) return value;
    uint16_t bits;
    write(&bits, type, 0, value);
    return read(&bits, type, 0);
}

// Gain and bias are held in the arithmetic type of the row's dtype.
double parameter(const void* values, Type row, int64_t i) {
    return read(values, row == Type::float64 ? Type::float64 : Type::float32, i);
}

double largest_size(const void* x, Type type, int64_t n) {
    double largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        double size = std::fabs(read(x, type, i));
        if (size > largest) largest = size;
    }
    return largest;
}

}  // namespace

double inverse_scale(double v, double power, const Norm& norm) {
    if (norm.eps_placement == EpsPlacement::inside) return power / std::sqrt(v + norm.eps * power * power);
    double root = std::sqrt(v) / power;
    if (norm.eps_placement == EpsPlacement::outside) return 1 / (root + norm.eps);
    return 1 / (root < norm.eps ? norm.eps : root);
}

RowScale extreme_scale(const void* x, Type type, const Norm& norm) {
    int64_t n = norm.n;
    double largest = largest_size(x, type, n);
    // A float64 row is scaled by a power of two, so that its squares are float64 numbers; the others' are.
    double power = 1;
    if (type == Type::float64 && largest > 0 && std::isfinite(largest)) {
        int exponent = -std::ilogb(largest);
        int most = norm.eps == 0 ? 1000 : 400;
        power = std::ldexp(1.0, exponent > most ? most : exponent);
    }
    auto scaled = [&](int64_t i) { return read(x, type, i) * power; };
    double mean = 0, remainder = 0, square = 0;
    if (norm.centred) {
        for (int64_t i = 0; i < n; ++i) mean += scaled(i);
        mean /= n;
        for (int64_t i = 0; i < n; ++i) remainder += scaled(i) - mean;
        remainder /= n;
    }
    for (int64_t i = 0; i < n; ++i) {
        double deviation = (scaled(i) - mean) - remainder;
        square += deviation * deviation;
    }
    return {mean / power, remainder / power, inverse_scale(square / norm.divisor, power, norm), true};
}

void normalize_extreme_row(const void* x, Type x_type, void* y, Type y_type, const RowScale& scale, const void* gain,
                           const void* bias, const Norm& norm, const Casts& casts) {
    const bool is_rounded = casts.rstd_type != Type::float32;
    const double inverse =
        is_rounded ? rounded_to(casts.rstd_type, scale.inverse) : scale.inverse * norm.multiplier;
    const double late_multiplier = is_rounded ? norm.multiplier : 1;
    auto cast = [&](int step, double value) { return casts.rounds >= step ? rounded_to(casts.type, value) : value; };
    for (int64_t i = 0; i < norm.n; ++i) {
        double value = read(x, x_type, i);
        if (norm.centred) value = (value - scale.mean) - scale.remainder;
        value = rounded_to(casts.rstd_type, value) * inverse;
        value = cast(1, rounded_to(casts.rstd_type, value) * late_multiplier);
        if (gain) value = cast(2, value * parameter(gain, x_type, i));
        if (bias) value = cast(3, value + parameter(bias, x_type, i));
        write(y, y_type, i, value);
    }
}

double root_ratio(double inverse, const Norm& norm) {
    if (norm.eps_placement == EpsPlacement::inside) return 1;
    // At and below the clamp, and where nothing deviates, the scale does not depend on the row.
    if (inverse >= 1 / norm.eps && norm.eps >= 0) return 0;
    if (norm.eps_placement == EpsPlacement::clamp) return 1;
    double root = 1 / inverse - norm.eps;
    return root == 0 ? 0 : 1 / inverse / root;
}

void extreme_gradient(const Backward& task, const void* gain, int64_t r, double* dgain) {
    const Norm& norm = task.norm;
    const int64_t x_start = task.x_rows.offset(r), dy_start = task.dy_rows.offset(r);
    const int64_t width = statistics_width(task.x_type);
    const double* kept = task.statistics + r * width;
    const double mean = kept[0], remainder = width == 3 ? kept[1] : 0, inverse = kept[width - 1];
    auto dy = [&](int64_t i) { return read(task.dy, task.dy_type, dy_start + i); };
    auto h = [&](int64_t i) { return gain ? dy(i) * parameter(gain, task.x_type, i) : dy(i); };
    auto z = [&](int64_t i) { return ((read(task.x, task.x_type, x_start + i) - mean) - remainder) * inverse; };
    if (dgain) {
        for (int64_t i = 0; i < norm.n; ++i) dgain[i] += dy(i) * z(i);
    }
    if (!task.dx) return;
    double sum = 0, product = 0;
    for (int64_t i = 0; i < norm.n; ++i) {
        sum += h(i);
        product += h(i) * z(i);
    }
    const double centre = norm.centred ? sum / norm.n : 0;
    const double slope = root_ratio(inverse, norm) * product / norm.divisor;
    const int64_t dx_start = task.dx_rows.offset(r), addend_start = task.addend_rows.offset(r);
    for (int64_t i = 0; i < norm.n; ++i) {
        double dx = norm.multiplier * inverse * (h(i) - centre - z(i) * slope);
        if (task.addend) dx += read(task.addend, task.x_type, addend_start + i);
        write(task.dx, task.x_type, dx_start + i, dx);
    }
}

}  // namespace normkit

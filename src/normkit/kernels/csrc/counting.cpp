// The operators of a watch: rows counted into its tables in one reading.
//
//   count_rows  adds the rows of x to one line of three tables
//   mark_seen   adds one call to one line of another, and NaN where an element of x is not finite
//
// measurement/row_counters.py says what the columns of the tables are, and does the same in plain torch.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "instructions.h"
#include "tensors.h"
#include "threads.h"

namespace normkit {
namespace {

enum Sum { calls, rows, zero, nonfinite, energy, angle, kurtosis, varying, below_99, below_90, sums };
enum Peak { absmax, rms, minus_rms, minus_attenuation, peak_sum, peaks };
constexpr int64_t bins_per_octave = 8, lowest_octave = -64, bins = bins_per_octave * 128;

// A deviation below this share of a row's mean is what rounding left of a constant; fourth powers of deviations below the
// second number, or above the third, leave the range of float32.
constexpr double constant = 1e-6, least_deviation = 1e-8, largest_deviation = 1e8;
// At so many times eps or its root nothing of a row is taken.
constexpr double untouched = 1e30;
constexpr double infinity = std::numeric_limits<double>::infinity();

// Rows whose moments are held at once.
constexpr int64_t chunk = 4096;

// Which eighth of an octave a positive number is in.
int64_t bin(double value) {
    // 2 ** (k / 8)
    constexpr double steps[] = {1.0905077326652577, 1.189207115002721,  1.2968395546510096, 1.4142135623730951,
                                1.5422108254079407, 1.681792830507429, 1.8340080864093424};
    uint64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    int64_t octave = static_cast<int64_t>(bits >> 52) - 1023, eighth = 0;
    bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
    double mantissa;
    __builtin_memcpy(&mantissa, &bits, sizeof mantissa);
    for (double step : steps) eighth += mantissa >= step;
    return std::clamp<int64_t>((octave - lowest_octave) * bins_per_octave + eighth, 0, bins - 1);
}

// How much eps shortens a row whose divisor is so many times eps, or its root where eps is inside; at most `untouched`.
double attenuation(double ratio, EpsPlacement placement) {
    switch (placement) {
        // Not std::hypot: that of today's glibc is not in that of manylinux_2_28. The square does not overflow.
        case EpsPlacement::inside: return ratio / std::sqrt(ratio * ratio + 1);
        case EpsPlacement::outside: return ratio / (ratio + 1);
        default: return std::min(ratio, 1.0);
    }
}

struct Eps {
    EpsPlacement placement;
    // Of what the norm divides by over the Euclidean mean; 0 if it divides by nothing.
    double divisor;
    double unit;  // eps or its root
    double limits[2];  // ratios at which a row is shortened to 0.99 and to 0.9
};

// What is counted of one call.
struct Count {
    bool enters_norm, is_centred;
    Eps eps;
    double features, largest_square;  // above the latter a row has no mean square
    bool is_narrow;
    double* histogram;
    double* ratios;
    double sum[sums] = {};
    double peak[peaks] = {-infinity, -infinity, -infinity, -infinity, -infinity};
    double longest = 0, least_ratio = infinity;

    void add(const RowMoments& row) {
        double std = std::sqrt(row.square);
        if (is_narrow && !(std > constant * std::abs(row.mean))) std = 0;
        const double square = enters_norm ? row.mean * row.mean + std * std : row.square;
        // NaN is not at most anything.
        if (!(square <= largest_square)) {
            ++sum[nonfinite];
            return;
        }
        const double length = std::sqrt(square);
        ++sum[rows];
        peak[absmax] = std::max(peak[absmax], row.absmax);
        peak[rms] = std::max(peak[rms], length);
        peak[minus_rms] = std::max(peak[minus_rms], -length);
        if (length == 0) {
            ++sum[zero];
            return;
        }
        const double cosine = row.mean / length;
        sum[energy] += cosine * cosine;
        sum[angle] += enters_norm ? std::atan2(std, row.mean) : std::acos(std::clamp(cosine, -1.0, 1.0));
        ++histogram[bin(length)];
        if (!enters_norm) return;
        if (std > least_deviation && std < largest_deviation && row.fourth < infinity) {
            ++sum[varying];
            sum[kurtosis] += row.fourth / (row.square * row.square);
        }
        if (eps.divisor > 0) add_ratio(is_centred ? std : length);
    }

    void add_ratio(double root) {
        root *= std::sqrt(features / eps.divisor);
        longest = std::max(longest, root);
        if (eps.unit == 0 || root == 0) return;
        const double ratio = root / eps.unit;
        least_ratio = std::min(least_ratio, ratio);
        ++ratios[bin(ratio)];
        sum[below_99] += ratio < eps.limits[0];
        sum[below_90] += ratio < eps.limits[1];
    }

    void finish() {
        ++sum[calls];
        if (!enters_norm || eps.divisor <= 0) return;
        peak[peak_sum] = longest * longest * eps.divisor;
        if (eps.unit != 0) peak[minus_attenuation] = -attenuation(std::min(least_ratio, untouched), eps.placement);
    }
};

// One line of a table of a watch, to be written to.
double* line_of(const Tensor& table, int64_t place, int64_t width) {
    Shape shape(table);
    STD_TORCH_CHECK(type_of(table) == Type::float64 && ask(aoti_torch_is_contiguous, table) && shape.axes > 0 &&
                        place >= 0 && place < shape.sizes[0] && shape.product(1, shape.axes) == width,
                    "normkit: expected a table of ", width, " doubles a line");
    return static_cast<double*>(table.mutable_data_ptr()) + place * width;
}

void count_rows(const Tensor& given, const MaybeTensor& counted, bool enters_norm, bool is_centred, int64_t placement,
                double divisor, double unit, double limit_99, double limit_90, int64_t place, const Tensor& sum_table,
                const Tensor& bin_table, const Tensor& peak_table) {
    Input x(given, 1);
    double* sum_line = line_of(sum_table, place, sums);
    double* bin_line = line_of(bin_table, place, 2 * bins);
    double* peak_line = line_of(peak_table, place, peaks);
    const bool* is_counted = nullptr;
    if (counted) {
        STD_TORCH_CHECK(ask(aoti_torch_get_dtype, *counted) == aoti_torch_dtype_bool() &&
                            ask(aoti_torch_is_contiguous, *counted) && ask(aoti_torch_get_numel, *counted) == x.count,
                        "normkit: expected one bool a row");
        is_counted = static_cast<const bool*>(counted->const_data_ptr());
    }
    const bool is_narrow = x.type != Type::float64;
    const double largest = is_narrow ? std::numeric_limits<float>::max() : std::numeric_limits<double>::max();
    Count count{enters_norm,
                is_centred,
                {static_cast<EpsPlacement>(placement), divisor, unit, {limit_99, limit_90}},
                static_cast<double>(x.n),
                largest,
                is_narrow,
                bin_line,
                bin_line + bins};
    std::vector<RowMoments> found(std::min(x.count, chunk));
    const Kernels& table = kernels();
    for (int64_t first = 0; first < x.count; first += chunk) {
        const int64_t many = std::min(chunk, x.count - first);
        Moments task{x.n, x.type, x.data(), x.rows, enters_norm, found.data(), first};
        over_rows(many, x.n, [&](int64_t begin, int64_t end) { table.moments(task, first + begin, first + end); });
        for (int64_t row = 0; row < many; ++row) {
            if (!is_counted || is_counted[first + row]) count.add(found[row]);
        }
    }
    count.finish();
    for (int64_t i = 0; i < sums; ++i) sum_line[i] += count.sum[i];
    for (int64_t i = 0; i < peaks; ++i) peak_line[i] = std::max(peak_line[i], count.peak[i]);
}

void mark_seen(const Tensor& given, int64_t place, const Tensor& sentinel) {
    Input x(given, 1);
    Shape shape(sentinel);
    STD_TORCH_CHECK(type_of(sentinel) == Type::float32 && ask(aoti_torch_is_contiguous, sentinel) && shape.axes == 2 &&
                        place >= 0 && place < shape.sizes[0] && shape.sizes[1] == 2,
                    "normkit: expected a table of two floats a line");
    Elements task{x.n, x.type, x.data(), x.rows};
    std::atomic<bool> is_finite{true};
    const Kernels& table = kernels();
    over_rows(x.count, x.n, [&](int64_t begin, int64_t end) {
        if (!table.finite(task, begin, end)) is_finite = false;
    });
    float* line = static_cast<float*>(sentinel.mutable_data_ptr()) + 2 * place;
    const float nothing = is_finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    line[0] += nothing;
    line[1] += 1 + nothing;
}

}  // namespace
}  // namespace normkit

STABLE_TORCH_LIBRARY_IMPL(normkit, CPU, m) {
    m.impl("count_rows", TORCH_BOX(&normkit::count_rows));
    m.impl("mark_seen", TORCH_BOX(&normkit::mark_seen));
}

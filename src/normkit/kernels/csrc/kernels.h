// What the operators ask of the kernels: plain pointers in, plain pointers out; nothing of torch.
//
//   y = multiplier * (x - m) / s * gain + bias, rounded to 16 bits where the casts say so
//
// One table of functions for each instruction set; instructions.h chooses the table. Every table gives the same bits: all
// count in 16 lanes, and a multiplication is fused with an addition where the source says so, nowhere else: the build
// forbids it to the compiler (-ffp-contract=off).
#pragma once

#include <cstdint>

#include "rows.h"

namespace normkit {

// The compiler's float16, whose conversions round once. On ARM64 g++ has _Float16 from version 13 on only.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

enum class Type : int32_t { float32, bfloat16, float16, float64 };

enum class EpsPlacement : int64_t { inside, outside, clamp };

// Gain or bias, as it is held, with what is added to it.
struct Parameter {
    const void* values = nullptr;  // null where there is none
    Type type = Type::float32;
    double offset = 0;
    bool offset_in_own_type = false;  // the sum is rounded to `type`
};

// Arithmetic is float32, or float64 for float64 input.
struct Norm {
    int64_t n = 0;
    bool centred = false;
    double eps = 0;
    EpsPlacement eps_placement = EpsPlacement::inside;
    double divisor = 1;     // n, n - 1 or 1
    double multiplier = 1;  // 1 or sqrt(n)
    Parameter gain, bias;
};

// The 16-bit roundings of one spec. `rounds`: 0 none before the last, 1 the normalized row, 2 also its product with the
// gain, 3 also the sum with the bias.
struct Casts {
    Type type = Type::float32;
    int rounds = 0;
    bool rounds_parameters = false;  // gain and bias are rounded to `type` first
    // 1 / s and what it multiplies are rounded to this dtype, if that is a 16-bit one.
    Type rstd_type = Type::float32;
};

// Doubles kept for each row: mean and 1 / s; a float64 row's mean has a second part: mean, remainder, 1 / s.
constexpr int64_t statistics_width(Type input) { return input == Type::float64 ? 3 : 2; }

// residual + x, rounded to the residual's dtype.
struct Addition {
    Type x_type, residual_type;
    const void* x;
    Rows x_rows;
    const void* residual;
    Rows residual_rows;
    void* sum;
    Rows sum_rows;
};

struct Forward {
    Norm norm;
    Casts casts;
    Type x_type, y_type;
    const void* x;
    Rows x_rows;
    void* y;
    Rows y_rows;
    double* statistics;        // may be null
    const Addition* addition;  // computes x first, row by row; may be null
};

// Gradients; dx and the sums may be null. The sums are float64, one row of n for each block of rows.
struct Backward {
    Norm norm;
    int64_t rows;
    Type x_type, dy_type;
    const void* x;
    Rows x_rows;
    const void* dy;
    Rows dy_rows;
    const double* statistics;
    void* dx;  // of x's dtype
    Rows dx_rows;
    const void* addend;  // of x's dtype: added to dx before it is rounded; may be null
    Rows addend_rows;
    double* dgain;
    double* dbias;
    // Four rows at a time are added up in float32 before float64: enough for gradients of 16 bits.
    bool sums_in_float32;
};

// Of one row: dx = scale * (h - (centre + (x - mean) * slope)), its part of dgain is dy * (x - mean) * inverse. What a
// float32 mean leaves of `mean` is in `centre`. Extreme rows are left to extreme.h.
struct RowTerms {
    double mean = 0, remainder = 0, centre = 0, slope = 0, scale = 0, inverse = 0;
    bool is_extreme = false;
};

struct Columns {
    int64_t begin, end;
};

// Sums of blocks, one row of n doubles for each, to a gradient: in its dtype, times the norm's multiplier.
struct Reduction {
    const double* blocks;
    int64_t count, n;
    double multiplier;
    Type type;
    void* result;
};

// Of one row: its largest magnitude, its mean, and the means of the second and fourth powers of its deviations from the
// mean (of its numbers if they are not central; there is no fourth then).
struct RowMoments {
    double absmax = 0, mean = 0, square = 0, fourth = 0;
};

struct Moments {
    int64_t n;
    Type x_type;
    const void* x;
    Rows x_rows;
    bool are_central;
    RowMoments* rows;  // of row `first` and those that follow
    int64_t first;
};

struct Elements {
    int64_t n;
    Type x_type;
    const void* x;
    Rows x_rows;
};

// H (signs * run) / sqrt(size) of runs along an axis: of each of so many equal blocks the last `tail` numbers, or all.
struct Hadamard {
    int64_t size;  // of a run; 0 if nothing is turned
    int64_t order, blocks, tail;
    const double* signs;
    const double* columns;  // the matrix of `order`, column by column; null where that is 1
};

// A matrix times its factors, turned along columns and then along rows, to another dtype. Rows are contiguous; the
// result may be the matrix itself.
struct Turning {
    Type x_type, y_type;
    const void* x;
    void* y;
    int64_t x_stride, y_stride, rows, columns;
    const double* row_factors;  // may be null, as may those of columns
    const double* column_factors;
    int64_t length;  // rows that are turned together
    int64_t strip;   // columns that are turned both ways before the next: whole runs of `across`
    Hadamard down, across;
    double largest, error;  // found: the largest magnitudes of a number and of what its rounding takes
};

// The kernels take up to so many rows together.
constexpr int rows_at_once = 4;

// Tiles of so many rows that are all measured before the first of them is written: several where rows are short, so that
// the CPU need not wait for a row's scale.
constexpr int most_tiles = 4;

constexpr int tiles_together(int64_t row_bytes) { return row_bytes <= 1024 ? most_tiles : 1; }

constexpr int64_t least_block = 16;
constexpr int64_t most_blocks = 32;

// Rows in one block: by the number of rows alone, so that threads change no bit.
constexpr int64_t rows_per_block(int64_t rows) {
    int64_t least = (rows + least_block - 1) / least_block;
    int64_t together = (least + most_blocks - 1) / most_blocks;
    return (together > 0 ? together : 1) * least_block;
}

constexpr int64_t block_count(int64_t rows) { return (rows + rows_per_block(rows) - 1) / rows_per_block(rows); }

struct Kernels {
    // Rows begin <= r < end.
    void (*forward)(const Forward&, int64_t begin, int64_t end);
    // Blocks first <= b < last, of rows_per_block rows each.
    void (*backward)(const Backward&, int64_t first, int64_t last);
    // The same of one block, in two steps, for threads that share out the columns of a few long rows.
    void (*measure)(const Backward&, int64_t begin, int64_t end, RowTerms*);
    void (*backward_columns)(const Backward&, const RowTerms*, Columns);
    void (*reduce)(const Reduction&, Columns);
    void (*moments)(const Moments&, int64_t begin, int64_t end);
    // Whether no element is NaN or infinite.
    bool (*finite)(const Elements&, int64_t begin, int64_t end);
    void (*turn)(Turning&, double* room);
};

}  // namespace normkit

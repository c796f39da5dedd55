// The operators: torch's tensors to the plain pointers of kernels.h, rows shared out among threads, results allocated.
//
//   normalize_rows          -> y
//   normalize_rows_out      -> into out
//   normalize_forward       -> y, statistics
//   add_normalize_forward   -> y, residual + x, statistics
//   add_normalize_rows_out  -> into out and new_residual
//   normalize_backward      -> dx, dweight, dbias (of what they belong to in shape and dtype; empty where not wanted)
//
// kernels/signatures.py says what they take and what `conventions` are; ops/schemas.py defines them with torch. This
// file and tensors.h are all that knows of torch.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "conventions.h"
#include "instructions.h"
#include "tensors.h"
#include "threads.h"

namespace normkit {
namespace {

// normkit.kernels.signatures.version() of the Python files that this one was written for.
constexpr int32_t signatures_version = 0x22b5f45a;

// What is normalized and what is written, x and dy, x and what it is added to.
void check_pair(Type x, Type y) {
    bool is_paired = x == y || (x == Type::float32 && is_half(y)) || (is_half(x) && y == Type::float32);
    STD_TORCH_CHECK(is_paired, "normkit: expected two equal dtypes, or float32 with one of 16 bits");
}

// run(Columns) over n columns of `rows` rows.
template <class Run>
void over_columns(int64_t n, int64_t rows, const Run& run) {
    constexpr int64_t together = 64;
    over_rows((n + together - 1) / together, together * std::max<int64_t>(rows, 1), [&](int64_t begin, int64_t end) {
        run(Columns{begin * together, std::min(n, end * together)});
    });
}

void normalize(const Call& call, const Input& x, const Output& y, double* statistics) {
    check_pair(x.type, y.type);
    if (x.count == 0) return;
    Forward task{call.norm, call.casts, x.type, y.type, x.data(), x.rows, y.data, y.rows, statistics, nullptr};
    const Kernels& table = kernels();
    over_rows(x.count, x.n, [&](int64_t begin, int64_t end) { table.forward(task, begin, end); });
}

Tensor rows(const Tensor& given, const MaybeTensor& weight, const MaybeTensor& bias, int64_t packed, double eps,
            double offset) {
    Conventions conventions(packed);
    Input x(given, conventions.axes);
    Call call(conventions, x.n, x.type, x.type, weight, bias, eps, offset);
    Tensor y = empty(x.shape, call.output);
    normalize(call, x, Output(y, call.output, x.n), nullptr);
    return y;
}

void rows_out(const Tensor& given, const MaybeTensor& weight, const MaybeTensor& bias, int64_t packed, double eps,
              double offset, const Tensor& out) {
    Conventions conventions(packed);
    Input x(given, conventions.axes);
    Call call(conventions, x.n, x.type, x.type, weight, bias, eps, offset);
    normalize(call, x, Output(out, x, conventions.axes), nullptr);
}

std::tuple<Tensor, Tensor> forward(const Tensor& given, const MaybeTensor& weight, const MaybeTensor& bias,
                                   int64_t packed, double eps, double offset) {
    Conventions conventions(packed);
    Input x(given, conventions.axes);
    Call call(conventions, x.n, x.type, x.type, weight, bias, eps, offset);
    Tensor y = empty(x.shape, call.output), statistics = empty_statistics(x.count, x.type);
    normalize(call, x, Output(y, call.output, x.n), static_cast<double*>(statistics.mutable_data_ptr()));
    return {std::move(y), std::move(statistics)};
}

// residual + x row by row, each row normalized while it is in the cache.
void add_and_normalize(const Call& call, const Input& x, const Input& residual, const Output& sum, const Output& y,
                       double* statistics) {
    check_pair(x.type, residual.type);
    STD_TORCH_CHECK(sum.type == residual.type, "normkit: expected a new residual of the residual's dtype");
    check_pair(residual.type, y.type);
    if (x.count == 0) return;
    Addition addition{x.type, residual.type, x.data(), x.rows, residual.data(), residual.rows, sum.data, sum.rows};
    Forward task{call.norm, call.casts, sum.type, y.type, sum.data, sum.rows, y.data, y.rows, statistics, &addition};
    const Kernels& table = kernels();
    over_rows(x.count, x.n, [&](int64_t begin, int64_t end) { table.forward(task, begin, end); });
}

std::tuple<Tensor, Tensor, Tensor> add_forward(const Tensor& x_given, const Tensor& residual_given,
                                               const MaybeTensor& weight, const MaybeTensor& bias, int64_t packed,
                                               double eps, double offset) {
    Conventions conventions(packed);
    Input x(x_given, conventions.axes), residual(residual_given, conventions.axes);
    STD_TORCH_CHECK(x.shape == residual.shape, "normkit: expected tensors of one shape");
    Call call(conventions, x.n, residual.type, x.type, weight, bias, eps, offset);
    Tensor y = empty(x.shape, call.output), sum = empty(x.shape, residual.type);
    Tensor statistics = empty_statistics(x.count, residual.type);
    add_and_normalize(call, x, residual, Output(sum, residual.type, x.n), Output(y, call.output, x.n),
                      static_cast<double*>(statistics.mutable_data_ptr()));
    return {std::move(y), std::move(sum), std::move(statistics)};
}

void add_rows_out(const Tensor& x_given, const Tensor& residual_given, const MaybeTensor& weight,
                  const MaybeTensor& bias, int64_t packed, double eps, double offset, const Tensor& out,
                  const Tensor& new_residual) {
    Conventions conventions(packed);
    Input x(x_given, conventions.axes), residual(residual_given, conventions.axes);
    STD_TORCH_CHECK(x.shape == residual.shape, "normkit: expected tensors of one shape");
    Call call(conventions, x.n, residual.type, x.type, weight, bias, eps, offset);
    add_and_normalize(call, x, residual, Output(new_residual, x, conventions.axes), Output(out, x, conventions.axes),
                      nullptr);
}

// A parameter's gradient: the sums of blocks of rows, and what they add up to; nothing if it is not wanted.
struct ParameterGradient {
    std::unique_ptr<double[]> blocks;
    Tensor total;

    ParameterGradient(const MaybeTensor& parameter, bool is_wanted, int64_t count, int64_t n, Type otherwise)
        : blocks(is_wanted ? new double[count * n] : nullptr),
          total(is_wanted ? empty(Shape(*parameter), type_of(*parameter)) : nothing(otherwise)) {}

    void add_up(int64_t count, int64_t n, double multiplier) {
        if (!blocks) return;
        Reduction task{blocks.get(), count, n, multiplier, type_of(total), total.mutable_data_ptr()};
        const Kernels& table = kernels();
        over_columns(n, count, [&](Columns columns) { table.reduce(task, columns); });
    }
};

void run_backward(const Backward& task) {
    const Kernels& table = kernels();
    const int64_t n = task.norm.n, blocks = block_count(task.rows);
    if (blocks == 1 && task.rows * n > grain) {
        // Few rows, and long: threads share out their columns.
        RowTerms terms[least_block];
        over_rows(task.rows, n, [&](int64_t begin, int64_t end) { table.measure(task, begin, end, terms); });
        if (std::none_of(terms, terms + task.rows, [](const RowTerms& row) { return row.is_extreme; })) {
            return over_columns(n, task.rows, [&](Columns columns) { table.backward_columns(task, terms, columns); });
        }
    }
    over_rows(blocks, std::max<int64_t>(rows_per_block(task.rows) * n, 1),
              [&](int64_t first, int64_t last) { table.backward(task, first, last); });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy_given, const Tensor& x_given, const Tensor& statistics,
                                            const MaybeTensor& weight, const MaybeTensor& bias, int64_t packed,
                                            double eps, double offset, const MaybeTensor& addend, bool needs_x,
                                            bool needs_weight, bool needs_bias) {
    Conventions conventions(packed);
    Input x(x_given, conventions.axes), dy(dy_given, conventions.axes);
    std::optional<Input> added;
    if (addend) added.emplace(*addend, conventions.axes);
    STD_TORCH_CHECK(x.shape == dy.shape && (!added || x.shape == added->shape), "normkit: expected tensors of one shape");
    STD_TORCH_CHECK(!added || added->type == x.type, "normkit: expected an addend of the input's dtype");
    check_pair(x.type, dy.type);
    STD_TORCH_CHECK(type_of(statistics) == Type::float64 && ask(aoti_torch_is_contiguous, statistics) &&
                        ask(aoti_torch_get_numel, statistics) == x.count * statistics_width(x.type),
                    "normkit: expected the statistics of the forward pass");
    STD_TORCH_CHECK((weight || !needs_weight) && (bias || !needs_bias), "normkit: expected the parameters");
    int64_t n = x.n, blocks = block_count(x.count);
    // The bias has no part in its gradient; its size must fit all the same.
    STD_TORCH_CHECK(!needs_bias || ask(aoti_torch_get_numel, *bias) == n, "normkit: expected a bias of ", n, " numbers");
    Call call(conventions, n, x.type, x.type, weight, std::nullopt, eps, offset);
    Tensor dx = needs_x ? empty(x.shape, x.type) : nothing(x.type);
    ParameterGradient dweight(weight, needs_weight, blocks, n, x.type), dbias(bias, needs_bias, blocks, n, x.type);
    const bool is_narrow = weight && is_half(type_of(*weight)) && !(needs_bias && !is_half(type_of(*bias)));
    Backward task{call.norm, x.count, x.type, dy.type, x.data(), x.rows, dy.data(), dy.rows,
                  static_cast<const double*>(statistics.const_data_ptr()),
                  needs_x ? dx.mutable_data_ptr() : nullptr, Rows::contiguous(n),
                  added ? added->data() : nullptr, added ? added->rows : Rows(), dweight.blocks.get(),
                  dbias.blocks.get(), is_narrow};
    run_backward(task);
    dweight.add_up(blocks, n, call.norm.multiplier);
    dbias.add_up(blocks, n, 1);
    return {std::move(dx), std::move(dweight.total), std::move(dbias.total)};
}

}  // namespace
}  // namespace normkit

extern "C" __attribute__((visibility("default"))) int32_t normkit_signatures_version() {
    return normkit::signatures_version;
}

STABLE_TORCH_LIBRARY_IMPL(normkit, CPU, m) {
    m.impl("normalize_rows", TORCH_BOX(&normkit::rows));
    m.impl("normalize_rows_out", TORCH_BOX(&normkit::rows_out));
    m.impl("normalize_forward", TORCH_BOX(&normkit::forward));
    m.impl("add_normalize_forward", TORCH_BOX(&normkit::add_forward));
    m.impl("add_normalize_rows_out", TORCH_BOX(&normkit::add_rows_out));
    m.impl("normalize_backward", TORCH_BOX(&normkit::backward));
}

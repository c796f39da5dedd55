// torch's tensors as shapes, rows and pointers. Each question is a call into torch, so each is asked once; memory comes
// from the C interface, past the dispatcher.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels.h"

namespace normkit {
namespace {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// torch's numbers of the dtypes, in the order of Type.
const std::array<int32_t, 4> dtype_numbers = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(),
                                              aoti_torch_dtype_float16(), aoti_torch_dtype_float64()};

template <class Answer>
Answer ask(AOTITorchError (*question)(AtenTensorHandle, Answer*), const Tensor& tensor) {
    Answer answer;
    TORCH_ERROR_CODE_CHECK(question(tensor.get(), &answer));
    return answer;
}

Type type_of(const Tensor& tensor) {
    int32_t number = ask(aoti_torch_get_dtype, tensor);
    for (size_t type = 0; type < dtype_numbers.size(); ++type) {
        if (dtype_numbers[type] == number) return static_cast<Type>(type);
    }
    STD_TORCH_CHECK(false, "normkit: expected a floating-point tensor of 16, 32 or 64 bits");
}

struct Shape {
    int64_t axes;
    const int64_t* sizes;

    explicit Shape(const Tensor& tensor)
        : axes(ask(aoti_torch_get_dim, tensor)), sizes(ask(aoti_torch_get_sizes, tensor)) {}
    Shape(int64_t axes, const int64_t* sizes) : axes(axes), sizes(sizes) {}
    bool operator==(const Shape& other) const {
        return axes == other.axes && std::equal(sizes, sizes + axes, other.sizes);
    }
    int64_t product(int64_t begin, int64_t end) const {
        int64_t result = 1;
        for (int64_t axis = begin; axis < end; ++axis) result *= sizes[axis];
        return result;
    }
};

Tensor empty(const Shape& shape, Type type) {
    constexpr int64_t most_axes = 64;
    STD_TORCH_CHECK(shape.axes <= most_axes, "normkit: expected at most ", most_axes, " axes, got ", shape.axes);
    int64_t strides[most_axes], stride = 1;
    for (int64_t axis = shape.axes - 1; axis >= 0; --axis) {
        strides[axis] = stride;
        stride *= std::max<int64_t>(shape.sizes[axis], 1);
    }
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.axes, shape.sizes, strides,
                                                    dtype_numbers[static_cast<size_t>(type)],
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

Tensor empty_statistics(int64_t count, Type type) {
    int64_t sizes[] = {count, statistics_width(type)};
    return empty(Shape(2, sizes), Type::float64);
}

// What is given in place of a gradient that is not wanted.
Tensor nothing(Type type) {
    int64_t size = 0;
    return empty(Shape(1, &size), type);
}

// Where the rows of a tensor are; nothing if a row is not contiguous, or there are too many axes.
std::optional<Rows> rows_of(const Tensor& tensor, const Shape& shape, int64_t row_axes) {
    const int64_t* strides = ask(aoti_torch_get_strides, tensor);
    int64_t stride = 1, axis = shape.axes - 1;
    for (; axis >= shape.axes - row_axes; --axis) {
        if (shape.sizes[axis] > 1 && strides[axis] != stride) return std::nullopt;
        stride *= shape.sizes[axis];
    }
    Rows rows;
    for (int64_t outer = 0; outer <= axis; ++outer) {
        if (!rows.append(shape.sizes[outer], strides[outer])) return std::nullopt;
    }
    return rows;
}

// A tensor that is read, and where its rows are; copied if they cannot be walked.
struct Input {
    const Tensor* given;
    MaybeTensor copy;
    Type type;
    Shape shape;
    Rows rows;
    int64_t n, count;

    Input(const Tensor& tensor, int64_t row_axes) : given(&tensor), type(type_of(tensor)), shape(tensor) {
        STD_TORCH_CHECK(shape.axes >= row_axes, "normkit: expected at least ", row_axes, " axes, got ", shape.axes);
        n = shape.product(shape.axes - row_axes, shape.axes);
        count = n == 0 ? 0 : shape.product(0, shape.axes - row_axes);
        std::optional<Rows> found = rows_of(tensor, shape, row_axes);
        if (!found) {
            copy = torch::stable::contiguous(tensor);
            found = Rows::contiguous(n);
        }
        rows = *found;
    }
    const void* data() const { return (copy ? *copy : *given).const_data_ptr(); }
};

// A tensor of the caller's that is written to.
struct Output {
    Type type;
    void* data;
    Rows rows;

    Output(const Tensor& tensor, const Input& like, int64_t row_axes) : type(type_of(tensor)) {
        Shape shape(tensor);
        STD_TORCH_CHECK(shape == like.shape, "normkit: expected tensors of one shape");
        // Strides of an empty tensor say nothing.
        std::optional<Rows> found = like.count == 0 ? Rows() : rows_of(tensor, shape, row_axes);
        STD_TORCH_CHECK(found.has_value(), "normkit: expected out with contiguous rows");
        rows = *found;
        data = tensor.mutable_data_ptr();
    }
    // One that was just allocated.
    Output(const Tensor& tensor, Type type, int64_t n)
        : type(type), data(tensor.mutable_data_ptr()), rows(Rows::contiguous(n)) {}
};

}  // namespace
}  // namespace normkit

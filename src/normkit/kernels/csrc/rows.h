// Rows of a tensor: where each begins, whatever the strides of the leading axes.
//
//   tensor (a, b, n), last axis contiguous  ->  row r of a * b begins at offset(r), in elements
//
// Neighbouring axes that lie as one are merged, so that nearly every tensor has a single stride.
#pragma once

#include <cstdint>

namespace normkit {

struct Rows {
    static constexpr int most_axes = 16;

    int axes = 0;
    int64_t size[most_axes] = {};
    int64_t stride[most_axes] = {};

    // Adds the next axis, outermost first; false if there is no room.
    bool append(int64_t axis_size, int64_t axis_stride) {
        if (axis_size == 1) return true;
        if (axes > 0 && stride[axes - 1] == axis_size * axis_stride) {
            size[axes - 1] *= axis_size;
            stride[axes - 1] = axis_stride;
            return true;
        }
        if (axes == most_axes) return false;
        size[axes] = axis_size;
        stride[axes] = axis_stride;
        ++axes;
        return true;
    }

    static Rows contiguous(int64_t n) {
        Rows rows;
        rows.axes = 1;
        rows.stride[0] = n;
        return rows;
    }

    // Short rows are many, so what nearly every tensor has is a product and no more.
    int64_t offset(int64_t row) const { return axes <= 1 ? row * stride[0] : offset_by_axes(row); }

    [[gnu::noinline]] int64_t offset_by_axes(int64_t row) const {
        int64_t sum = 0;
        // The outermost size is never needed.
        for (int axis = axes - 1; axis > 0; --axis) {
            sum += row % size[axis] * stride[axis];
            row /= size[axis];
        }
        return sum + row * stride[0];
    }
};

}  // namespace normkit

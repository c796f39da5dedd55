// The table of kernels of one instruction set: from dtypes known at run time to templates.
#pragma once

#include "backward.h"
#include "forward.h"
#include "hadamard.h"
#include "moments.h"

namespace normkit {
namespace {

// Dtypes of a row and of what it becomes: equal, or float32 and one of 16 bits. operators.cpp refuses the others.
template <class T, class Out>
constexpr bool is_mixed = (std::is_same_v<T, float> && sizeof(Out) == 2) || (sizeof(T) == 2 && std::is_same_v<Out, float>);
template <class T, class Out>
constexpr bool is_pair =
    (std::is_same_v<T, Out> || is_mixed<T, Out>) &&
    (!Instructions::is_for_bfloat16 || std::is_same_v<T, bfloat16> || std::is_same_v<Out, bfloat16>);

void any_add(const Addition& task, int64_t n, int64_t row) {
    with_type(task.x_type, [&]<class T>() {
        with_type(task.residual_type, [&]<class R>() {
            if constexpr (std::is_same_v<T, R> || is_mixed<T, R>) add<T, R>(task, n, row);
        });
    });
}

void any_forward(const Forward& task, int64_t begin, int64_t end) {
    with_type(task.x_type, [&]<class T>() {
        with_type(task.y_type, [&]<class Out>() {
            if constexpr (is_pair<T, Out>) forward_rows<T, Out>(task, begin, end, any_add);
        });
    });
}

template <class Function>
void with_backward(const Backward& task, const Function& function) {
    with_type(task.x_type, [&]<class T>() {
        with_type(task.dy_type, [&]<class D>() {
            if constexpr (is_pair<T, D>) function.template operator()<T, D>();
        });
    });
}

void any_backward(const Backward& task, int64_t first, int64_t last) {
    with_backward(task, [&]<class T, class D>() { backward_blocks<T, D>(task, first, last); });
}

void any_measure(const Backward& task, int64_t begin, int64_t end, RowTerms* terms) {
    with_backward(task, [&]<class T, class D>() { measure_rows<T, D>(task, begin, end, terms); });
}

void any_columns(const Backward& task, const RowTerms* terms, Columns columns) {
    with_backward(task, [&]<class T, class D>() { backward_columns<T, D>(task, terms, columns); });
}

void any_reduce(const Reduction& task, Columns columns) {
    with_type(task.type, [&]<class P>() { add_blocks<P>(task, columns); });
}

void any_moments(const Moments& task, int64_t begin, int64_t end) {
    with_type(task.x_type, [&]<class T>() { find_moments<T>(task, begin, end); });
}

bool any_finite(const Elements& task, int64_t begin, int64_t end) {
    bool result = false;
    with_type(task.x_type, [&]<class T>() { result = is_finite<T>(task, begin, end); });
    return result;
}

[[maybe_unused]] constexpr Kernels table{any_forward, any_backward, any_measure,  any_columns,
                                         any_reduce,  any_moments,  any_finite,   turn};

}  // namespace
}  // namespace normkit

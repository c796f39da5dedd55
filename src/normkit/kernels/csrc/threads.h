// Rows shared out among threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace normkit {
namespace {

// Elements that are worth a thread of their own.
constexpr int64_t grain = 32768;

// run(begin, end) over all rows; short work stays on this thread.
template <class Run>
void over_rows(int64_t rows, int64_t n, const Run& run) {
    if (rows * n <= grain || rows == 1) {
        run(0, rows);
    } else {
        torch::stable::parallel_for(0, rows, std::max<int64_t>(1, grain / n), run);
    }
}

}  // namespace
}  // namespace normkit
